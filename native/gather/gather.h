// Room gather: the list of the pieces of one reply, in order, without copies of them.
//
// Owns:        GatherList: a header buffer of its own, then (address, length) pieces; copying the
//              bytes out; filling iovecs.
// Never does:  keep rows alive (the Pin posted beside the list does); send; know what a row is.
// Called by:   server (builds a list); transport (reads it).
// Invariants:  The bytes come out in the order in which they were added, header first. Adjacent
//              pieces are merged, so a run of neighbouring rows is one piece. clear() keeps the
//              memory, so a reused list allocates nothing.
// Threads:     one thread at a time.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace petps::gather {

// The limit of one sendmsg on Linux (UIO_MAXIOV); more fail with EMSGSIZE.
inline constexpr size_t kMaxIovecs = 1024;

struct Piece {
  const std::byte* address;
  size_t bytes;
};

// The position of a transfer in a list. Piece 0 is the header.
struct Position {
  size_t piece = 0;
  size_t offset = 0;  // inside that piece
};

class GatherList {
 public:
  GatherList() = default;
  GatherList(GatherList&&) noexcept = default;
  GatherList& operator=(GatherList&&) noexcept = default;
  GatherList(const GatherList&) = delete;
  GatherList& operator=(const GatherList&) = delete;

  // Empty the list; keep its memory.
  void clear();
  // Return the header buffer: `bytes` long, 8-byte aligned, content undefined. It has room for
  // `room` more bytes of append(). Valid until the next header() or a move.
  std::span<std::byte> header(size_t bytes, size_t room = 0);
  // Append a copy of the bytes to the header. ASSUMPTIONS: header() made room; no piece was added
  // yet.
  void append(const std::byte* address, size_t bytes) {
    std::memcpy(header_.data() + header_bytes_, address, bytes);
    header_bytes_ += bytes;
    bytes_ += bytes;
  }
  // Return the room behind the header, into which its first bytes may be written. grow() then makes
  // them part of the header. ASSUMPTIONS: as append().
  std::byte* room() { return header_.data() + header_bytes_; }
  void grow(size_t bytes) {
    header_bytes_ += bytes;
    bytes_ += bytes;
  }
  // Make this a list of only a header: an encoded frame.
  void assign(std::span<const std::byte> frame);
  // Append a piece. ASSUMPTION: the memory stays readable while the Pin lives that is posted with
  // this list.
  void add(const std::byte* address, size_t bytes) {
    bytes_ += bytes;
    if (!pieces_.empty() && pieces_.back().address + pieces_.back().bytes == address) {
      pieces_.back().bytes += bytes;
      return;
    }
    pieces_.push_back({address, bytes});
  }

  size_t bytes() const { return bytes_; }  // header included
  bool empty() const { return bytes_ == 0; }
  size_t capacity() const { return header_.capacity(); }  // bytes of memory of the header buffer
  size_t pieces() const { return pieces_.size(); }        // header not included
  std::span<const std::byte> header_bytes() const { return {header_.data(), header_bytes_}; }

  // Copy the whole list into out[0, bytes()); prefetch the pieces ahead.
  void copy_to(std::byte* out) const { copy_from(Position{}, out); }
  // Copy the list from `at` to the end.
  void copy_from(Position at, std::byte* out) const { copy_some(at, out, bytes_); }
  // Copy at most `most` bytes from `at` and move `at` behind them. Return how many bytes.
  size_t copy_some(Position& at, std::byte* out, size_t most) const;
  // Fill iovecs from `at` on. Return how many (at most out.size()).
  size_t fill_iovecs(Position at, std::span<iovec> out) const;
  // Return the position `bytes` after `at`, or the end if the list is shorter.
  Position advance(Position at, size_t bytes) const;
  bool at_end(Position at) const { return at.piece > pieces_.size(); }

 private:
  Piece piece(size_t i) const {
    return i == 0 ? Piece{header_.data(), header_bytes_} : pieces_[i - 1];
  }

  std::vector<std::byte> header_;
  size_t header_bytes_ = 0;
  std::vector<Piece> pieces_;
  size_t bytes_ = 0;
};

}  // namespace petps::gather
