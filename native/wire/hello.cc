#include <algorithm>

#include "wire/bytes.h"
#include "wire/wire.h"

namespace petps::wire {

using base::Code;
using base::Status;

namespace {

struct HelloHead {
  uint16_t version_min;
  uint16_t version_max;
  uint32_t reserved;
};

// Later versions append fields; a reader takes the fields that it knows.
struct HelloReplyBody {
  uint16_t version_min;
  uint16_t version_max;
  uint32_t hot_set_seconds;
  std::array<uint8_t, 16> pool_uuid;
  Limits limits;
  uint32_t shard;
  uint32_t shards;
  uint32_t partitions;
  uint64_t map_version;
  PartitionSet owned;
};
static_assert(sizeof(HelloReplyBody) == 200, "copied whole: see FORMAT.md, hello reply");

}  // namespace

void encode_hello(uint64_t request_id, const HelloRequest& hello, Frame& frame) {
  start_frame(Opcode::kHello, request_id, frame);
  append(HelloHead{hello.version_min, hello.version_max, 0}, frame);
  append_name(hello.client, frame);
  if (!hello.token.empty()) append_name(hello.token, frame);
  pad_body(frame);
  finish_frame(frame);
}

Status decode_hello(const FrameHeader& header, std::span<const std::byte> body,
                    HelloRequest& hello) {
  PETPS_RETURN_IF_ERROR(expect_request(header, Opcode::kHello, body));
  Cursor cursor(body);
  HelloHead head{};
  if (!cursor.take(head)) return truncated("hello", "versions", body.size());
  if (!cursor.take_name(hello.client)) return truncated("hello", "client name", body.size());
  // A hello without a token ends here, or has padding, which reads as an empty name.
  hello.token = {};
  if (cursor.left() >= sizeof(uint16_t) && !cursor.take_name(hello.token))
    return truncated("hello", "token", body.size());
  hello.version_min = head.version_min;
  hello.version_max = head.version_max;
  if (head.version_min > head.version_max)
    return bad_frame("hello: version_min " + std::to_string(head.version_min) +
                     " is above version_max " + std::to_string(head.version_max));
  if (head.version_max < kProtocolVersionMin || head.version_min > kProtocolVersion) {
    return Status(Code::kUnimplemented,
                  "the client speaks protocol versions " + std::to_string(head.version_min) +
                      " to " + std::to_string(head.version_max) + ", this server " +
                      std::to_string(kProtocolVersionMin) + " to " +
                      std::to_string(kProtocolVersion) + ": upgrade the older side");
  }
  return {};
}

void encode_hello_reply(uint64_t request_id, const HelloReply& hello, Frame& frame) {
  start_reply(Opcode::kHello, request_id, frame);
  const Shard& shard = hello.shard;
  append(HelloReplyBody{hello.version_min, hello.version_max, hello.hot_set_seconds,
                        hello.pool_uuid, hello.limits, shard.shard, shard.shards, shard.partitions,
                        shard.map_version, shard.owned},
         frame);
  append(hello.features, frame);
  finish_frame(frame);
}

Status decode_hello_reply(const FrameHeader& header, std::span<const std::byte> body,
                          HelloReply& hello) {
  PETPS_RETURN_IF_ERROR(expect_reply(header, Opcode::kHello, body));
  Cursor cursor(body);
  HelloReplyBody in{};
  if (!cursor.take(in)) return truncated("hello reply", "limits", body.size());
  if (in.partitions == 0 || in.partitions > kMaxPartitions || in.shard >= in.shards) {
    return bad_frame("hello reply: shard " + std::to_string(in.shard) + " of " +
                     std::to_string(in.shards) + ", " + std::to_string(in.partitions) +
                     " partitions is not a valid shard");
  }
  // The reply of the first release stops here.
  if (!cursor.take(hello.features)) {
    if (cursor.left() != 0) return truncated("hello reply", "features", body.size());
    hello.features = 0;
  }
  hello.version_min = in.version_min;
  hello.version_max = in.version_max;
  hello.hot_set_seconds = in.hot_set_seconds;
  hello.pool_uuid = in.pool_uuid;
  // Lower each limit to what this build can hold, whatever the peer reports.
  hello.limits = {std::min(in.limits.body_bytes, kMaxBodyBytes),
                  std::min(in.limits.keys_per_pull, kMaxKeysPerPull),
                  std::min(in.limits.sections_per_pull, kMaxSectionsPerPull),
                  std::min(in.limits.keys_per_push, kMaxKeysPerPush),
                  std::min(in.limits.hot_keys, kMaxHotKeys),
                  std::min(in.limits.in_flight, kMaxInFlight),
                  in.limits.connections};
  hello.shard = {in.shard, in.shards, in.partitions, in.map_version, in.owned};
  return {};
}

}  // namespace petps::wire
