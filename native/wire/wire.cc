#include "wire/wire.h"

#include <algorithm>
#include <cstring>

#include "wire/bytes.h"

namespace petps::wire {

using base::Code;
using base::Status;

std::string_view opcode_name(uint16_t opcode) {
  constexpr std::array<std::string_view, kOpcodesEnd> kNames = {
      // by Opcode
      "unknown", "hello",    "tables",    "pull",    "push",
      "status",  "hot_keys", "shard_map", "control", "rdma"};
  const auto number = static_cast<uint16_t>(opcode & ~kReplyBit);
  return kNames[number < kOpcodesEnd ? number : 0];
}

Status decode_header(std::span<const std::byte> bytes, FrameHeader& header) {
  if (bytes.size() < kHeaderBytes)
    return bad_frame("truncated header: a frame starts with 32 bytes");
  std::memcpy(&header, bytes.data(), kHeaderBytes);
  if (header.signature != kSignature) {
    return bad_frame(
        "not a petps frame: it must start with the bytes PTPS (is this another protocol's "
        "client?)");
  }
  if (header.version < kProtocolVersionMin || header.version > kProtocolVersion) {
    return Status(Code::kUnimplemented,
                  "protocol version " + std::to_string(header.version) +
                      " is unknown; this build speaks " + std::to_string(kProtocolVersionMin) +
                      " to " + std::to_string(kProtocolVersion) + ": upgrade the older side");
  }
  const bool is_pull = header.opcode == static_cast<uint16_t>(Opcode::kPull);
  if ((header.flags & ~(is_pull ? kFlagTrace : 0u)) != 0 || header.reserved != 0) {
    return bad_frame("unknown flags and reserved header fields must be 0 in protocol version 1");
  }
  if (header.body_bytes > kMaxBodyBytes) {
    return Status(Code::kResourceExhausted, "frame body of " + std::to_string(header.body_bytes) +
                                                " bytes is above the limit of " +
                                                std::to_string(kMaxBodyBytes) +
                                                ": split the request");
  }
  return {};
}

Status decode_request_header(std::span<const std::byte> bytes, FrameHeader& header) {
  PETPS_RETURN_IF_ERROR(decode_header(bytes, header));
  if ((header.opcode & kReplyBit) != 0)
    return bad_frame("a reply was sent where a request is expected");
  if (header.code != 0) return bad_frame("a request's code must be 0");
  if (header.body_bytes % kBodyAlignment != 0) {
    return bad_frame("a request's body must be a multiple of 8 bytes, not " +
                     std::to_string(header.body_bytes));
  }
  return {};
}

Status decode_reply_header(std::span<const std::byte> bytes, FrameHeader& header) {
  PETPS_RETURN_IF_ERROR(decode_header(bytes, header));
  if ((header.opcode & kReplyBit) == 0)
    return bad_frame("a request was sent where a reply is expected");
  return {};
}

Status truncated(std::string_view message, std::string_view part, size_t body_bytes) {
  std::string text = "truncated ";
  text.append(message).append(": the body of ").append(std::to_string(body_bytes));
  text.append(" bytes ends inside the ").append(part);
  return bad_frame(std::move(text));
}

namespace {
Status expect(const FrameHeader& header, uint16_t opcode, std::span<const std::byte> body) {
  if (header.opcode != opcode) {
    return bad_frame("expected opcode " + std::to_string(opcode) + ", got " +
                     std::to_string(header.opcode));
  }
  if (header.code != 0) return bad_frame("an error reply has no such body: see decode_error");
  if (header.body_bytes != body.size()) {
    return bad_frame("the header announces a body of " + std::to_string(header.body_bytes) +
                     " bytes, got " + std::to_string(body.size()));
  }
  return {};
}
}  // namespace

Status expect_request(const FrameHeader& header, Opcode opcode, std::span<const std::byte> body) {
  return expect(header, static_cast<uint16_t>(opcode), body);
}

Status expect_reply(const FrameHeader& header, Opcode opcode, std::span<const std::byte> body) {
  return expect(header, reply_opcode(opcode), body);
}

Status expect_end(const Cursor& cursor, std::string_view message, std::string_view part) {
  if (cursor.left() == 0) return {};
  std::string text(message);
  text.append(": ").append(std::to_string(cursor.left())).append(" bytes are left after the ");
  return bad_frame(text.append(part));
}

void encode_error(uint16_t request_opcode, uint64_t request_id, const Status& status,
                  Frame& frame) {
  start_frame(static_cast<uint16_t>(request_opcode | kReplyBit), request_id, frame);
  const std::string_view text = status.message().substr(0, kMaxErrorBytes);
  append_bytes(text.data(), text.size(), frame);
  // An OK status here is our own mistake, reported as kInternal: a client would read an error reply
  // of code 0 as a success.
  finish_frame(frame, 0, status.ok() ? Code::kInternal : status.code());
}

Status decode_error(const FrameHeader& header, std::span<const std::byte> body) {
  if (header.code == 0) return bad_frame("a reply of code 0 is not an error");
  const size_t n = std::min<size_t>(body.size(), kMaxErrorBytes);
  const bool known = header.code <= static_cast<uint16_t>(Code::kUnauthenticated);
  return Status(known ? static_cast<Code>(header.code) : Code::kInternal,
                std::string(reinterpret_cast<const char*>(body.data()), n));
}

// ---- Status and hot keys

void encode_status(uint64_t request_id, Frame& frame) {
  start_frame(Opcode::kStatus, request_id, frame);
}

Status decode_status(const FrameHeader& header, std::span<const std::byte> body) {
  PETPS_RETURN_IF_ERROR(expect_request(header, Opcode::kStatus, body));
  return expect_end(Cursor(body), "status", "header");
}

Status encode_status_reply(uint64_t request_id, std::string_view json, Frame& frame) {
  if (json.size() > kMaxBodyBytes)
    return Status(Code::kResourceExhausted, "the status does not fit in one frame");
  start_reply(Opcode::kStatus, request_id, frame);
  append_bytes(json.data(), json.size(), frame);
  finish_frame(frame);
  return {};
}

Status decode_status_reply(const FrameHeader& header, std::span<const std::byte> body,
                           std::string_view& json) {
  PETPS_RETURN_IF_ERROR(expect_reply(header, Opcode::kStatus, body));
  json = {reinterpret_cast<const char*>(body.data()), body.size()};
  return {};
}

namespace {
struct HotKeysHead {
  uint32_t table;
  uint32_t keys;
};
}  // namespace

void encode_hot_keys(uint64_t request_id, const HotKeysRequest& hot, Frame& frame) {
  start_frame(Opcode::kHotKeys, request_id, frame);
  append(HotKeysHead{hot.table, static_cast<uint32_t>(hot.keys.size())}, frame);
  append_bytes(hot.keys.data(), hot.keys.size_bytes(), frame);
  finish_frame(frame);
}

Status decode_hot_keys(const FrameHeader& header, std::span<const std::byte> body,
                       const Limits& limits, HotKeysRequest& hot) {
  PETPS_RETURN_IF_ERROR(expect_request(header, Opcode::kHotKeys, body));
  Cursor cursor(body);
  HotKeysHead head{};
  if (!cursor.take(head)) return truncated("hot set", "head", body.size());
  if (head.keys > limits.hot_keys) {
    return Status(Code::kResourceExhausted, "hot set of " + std::to_string(head.keys) +
                                                " keys is above the limit of " +
                                                std::to_string(limits.hot_keys));
  }
  hot.table = head.table;
  if (!cursor.take_array(head.keys, hot.keys)) return truncated("hot set", "keys", body.size());
  return expect_end(cursor, "hot set", "keys");
}

void encode_hot_keys_reply(uint64_t request_id, Frame& frame) {
  start_reply(Opcode::kHotKeys, request_id, frame);
}

Status decode_hot_keys_reply(const FrameHeader& header, std::span<const std::byte> body) {
  PETPS_RETURN_IF_ERROR(expect_reply(header, Opcode::kHotKeys, body));
  return expect_end(Cursor(body), "hot set reply", "header");
}

}  // namespace petps::wire
