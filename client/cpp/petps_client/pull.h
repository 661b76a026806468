// One pull over one connection: planned into requests, pipelined, received in place.
#pragma once

#include <sys/uio.h>

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
  uint64_t found = 0;                   // set by the exchange

  size_t out_row_bytes() const {
    const Table& about = table->table;
    return form == Form::kStored ? about.row_bytes : size_t{about.dim} * sizeof(float);
  }
  size_t position(size_t key) const { return positions == nullptr ? key : positions[key]; }
  const std::byte* default_row() const {
    return form == Form::kStored ? table->default_stored.data()
                                 : reinterpret_cast<const std::byte*>(table->default_values.data());
  }
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

// One pull over one connection.
// ASSUMPTIONS: one thread. The parts, their tables and their memory outlive the exchange.
// ERRORS: the server's own errors (the connection stays usable: every reply was read);
// kDeadlineExceeded and kUnavailable (the connection is broken). A reply that contradicts the
// request, itself or the catalogue is kUnavailable, and nothing in it is trusted.
class PullExchange {
 public:
  PullExchange(Connection& connection, const PullLimits& limits, std::span<PullPart> parts,
               uint32_t instance, PullVersion version);
  base::Status run(const Deadline& deadline);
  // The steps of run(), for several exchanges in flight: begin, then receive_one until is_done.
  // An error of receive_one terminates the exchange; error() is an error that the server sent.
  base::Status begin();
  base::Status receive_one(const Deadline& deadline);
  bool is_done() const { return answered_ == sent_; }
  const base::Status& error() const { return error_; }
  Connection& connection() const { return connection_; }
  uint64_t applied_version() const { return applied_version_; }
  size_t requests() const { return requests_.size(); }

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
    bool answered;
  };

  void plan(const PullLimits& limits);
  void send_requests();
  void encode(const Request& request, uint64_t id);
  base::Status receive(const Deadline& deadline);
  base::Status receive_error(const wire::FrameHeader& header, const Deadline& deadline);
  base::Status receive_head(const wire::FrameHeader& header, const Request& request,
                            const Deadline& deadline, wire::PullReply& reply);
  base::Status check_section(const wire::PullReplySection& section, const Piece& piece);
  base::Status receive_rows(const Piece& piece, const wire::PullReplySection& section,
                            const uint64_t* bitmap, const Deadline& deadline);
  base::Status receive_in_order(const Piece& piece, size_t found, const uint64_t* bitmap,
                                const Deadline& deadline);
  base::Status receive_scattered(const Piece& piece, size_t found, const uint64_t* bitmap,
                                 const Deadline& deadline);
  base::Status read_to_scratch(size_t bytes, const Deadline& deadline);
  void remember(base::Status error) {
    if (error_.ok()) error_ = std::move(error);
  }

  Connection& connection_;
  const std::span<PullPart> parts_;
  const uint32_t instance_;
  const PullVersion version_;
  size_t window_;
  std::vector<Piece> pieces_;
  std::vector<Request> requests_;
  uint64_t first_id_ = 0;
  size_t sent_ = 0;
  size_t answered_ = 0;
  uint64_t applied_version_ = 0;
  base::Status error_;  // the first error that the server sent
  std::vector<wire::PullSection> sections_;
  std::vector<uint64_t> keys_;
  std::vector<uint64_t> head_;
  std::vector<iovec> places_;
};

}  // namespace petps::client
