#include <algorithm>
#include <bit>
#include <cstring>

#include "wire/bytes.h"
#include "wire/wire.h"

namespace petps::wire {

using base::Code;
using base::Status;

namespace {

struct PullHead {
  uint64_t min_version;
  uint32_t instance;
  uint32_t wait_ms;
};
static_assert(sizeof(PullHead) == 16, "copied whole: see FORMAT.md, pull");

Status too_many(const std::string& parts, uint64_t count, uint32_t limit) {
  return Status(Code::kResourceExhausted,
                "pull of " + std::to_string(count) + " " + parts + " is above the limit of " +
                    std::to_string(limit) +
                    ": split the request (the hello reply gives the limits)");
}

size_t count_words(const auto& sections) {
  size_t words = 0;
  for (const auto& section : sections) words += bitmap_words(section.keys);
  return words;
}

// Return the number of bits in a section's bitmap, or ~0 if a bit lies beyond its keys.
uint64_t count_bits(std::span<const uint64_t> words, size_t keys) {
  uint64_t bits = 0;
  for (uint64_t word : words) bits += static_cast<uint64_t>(std::popcount(word));
  const size_t tail = keys % 64;
  if (tail != 0 && (words.back() >> tail) != 0) return ~uint64_t{0};
  return bits;
}

}  // namespace

size_t pull_request_bytes(size_t sections, size_t keys) {
  return kHeaderBytes + sizeof(PullHead) + sections * sizeof(PullSection) + keys * sizeof(uint64_t);
}

void encode_pull(uint64_t request_id, const PullRequest& pull, Frame& frame) {
  start_frame(Opcode::kPull, request_id, frame);
  const bool is_traced = pull.trace.is_sampled();
  frame.reserve(pull_request_bytes(pull.sections.size(), pull.keys.size()) +
                (is_traced ? sizeof(TraceContext) : 0));
  append(PullHead{pull.min_version, pull.instance, pull.wait_ms}, frame);
  append_bytes(pull.sections.data(), pull.sections.size_bytes(), frame);
  append_bytes(pull.keys.data(), pull.keys.size_bytes(), frame);
  if (is_traced) append(pull.trace, frame);
  finish_frame(frame, pull.sections.size(), Code::kOk, is_traced ? kFlagTrace : 0);
}

Status decode_pull(const FrameHeader& header, std::span<const std::byte> body, const Limits& limits,
                   PullRequest& pull) {
  PETPS_RETURN_IF_ERROR(expect_request(header, Opcode::kPull, body));
  if (header.sections == 0) return bad_frame("pull without sections: name at least one table");
  if (header.sections > limits.sections_per_pull) {
    return too_many("sections", header.sections, limits.sections_per_pull);
  }
  Cursor cursor(body);
  PullHead head{};
  if (!cursor.take(head)) return truncated("pull", "head", body.size());
  pull.min_version = head.min_version;
  pull.instance = head.instance;
  pull.wait_ms = std::min(head.wait_ms, kMaxWaitMs);
  if (!cursor.take_array(header.sections, pull.sections))
    return truncated("pull", "sections", body.size());
  uint64_t keys = 0;  // at most 2^32 sections of 2^32 keys: no overflow
  for (const PullSection& section : pull.sections) keys += section.keys;
  if (keys > limits.keys_per_pull) return too_many("keys", keys, limits.keys_per_pull);
  if (!cursor.take_array(keys, pull.keys)) return truncated("pull", "keys", body.size());
  pull.trace = {};
  if ((header.flags & kFlagTrace) == 0) return expect_end(cursor, "pull", "keys");
  if (!cursor.take(pull.trace)) return truncated("pull", "trace context", body.size());
  return expect_end(cursor, "pull", "trace context");
}

size_t pull_reply_head_bytes(std::span<const PullSection> sections) {
  return kHeaderBytes + sizeof(PullReplyPrefix) + sections.size() * sizeof(PullReplySection) +
         count_words(sections) * sizeof(uint64_t);
}

PullReplyParts start_pull_reply(std::span<const PullSection> sections, std::span<std::byte> head) {
  PullReplyParts parts;
  auto* section_heads =
      reinterpret_cast<PullReplySection*>(head.data() + kHeaderBytes + sizeof(PullReplyPrefix));
  parts.sections = {section_heads, sections.size()};
  const size_t bitmaps_at =
      kHeaderBytes + sizeof(PullReplyPrefix) + sections.size() * sizeof(PullReplySection);
  const std::span<std::byte> bitmaps = head.subspan(bitmaps_at);
  parts.bitmaps = {reinterpret_cast<uint64_t*>(bitmaps.data()), bitmaps.size() / sizeof(uint64_t)};
  for (size_t i = 0; i < sections.size(); ++i) {
    parts.sections[i] = {};
    parts.sections[i].table = sections[i].table;
    parts.sections[i].keys = sections[i].keys;
  }
  std::memset(bitmaps.data(), 0, bitmaps.size());
  return parts;
}

void finish_pull_reply(uint64_t request_id, uint64_t applied_version, size_t sections,
                       uint64_t rows_bytes, std::span<std::byte> head) {
  FrameHeader header;
  header.opcode = reply_opcode(Opcode::kPull);
  header.request_id = request_id;
  header.sections = static_cast<uint32_t>(sections);
  header.body_bytes = static_cast<uint32_t>(head.size() - kHeaderBytes + rows_bytes);
  std::memcpy(head.data(), &header, kHeaderBytes);
  const PullReplyPrefix prefix{applied_version, head.size() - kHeaderBytes};
  std::memcpy(head.data() + kHeaderBytes, &prefix, sizeof(prefix));
}

Status decode_pull_reply_prefix(const FrameHeader& header, std::span<const std::byte> prefix,
                                PullReplyPrefix& out) {
  Cursor cursor(prefix);
  if (header.opcode != reply_opcode(Opcode::kPull) || header.code != 0) {
    return bad_frame("not the reply of a pull that succeeded");
  }
  if (header.sections > kMaxSectionsPerPull || !cursor.take(out)) {
    return truncated("pull reply", "prefix", header.body_bytes);
  }
  const uint64_t least =
      sizeof(PullReplyPrefix) + uint64_t{header.sections} * sizeof(PullReplySection);
  if (out.rows_offset < least || out.rows_offset > header.body_bytes || out.rows_offset % 8 != 0) {
    return bad_frame("pull reply: rows at byte " + std::to_string(out.rows_offset) +
                     " of a body of " + std::to_string(header.body_bytes) + " bytes with " +
                     std::to_string(header.sections) + " sections");
  }
  return {};
}

Status decode_pull_reply_head(const FrameHeader& header, std::span<const std::byte> head,
                              PullReply& reply) {
  PullReplyPrefix prefix;
  PETPS_RETURN_IF_ERROR(decode_pull_reply_prefix(header, head, prefix));
  if (head.size() != prefix.rows_offset) return truncated("pull reply", "head", head.size());
  Cursor cursor(head.subspan(sizeof(PullReplyPrefix)));
  if (!cursor.take_array(header.sections, reply.sections)) {
    return truncated("pull reply", "sections", head.size());
  }
  const size_t words = count_words(reply.sections);
  if (words * sizeof(uint64_t) != cursor.left() || !cursor.take_array(words, reply.bitmaps)) {
    return truncated("pull reply", "presence bitmaps", head.size());
  }
  uint64_t rows_bytes = 0;  // (2^32 - 1)^2 plus a sum below 2^25 cannot overflow 64 bits
  size_t at = 0;
  for (const PullReplySection& section : reply.sections) {
    const size_t n = bitmap_words(section.keys);
    if (count_bits(reply.bitmaps.subspan(at, n), section.keys) != section.rows_found) {
      return bad_frame("pull reply: table " + std::to_string(section.table) + " has " +
                       std::to_string(section.rows_found) +
                       " rows, but its presence bits do not mark that many keys");
    }
    at += n;
    rows_bytes += uint64_t{section.rows_found} * section.row_bytes;
    if (rows_bytes > kMaxBodyBytes) break;
  }
  reply.applied_version = prefix.applied_version;
  reply.rows_offset = prefix.rows_offset;
  reply.rows_bytes = header.body_bytes - prefix.rows_offset;
  if (rows_bytes != reply.rows_bytes) {
    return bad_frame("pull reply: the sections do not announce the " +
                     std::to_string(reply.rows_bytes) + " row bytes that follow");
  }
  return {};
}

}  // namespace petps::wire
