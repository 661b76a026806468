#include <bit>

#include "wire/bytes.h"
#include "wire/wire.h"

namespace petps::wire {

using base::Code;
using base::Status;

namespace {

struct PushHead {
  uint32_t table;
  uint32_t instance;
  uint32_t keys;
  uint32_t flags;
  uint32_t dim;
  uint32_t dtype;
  uint32_t row_bytes;
  uint32_t stamp;
};
static_assert(sizeof(PushHead) == 32, "copied whole: see FORMAT.md, push");

}  // namespace

size_t push_request_bytes(size_t keys, size_t row_bytes, bool deletions) {
  const size_t body = sizeof(PushHead) + sizeof(PushOrder) + keys * sizeof(uint64_t) +
                      (deletions ? bitmap_words(keys) * sizeof(uint64_t) : 0) + keys * row_bytes;
  return kHeaderBytes + (body + kBodyAlignment - 1) / kBodyAlignment * kBodyAlignment;
}

void encode_push(uint64_t request_id, const PushRequest& push, Frame& frame) {
  start_frame(Opcode::kPush, request_id, frame);
  frame.reserve(push_request_bytes(push.keys.size(), push.row_bytes, !push.deletions.empty()));
  const uint32_t flags = (push.deletions.empty() ? 0 : kPushHasDeletions) |
                         (push.order.client == 0 ? 0 : kPushHasOrder);
  append(PushHead{push.table, push.instance, static_cast<uint32_t>(push.keys.size()), flags,
                  push.dim, push.dtype, push.row_bytes, push.stamp},
         frame);
  if (push.order.client != 0) append(push.order, frame);
  append_bytes(push.keys.data(), push.keys.size_bytes(), frame);
  append_bytes(push.deletions.data(), push.deletions.size_bytes(), frame);
  append_bytes(push.rows.data(), push.rows.size(), frame);
  pad_body(frame);
  finish_frame(frame);
}

Status decode_push(const FrameHeader& header, std::span<const std::byte> body, const Limits& limits,
                   PushRequest& push) {
  PETPS_RETURN_IF_ERROR(expect_request(header, Opcode::kPush, body));
  Cursor cursor(body);
  PushHead head{};
  if (!cursor.take(head)) return truncated("push", "head", body.size());
  if (head.keys > limits.keys_per_push) {
    return Status(Code::kResourceExhausted,
                  "push of " + std::to_string(head.keys) + " rows is above the limit of " +
                      std::to_string(limits.keys_per_push) + ": split the request");
  }
  if ((head.flags & ~(kPushHasDeletions | kPushHasOrder)) != 0)
    return bad_frame("push: flags " + std::to_string(head.flags) + " have an unknown bit");
  push = {head.table, head.instance, head.dim, head.dtype, head.row_bytes, head.stamp, {}, {}, {},
          {}};
  if ((head.flags & kPushHasOrder) != 0) {
    if (!cursor.take(push.order)) return truncated("push", "order", body.size());
    if (push.order.client == 0) return bad_frame("push: the order names client 0");
    if (push.order.oldest > push.order.number) {
      return bad_frame("push: the order has number " + std::to_string(push.order.number) +
                       ", which is below its oldest call " + std::to_string(push.order.oldest));
    }
  }
  if (!cursor.take_array(head.keys, push.keys)) return truncated("push", "keys", body.size());
  if ((head.flags & kPushHasDeletions) != 0 &&
      !cursor.take_array(bitmap_words(head.keys), push.deletions)) {
    return truncated("push", "deletion bitmap", body.size());
  }
  const uint64_t rows_bytes = uint64_t{head.keys} * head.row_bytes;  // 32 x 32 bits: no overflow
  if (!cursor.take_bytes(rows_bytes, push.rows)) return truncated("push", "rows", body.size());
  if (cursor.left() >= kBodyAlignment) {
    return bad_frame("push: " + std::to_string(cursor.left()) + " bytes are left after the rows");
  }
  uint64_t deletions = 0;
  for (const uint64_t word : push.deletions)
    deletions += static_cast<uint64_t>(std::popcount(word));
  const size_t tail = head.keys % 64;
  if (tail != 0 && !push.deletions.empty() && (push.deletions.back() >> tail) != 0) {
    return bad_frame("push: the deletion bitmap marks keys beyond the last one");
  }
  if (head.row_bytes == 0 && deletions != head.keys) {
    return bad_frame("push: a push without rows must delete all of its keys, but " +
                     std::to_string(head.keys - deletions) + " keys are not marked as deleted");
  }
  return {};
}

void encode_push_reply(uint64_t request_id, const PushReply& reply, Frame& frame) {
  start_reply(Opcode::kPush, request_id, frame);
  append(reply, frame);
  finish_frame(frame);
}

Status decode_push_reply(const FrameHeader& header, std::span<const std::byte> body,
                         PushReply& reply) {
  PETPS_RETURN_IF_ERROR(expect_reply(header, Opcode::kPush, body));
  Cursor cursor(body);
  if (!cursor.take(reply)) return truncated("push reply", "counts", body.size());
  return expect_end(cursor, "push reply", "counts");
}

}  // namespace petps::wire
