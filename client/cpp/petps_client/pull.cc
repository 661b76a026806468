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
  for (;;) {
    bool is_whole = false;
    PETPS_RETURN_IF_ERROR(receive_now(is_whole));
    if (is_whole) return {};
    PETPS_RETURN_IF_ERROR(connection_.wait(deadline));
  }
}

Status PullExchange::receive_now(bool& is_whole) {
  is_whole = false;
  if (stage_ == Stage::kNothing) expect(Stage::kHeader, header_bytes_);
  while (stage_ != Stage::kNothing) {
    PETPS_RETURN_IF_ERROR(connection_.read_now(left_));
    if (!left_.empty()) return {};
    PETPS_RETURN_IF_ERROR(take_stage());
  }
  is_whole = true;
  ++received_;
  send_requests();  // nothing after an error; the replies in flight are still read
  return connection_.flush();
}

// Expect these bytes of the reply next.
void PullExchange::expect(Stage stage, std::span<std::byte> bytes) {
  stage_ = stage;
  places_.assign(1, {bytes.data(), bytes.size()});
  left_ = places_;
}

// Use what this stage has read, and set what to read next; kNothing: this was the reply's end.
Status PullExchange::take_stage() {
  switch (stage_) {
    case Stage::kHeader:
      return take_header();
    case Stage::kError: {
      Status error = connection_.error_of(header_, head());
      if (answered_ == nullptr) return connection_.break_by_error(error);
      answered_->has_reply = true;
      record_error(std::move(error));
      stage_ = Stage::kNothing;
      return {};
    }
    case Stage::kHead:
      PETPS_RETURN_IF_ERROR(take_head());
      piece_ = 0;
      bitmap_ = reply_.bitmaps.data();
      expect_rows();
      return {};
    case Stage::kRows:
      take_rows();
      bitmap_ += wire::bitmap_words(piece().keys);
      ++piece_;
      expect_rows();
      return {};
    case Stage::kNothing:
      return {};
  }
  return {};
}

Status PullExchange::take_header() {
  PETPS_RETURN_IF_ERROR(connection_.decode_header(header_bytes_, header_));
  const uint64_t number = header_.request_id - first_id_;
  const bool is_expected = number < sent_ && !requests_[number].has_reply;
  answered_ = is_expected ? &requests_[number] : nullptr;
  if (header_.code != 0) {
    expect(Stage::kError, head_of(header_.body_bytes));
    return {};
  }
  if (!is_expected) return connection_.distrust("a reply to a request that is not waiting for one");
  answered_->has_reply = true;
  // The request determines this length. The client reads no more, whatever the server says.
  size_t expected =
      sizeof(wire::PullReplyPrefix) + answered_->pieces * sizeof(wire::PullReplySection);
  for (size_t i = 0; i < answered_->pieces; ++i) {
    expected += wire::bitmap_words(pieces_[answered_->first_piece + i].keys) * sizeof(uint64_t);
  }
  const bool is_pull =
      header_.opcode == (static_cast<uint16_t>(wire::Opcode::kPull) | wire::kReplyBit);
  if (!is_pull || header_.sections != answered_->pieces || header_.body_bytes < expected) {
    return connection_.distrust("a reply that does not fit the pull it answers");
  }
  expect(Stage::kHead, head_of(expected));
  return {};
}

Status PullExchange::take_head() {
  wire::PullReplyPrefix prefix;
  Status decoded = wire::decode_pull_reply_prefix(header_, head(), prefix);
  if (decoded.ok() && prefix.rows_offset != head().size()) {
    return connection_.distrust("a reply with other keys than requested");
  }
  if (decoded.ok()) decoded = wire::decode_pull_reply_head(header_, head(), reply_);
  if (!decoded.ok()) return connection_.distrust(decoded.message());
  for (size_t i = 0; i < answered_->pieces; ++i) {
    PETPS_RETURN_IF_ERROR(check_section(reply_.sections[i], pieces_[answered_->first_piece + i]));
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

// Expect the rows of the current piece, each straight in its place.
void PullExchange::expect_rows() {
  places_.clear();
  left_ = {};
  stage_ = Stage::kRows;
  if (piece_ == answered_->pieces) {
    applied_version_ = std::min(applied_version_, reply_.applied_version);
    stage_ = Stage::kNothing;
    return;
  }
  const wire::PullReplySection& section = reply_.sections[piece_];
  if (section.code != 0) return;
  const PullPart& part = parts_[piece().part];
  if (!part.in_place()) {
    const size_t bytes = size_t{section.rows_found} * part.table->table.row_bytes;
    std::vector<std::byte>& scratch = connection_.scratch();
    if (scratch.size() < bytes) scratch.resize(bytes);
    places_.push_back({scratch.data(), bytes});
  } else if (part.positions == nullptr) {
    places_.push_back({part.out + piece().first * part.out_row_bytes(),
                       section.rows_found * part.out_row_bytes()});
  } else {
    expect_scattered(part);
  }
  left_ = places_;
}

// Rows adjacent in the reply and in `out` are one piece of memory.
void PullExchange::expect_scattered(const PullPart& part) {
  const size_t row_bytes = part.out_row_bytes();
  for (size_t i = 0; i < piece().keys; ++i) {
    if (!is_present(bitmap_, i)) continue;
    std::byte* out = part.out + part.position(piece().first + i) * row_bytes;
    if (!places_.empty() &&
        static_cast<std::byte*>(places_.back().iov_base) + places_.back().iov_len == out) {
      places_.back().iov_len += row_bytes;
    } else {
      places_.push_back({out, row_bytes});
    }
  }
}

// The rows of the current piece have arrived: decode them, and fill in missing ones and the mask.
void PullExchange::take_rows() {
  const wire::PullReplySection& section = reply_.sections[piece_];
  if (section.code != 0) return;
  PullPart& part = parts_[piece().part];
  const Table& table = part.table->table;
  const size_t row_bytes = part.out_row_bytes();
  const std::byte* scratch = connection_.scratch().data();
  if (part.positions == nullptr) {
    std::byte* out = part.out + piece().first * row_bytes;
    if (!part.in_place()) {
      codec::decode(table.dtype, scratch, section.rows_found, table.dim,
                    reinterpret_cast<float*>(out));
    }
    place_rows(bitmap_, piece().keys, section.rows_found, part.default_row(), row_bytes, out);
  } else {
    for (size_t i = 0; i < piece().keys; ++i) {
      std::byte* out = part.out + part.position(piece().first + i) * row_bytes;
      if (!is_present(bitmap_, i)) {
        std::memcpy(out, part.default_row(), row_bytes);
      } else if (!part.in_place()) {
        codec::decode(table.dtype, scratch, 1, table.dim, reinterpret_cast<float*>(out));
        scratch += table.row_bytes;
      }
    }
  }
  part.found_count += section.rows_found;
  if (part.mask == nullptr) return;
  for (size_t i = 0; i < piece().keys; ++i)
    part.mask[part.position(piece().first + i)] = is_present(bitmap_, i) ? 1 : 0;
}

}  // namespace petps::client
