#include "petps_client/pull.h"

#include <algorithm>
#include <cstring>

namespace petps::client {

using base::Code;
using base::Status;

namespace {

bool is_present(const uint64_t* bitmap, size_t key) {
  return ((bitmap[key / 64] >> (key % 64)) & 1) != 0;
}

// Move `found_count` rows, packed at the start of `rows`, to their keys' places. Give missing keys
// the default row. Begin at the back, because a row only ever moves to a later place.
void place_rows(const uint64_t* bitmap, size_t keys, size_t found_count,
                const std::byte* default_row, size_t row_bytes, std::byte* rows) {
  // When found_count == i + 1, all remaining rows are already in place.
  for (size_t i = keys; i-- > 0 && found_count <= i;) {
    const std::byte* from = is_present(bitmap, i) ? rows + --found_count * row_bytes : default_row;
    std::memmove(rows + i * row_bytes, from, row_bytes);
  }
}

}  // namespace

PullExchange::PullExchange(Connection& connection, const PullLimits& limits,
                           std::span<PullPart> parts, uint32_t instance, PullVersion version)
    : connection_(connection),
      parts_(parts),
      instance_(instance),
      version_(version),
      body_bytes_max_(limits.wire.body_bytes),
      window_(std::clamp<size_t>(limits.requests_in_flight, 1, limits.wire.in_flight)) {
  plan(limits);
}

// Fill requests in the order of the keys, each up to the limits of keys, sections and reply size.
void PullExchange::plan(const PullLimits& limits) {
  const size_t keys_limit =
      std::clamp<size_t>(limits.keys_per_request, 1, limits.wire.keys_per_pull);
  const size_t bytes_limit = limits.wire.body_bytes;
  size_t bytes = 0;
  for (uint32_t p = 0; p < parts_.size(); ++p) {
    // Reply bytes per key: its row, and a bit of a bitmap (each section adds one word).
    const size_t row_bytes = parts_[p].table->table.row_bytes + size_t{1};
    const size_t section_bytes = sizeof(wire::PullReplySection) + sizeof(uint64_t);
    size_t left = parts_[p].keys.size();
    while (left > 0) {
      const bool is_full = requests_.empty() || requests_.back().keys >= keys_limit ||
                           requests_.back().pieces >= limits.wire.sections_per_pull ||
                           bytes + section_bytes + row_bytes > bytes_limit;
      if (is_full) {
        requests_.push_back({pieces_.size(), 0, 0, false});
        bytes = sizeof(wire::PullReplyPrefix);
      }
      Request& request = requests_.back();
      bytes += section_bytes;
      const size_t fitting = bytes < bytes_limit ? (bytes_limit - bytes) / row_bytes : 0;
      const size_t keys = std::min({left, keys_limit - request.keys, std::max<size_t>(fitting, 1)});
      pieces_.push_back({p, static_cast<uint32_t>(keys), parts_[p].keys.size() - left});
      request.pieces += 1;
      request.keys += static_cast<uint32_t>(keys);
      bytes += keys * row_bytes;
      left -= keys;
    }
  }
}

void PullExchange::encode(const Request& request, uint64_t id) {
  sections_.clear();
  keys_.clear();
  for (size_t i = 0; i < request.pieces; ++i) {
    const Piece& piece = pieces_[request.first_piece + i];
    sections_.push_back({parts_[piece.part].table->id, piece.keys});
    const auto keys = parts_[piece.part].keys.subspan(piece.first, piece.keys);
    if (request.pieces > 1) keys_.insert(keys_.end(), keys.begin(), keys.end());
  }
  wire::PullRequest pull;
  pull.min_version = version_.least;
  // Only the first request waits for the version. The server reads the next request of the
  // connection afterwards, so the others wait too.
  pull.wait_ms = &request == &requests_.front() ? version_.wait_ms : 0;
  pull.instance = instance_;
  pull.sections = sections_;
  const size_t body_bytes =
      wire::pull_request_bytes(request.pieces, request.keys) - wire::kHeaderBytes;
  // A request that just fits goes without the context.
  if (body_bytes + sizeof(trace_) <= body_bytes_max_) pull.trace = trace_;
  const Piece& first = pieces_[request.first_piece];
  pull.keys = request.pieces == 1 ? parts_[first.part].keys.subspan(first.first, first.keys)
                                  : std::span<const uint64_t>(keys_);
  wire::encode_pull(id, pull, connection_.frame());
  connection_.queue(connection_.frame());
}

void PullExchange::send_requests() {
  // Send half a window at a time, so that one system call carries several requests.
  if (!error_.ok() || sent_ == requests_.size() || sent_ - received_ > window_ / 2) return;
  const size_t until = std::min(requests_.size(), received_ + window_);
  for (; sent_ < until; ++sent_) {
    const uint64_t id = connection_.next_request_id();
    if (sent_ == 0) first_id_ = id;
    encode(requests_[sent_], id);
  }
}

Status PullExchange::begin() {
  applied_version_ = requests_.empty() ? 0 : UINT64_MAX;
  send_requests();
  return connection_.flush();
}

Status PullExchange::receive_one(const Deadline& deadline) {
  PETPS_RETURN_IF_ERROR(receive(deadline));
  ++received_;
  send_requests();  // nothing after an error; the replies in flight are still read
  return connection_.flush();
}

Status PullExchange::receive(const Deadline& deadline) {
  wire::FrameHeader header;
  PETPS_RETURN_IF_ERROR(connection_.read_header(header, deadline));
  const uint64_t number = header.request_id - first_id_;
  const bool is_expected = number < sent_ && !requests_[number].has_reply;
  if (header.code != 0) {
    Status error;
    PETPS_RETURN_IF_ERROR(connection_.read_error(header, deadline, error));
    if (!is_expected) return connection_.break_by_error(error);
    requests_[number].has_reply = true;
    record_error(std::move(error));
    return {};
  }
  if (!is_expected) return connection_.distrust("a reply to a request that is not waiting for one");
  Request& request = requests_[number];
  request.has_reply = true;
  wire::PullReply reply;
  PETPS_RETURN_IF_ERROR(receive_head(header, request, deadline, reply));
  const uint64_t* bitmap = reply.bitmaps.data();
  for (size_t i = 0; i < request.pieces; ++i) {
    const Piece& piece = pieces_[request.first_piece + i];
    PETPS_RETURN_IF_ERROR(receive_rows(piece, reply.sections[i], bitmap, deadline));
    bitmap += wire::bitmap_words(piece.keys);
  }
  applied_version_ = std::min(applied_version_, reply.applied_version);
  return {};
}

Status PullExchange::receive_head(const wire::FrameHeader& header, const Request& request,
                                  const Deadline& deadline, wire::PullReply& reply) {
  // The request determines this length. The client reads no more, whatever the server says.
  size_t expected = sizeof(wire::PullReplyPrefix) + request.pieces * sizeof(wire::PullReplySection);
  for (size_t i = 0; i < request.pieces; ++i) {
    expected += wire::bitmap_words(pieces_[request.first_piece + i].keys) * sizeof(uint64_t);
  }
  const bool is_pull =
      header.opcode == (static_cast<uint16_t>(wire::Opcode::kPull) | wire::kReplyBit);
  if (!is_pull || header.sections != request.pieces || header.body_bytes < expected) {
    return connection_.distrust("a reply that does not fit the pull it answers");
  }
  head_.resize(expected / sizeof(uint64_t));
  const auto head = std::as_writable_bytes(std::span(head_));
  PETPS_RETURN_IF_ERROR(connection_.read(head, deadline));
  wire::PullReplyPrefix prefix;
  Status decoded = wire::decode_pull_reply_prefix(header, head, prefix);
  if (decoded.ok() && prefix.rows_offset != expected) {
    return connection_.distrust("a reply with other keys than requested");
  }
  if (decoded.ok()) decoded = wire::decode_pull_reply_head(header, head, reply);
  if (!decoded.ok()) return connection_.distrust(decoded.message());
  for (size_t i = 0; i < request.pieces; ++i) {
    PETPS_RETURN_IF_ERROR(check_section(reply.sections[i], pieces_[request.first_piece + i]));
  }
  return {};
}

Status PullExchange::check_section(const wire::PullReplySection& section, const Piece& piece) {
  const CatalogueTable& table = *parts_[piece.part].table;
  if (section.table != table.id || section.keys != piece.keys) {
    return connection_.distrust("a reply with other tables or keys than requested");
  }
  if (section.code != 0) {
    if (section.rows_found != 0)
      return connection_.distrust("rows of a table that it does not have");
    const auto code = section.code <= static_cast<uint16_t>(Code::kIoError)
                          ? static_cast<Code>(section.code)
                          : Code::kInternal;
    record_error(Status(
        code, connection_.peer() + ": the server no longer has table '" + table.table.name + "'"));
    return {};
  }
  if (section.rows_found > 0 && section.row_bytes != table.table.row_bytes) {
    return connection_.distrust("rows of " + std::to_string(section.row_bytes) +
                                " bytes, the table's have " +
                                std::to_string(table.table.row_bytes));
  }
  return {};
}

Status PullExchange::receive_rows(const Piece& piece, const wire::PullReplySection& section,
                                  const uint64_t* bitmap, const Deadline& deadline) {
  if (section.code != 0) return {};
  PullPart& part = parts_[piece.part];
  if (part.positions == nullptr) {
    PETPS_RETURN_IF_ERROR(receive_in_order(piece, section.rows_found, bitmap, deadline));
  } else {
    PETPS_RETURN_IF_ERROR(receive_scattered(piece, section.rows_found, bitmap, deadline));
  }
  part.found_count += section.rows_found;
  if (part.mask == nullptr) return {};
  for (size_t i = 0; i < piece.keys; ++i)
    part.mask[part.position(piece.first + i)] = is_present(bitmap, i) ? 1 : 0;
  return {};
}

Status PullExchange::read_to_scratch(size_t bytes, const Deadline& deadline) {
  std::vector<std::byte>& scratch = connection_.scratch();
  if (scratch.size() < bytes) scratch.resize(bytes);
  return connection_.read({scratch.data(), bytes}, deadline);
}

Status PullExchange::receive_in_order(const Piece& piece, size_t found_count,
                                      const uint64_t* bitmap, const Deadline& deadline) {
  const PullPart& part = parts_[piece.part];
  const Table& table = part.table->table;
  const size_t received = found_count * table.row_bytes;
  std::byte* out = part.out + piece.first * part.out_row_bytes();
  if (part.in_place()) {
    PETPS_RETURN_IF_ERROR(connection_.read({out, received}, deadline));
  } else {
    PETPS_RETURN_IF_ERROR(read_to_scratch(received, deadline));
    codec::decode(table.dtype, connection_.scratch().data(), found_count, table.dim,
                  reinterpret_cast<float*>(out));
  }
  place_rows(bitmap, piece.keys, found_count, part.default_row(), part.out_row_bytes(), out);
  return {};
}

// Receive each row straight into its place. Rows adjacent in the reply and in `out` are one piece.
Status PullExchange::receive_scattered(const Piece& piece, size_t found_count,
                                       const uint64_t* bitmap, const Deadline& deadline) {
  const PullPart& part = parts_[piece.part];
  const Table& table = part.table->table;
  const size_t row_bytes = part.out_row_bytes();
  if (!part.in_place())
    PETPS_RETURN_IF_ERROR(read_to_scratch(found_count * table.row_bytes, deadline));
  places_.clear();
  size_t row = 0;
  for (size_t i = 0; i < piece.keys; ++i) {
    std::byte* out = part.out + part.position(piece.first + i) * row_bytes;
    if (!is_present(bitmap, i)) {
      std::memcpy(out, part.default_row(), row_bytes);
    } else if (!part.in_place()) {
      codec::decode(table.dtype, connection_.scratch().data() + row++ * table.row_bytes, 1,
                    table.dim, reinterpret_cast<float*>(out));
    } else if (!places_.empty() &&
               static_cast<std::byte*>(places_.back().iov_base) + places_.back().iov_len == out) {
      places_.back().iov_len += row_bytes;
    } else {
      places_.push_back({out, row_bytes});
    }
  }
  return connection_.read_pieces(places_, deadline);
}

}  // namespace petps::client
