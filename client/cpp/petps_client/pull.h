// One pull over one connection: split into requests, pipelined, received in place.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "petps_client/catalogue.h"
#include "petps_client/connection.h"

namespace petps::client {

// The part of an exchange for one table. The rows of `keys` go to `out`: packed in order, or
// each to its position.
struct PullPart {
  const CatalogueTable* table = nullptr;
  Form form = Form::kFloat32;
  std::span<const uint64_t> keys;       // already distinct, if dedup was done
  std::byte* out = nullptr;             // rows of out_row_bytes()
  uint8_t* mask = nullptr;              // one byte per row of `out`, or null
  const uint32_t* positions = nullptr;  // each key's row in `out`; null: in order
  uint64_t found_count = 0;             // set by the exchange

  size_t out_row_bytes() const {
    return form == Form::kStored ? table->table.row_bytes : table->table.dim * sizeof(float);
  }
  size_t position(size_t key) const { return positions == nullptr ? key : positions[key]; }
  const std::byte* default_row() const { return table->default_row(form); }
  // Return whether rows arrive in the form that the caller wants.
  bool in_place() const {
    return form == Form::kStored || table->table.dtype == codec::Dtype::kF32;
  }
};

struct PullLimits {
  wire::Limits wire;
  uint32_t keys_per_request = 500;
  uint32_t requests_in_flight = 8;
};

// Rows must be at least as new as version `least`. A server may wait up to `wait_ms` for that.
struct PullVersion {
  uint64_t least = 0;
  uint32_t wait_ms = 0;
};

// One pull over one connection: begin, then receive_one until is_done.
// ASSUMPTIONS: one thread. The parts, their tables and their memory outlive the exchange.
// ERRORS: the server's own errors (the connection stays usable: every reply was read);
// kDeadlineExceeded and kUnavailable (the connection is broken). A reply that contradicts the
// request, itself or the catalogue is kUnavailable, and nothing in it is used.
class PullExchange {
 public:
  PullExchange(Connection& connection, const PullLimits& limits, std::span<PullPart> parts,
               uint32_t instance, PullVersion version);
  // Let every request carry this context. Call it before begin(), only if the server records spans.
  void carry(const wire::TraceContext& trace) { trace_ = trace; }
  // Send the first requests.
  base::Status begin();
  // Receive one reply and send further requests. After an error the exchange cannot go on.
  base::Status receive_one(const Deadline& deadline);
  // The same, but read only what has arrived. Set `is_whole` to whether that was the reply's end;
  // if not, a later call goes on from there.
  base::Status receive_now(bool& is_whole);
  bool is_done() const { return received_ == sent_; }
  // Return the first error that the server sent; OK: none.
  const base::Status& error() const { return error_; }
  uint64_t applied_version() const { return applied_version_; }

 private:
  struct Piece {  // consecutive keys of one part
    uint32_t part;
    uint32_t keys;
    size_t first;
  };
  struct Request {
    size_t first_piece;
    uint32_t pieces;
    uint32_t keys;
    bool has_reply;
  };

  // What of the next reply is to be read. kNothing: its reading has not begun.
  enum class Stage : uint8_t { kNothing, kHeader, kError, kHead, kRows };

  void plan(const PullLimits& limits);
  void send_requests();
  void encode(const Request& request, uint64_t id);
  void expect(Stage stage, std::span<std::byte> bytes);
  void expect_rows();
  void expect_scattered(const PullPart& part);
  base::Status take_stage();
  base::Status take_header();
  base::Status take_head();
  base::Status check_section(const wire::PullReplySection& section, const Piece& piece);
  void take_rows();
  const Piece& piece() const { return pieces_[answered_->first_piece + piece_]; }
  // Return memory for the head of a reply, or for an error's text: 8-byte aligned.
  std::span<std::byte> head_of(size_t bytes) {
    head_.resize((bytes + 7) / 8);
    head_bytes_ = bytes;
    return std::as_writable_bytes(std::span(head_)).first(bytes);
  }
  std::span<const std::byte> head() const {
    return std::as_bytes(std::span(head_)).first(head_bytes_);
  }
  void record_error(base::Status error) {
    if (error_.ok()) error_ = std::move(error);
  }

  Connection& connection_;
  const std::span<PullPart> parts_;
  const uint32_t instance_;
  const PullVersion version_;
  const size_t body_bytes_max_;
  wire::TraceContext trace_;  // not sampled: none
  size_t window_;
  std::vector<Piece> pieces_;
  std::vector<Request> requests_;
  uint64_t first_id_ = 0;
  size_t sent_ = 0;
  size_t received_ = 0;  // replies
  uint64_t applied_version_ = 0;
  base::Status error_;  // the first error that the server sent
  std::vector<wire::PullSection> sections_;
  std::vector<uint64_t> keys_;

  // The reply that is being read.
  Stage stage_ = Stage::kNothing;
  std::array<std::byte, wire::kHeaderBytes> header_bytes_{};
  wire::FrameHeader header_;
  Request* answered_ = nullptr;  // null: none that is waiting
  std::vector<uint64_t> head_;
  size_t head_bytes_ = 0;
  wire::PullReply reply_;             // in head_
  size_t piece_ = 0;                  // of the request, whose rows are being read
  const uint64_t* bitmap_ = nullptr;  // of this piece
  std::vector<iovec> places_;         // of what is being read
  std::span<iovec> left_;             // of places_: not read yet
};

}  // namespace petps::client
