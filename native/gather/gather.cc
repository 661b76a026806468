#include "gather/gather.h"

#include <algorithm>
#include <cstring>

namespace petps::gather {

namespace {

// How many pieces ahead a copy prefetches. 8 rows of 512 bytes are 64 cache lines: enough to cover
// the latency of memory, few enough for the first-level cache and the queue of its fill buffers.
constexpr size_t kPrefetchPieces = 8;
// How many bytes of a piece a copy prefetches; the hardware prefetches the rest of a longer piece.
constexpr size_t kPrefetchBytes = 1024;
constexpr size_t kCacheLineBytes = 64;

inline void prefetch_piece(const Piece& piece) {
  const size_t n = std::min(piece.bytes, kPrefetchBytes);
  for (size_t at = 0; at < n; at += kCacheLineBytes) __builtin_prefetch(piece.address + at, 0, 0);
}

}  // namespace

void GatherList::clear() {
  header_bytes_ = 0;
  pieces_.clear();
  bytes_ = 0;
}

std::span<std::byte> GatherList::header(size_t bytes, size_t room) {
  // Only grow the buffer: resizing it down and up again would write zeros over the whole header.
  if (header_.size() < bytes + room) header_.resize(bytes + room);
  bytes_ += bytes - header_bytes_;
  header_bytes_ = bytes;
  return {header_.data(), bytes};
}

void GatherList::assign(std::span<const std::byte> frame) {
  clear();
  const std::span<std::byte> out = header(frame.size());
  if (!frame.empty()) std::memcpy(out.data(), frame.data(), frame.size());
}

size_t GatherList::copy_some(Position& at, std::byte* out, size_t most) const {
  const size_t count = pieces_.size() + 1;
  for (size_t i = at.piece; i < std::min(count, at.piece + kPrefetchPieces); ++i)
    prefetch_piece(piece(i));
  size_t copied = 0;
  while (at.piece < count && copied < most) {
    if (at.piece + kPrefetchPieces < count) prefetch_piece(piece(at.piece + kPrefetchPieces));
    const Piece p = piece(at.piece);
    const size_t n = std::min(p.bytes - at.offset, most - copied);
    if (n > 0) std::memcpy(out + copied, p.address + at.offset, n);
    copied += n;
    at.offset += n;
    if (at.offset == p.bytes) at = {at.piece + 1, 0};
  }
  return copied;
}

size_t GatherList::fill_iovecs(Position at, std::span<iovec> out) const {
  const size_t count = pieces_.size() + 1;
  size_t filled = 0;
  for (size_t i = at.piece; i < count && filled < out.size(); ++i) {
    const Piece p = piece(i);
    const size_t skip = i == at.piece ? at.offset : 0;
    if (p.bytes <= skip) continue;
    // sendmsg only reads; iovec has no const form.
    out[filled++] = {const_cast<std::byte*>(p.address + skip), p.bytes - skip};
  }
  return filled;
}

Position GatherList::advance(Position at, size_t bytes) const {
  const size_t count = pieces_.size() + 1;
  while (at.piece < count) {
    const size_t left = piece(at.piece).bytes - at.offset;
    if (bytes < left) return {at.piece, at.offset + bytes};
    bytes -= left;
    at = {at.piece + 1, 0};
  }
  return at;
}

}  // namespace petps::gather
