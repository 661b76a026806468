// Frames from an untrusted peer: each is decoded as a server and as a client does it. A decoded
// message is encoded and decoded again, and must stay the same.
#include "wire/wire.h"

#include <fuzzer/FuzzedDataProvider.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>

#include "tests/fuzz/expect.h"

namespace petps::wire {
namespace {

using base::Status;
using Bytes = std::span<const std::byte>;

// Check that a view lies inside the body that it was decoded from.
void check_inside(const auto& view, Bytes body) {
  if (view.empty()) return;
  const auto bytes = std::as_bytes(std::span(view));
  FUZZ_EXPECT(bytes.data() >= body.data() &&
              bytes.data() + bytes.size() <= body.data() + body.size());
}

// Read every byte, so that ASan sees a view that is too long.
void touch(const auto& view) {
  volatile uint8_t sum = 0;
  for (const std::byte value : std::as_bytes(std::span(view)))
    sum = static_cast<uint8_t>(sum ^ static_cast<uint8_t>(value));
}

void check_refusal(const Status& status) { FUZZ_EXPECT(!status.message().empty()); }

// Expect that a frame that we encoded decodes to the same message.
template <typename T>
void check_same(Status (*decode)(const FrameHeader&, Bytes, T&), const Frame& frame,
                const T& message) {
  FrameHeader header;
  T again{};
  FUZZ_EXPECT(decode_header(frame, header).ok());
  FUZZ_EXPECT(decode(header, Bytes(frame).subspan(kHeaderBytes), again).ok());
  FUZZ_EXPECT(again == message);
}

Status decode_request(const FrameHeader& header, Bytes body, const Limits& limits) {
  Frame frame;
  switch (static_cast<Opcode>(header.opcode)) {
    case Opcode::kHello: {
      HelloRequest hello;
      PETPS_RETURN_IF_ERROR(decode_hello(header, body, hello));
      check_inside(hello.client, body);
      return {};
    }
    case Opcode::kTables: {
      TablesRequest tables;
      return decode_tables(header, body, tables);
    }
    case Opcode::kPull: {
      PullRequest pull;
      PETPS_RETURN_IF_ERROR(decode_pull(header, body, limits, pull));
      check_inside(pull.sections, body);
      check_inside(pull.keys, body);
      touch(pull.keys);
      uint64_t keys = 0;
      for (const PullSection& section : pull.sections) keys += section.keys;
      FUZZ_EXPECT(keys == pull.keys.size() && keys <= limits.keys_per_pull);
      // A server then writes a reply of this size.
      Frame head(pull_reply_head_bytes(pull.sections));
      start_pull_reply(pull.sections, head);
      finish_pull_reply(header.request_id, 1, pull.sections.size(), 0, head);
      encode_pull(header.request_id, pull, frame);
      if (pull.trace.is_sampled()) {
        FrameHeader again;
        PullRequest same;
        FUZZ_EXPECT(decode_header(frame, again).ok());
        const Status status = decode_pull(again, Bytes(frame).subspan(kHeaderBytes), limits, same);
        FUZZ_EXPECT(status.ok() && same.trace == pull.trace);
      }
      return {};
    }
    case Opcode::kPush: {
      PushRequest push;
      PETPS_RETURN_IF_ERROR(decode_push(header, body, limits, push));
      check_inside(push.keys, body);
      check_inside(push.deletions, body);
      check_inside(push.rows, body);
      touch(push.rows);
      FUZZ_EXPECT(push.rows.size() == push.keys.size() * push.row_bytes);
      FUZZ_EXPECT(push.keys.size() <= limits.keys_per_push);
      FUZZ_EXPECT(push.deletions.empty() ||
                  push.deletions.size() == bitmap_words(push.keys.size()));
      return {};
    }
    case Opcode::kStatus:
      return decode_status(header, body);
    case Opcode::kHotKeys: {
      HotKeysRequest hot;
      PETPS_RETURN_IF_ERROR(decode_hot_keys(header, body, limits, hot));
      check_inside(hot.keys, body);
      touch(hot.keys);
      return {};
    }
    case Opcode::kShardMap:
      return decode_shard_map(header, body);
    case Opcode::kRdma: {
      RdmaRequest rdma;
      PETPS_RETURN_IF_ERROR(decode_rdma(header, body, rdma));
      encode_rdma(header.request_id, rdma, frame);
      check_same(decode_rdma, frame, rdma);
      return {};
    }
    case Opcode::kControl:
      break;
  }
  return Status(base::Code::kUnimplemented, "unknown opcode");
}

Status decode_pull_reply(const FrameHeader& header, Bytes body) {
  PullReplyPrefix prefix;
  PETPS_RETURN_IF_ERROR(decode_pull_reply_prefix(header, body, prefix));
  if (prefix.rows_offset > body.size()) return Status(base::Code::kDataLoss, "cut");
  const Bytes head = body.first(prefix.rows_offset);
  PullReply reply;
  PETPS_RETURN_IF_ERROR(decode_pull_reply_head(header, head, reply));
  check_inside(reply.sections, head);
  check_inside(reply.bitmaps, head);
  uint64_t words = 0;
  uint64_t bytes = 0;
  for (const PullReplySection& section : reply.sections) {
    words += bitmap_words(section.keys);
    bytes += uint64_t{section.rows_found} * section.row_bytes;
  }
  FUZZ_EXPECT(words == reply.bitmaps.size() && bytes == reply.rows_bytes);
  FUZZ_EXPECT(reply.rows_offset + reply.rows_bytes == header.body_bytes);
  return {};
}

void use(const ShardMap& map) {
  for (const ShardServer& server : map.servers) {
    FUZZ_EXPECT(shard_of(map, server.address).owned == server.partitions);
    const PartitionSet shared = shared_partitions(map, server.address);
    for (uint32_t p = 0; p < map.partitions; ++p) {
      if (has_partition(server.partitions, p))
        FUZZ_EXPECT((owners_of(map, p).size() > 1) == has_partition(shared, p));
    }
    FUZZ_EXPECT(!partitions_text(server.partitions).empty());
  }
}

Status decode_reply(const FrameHeader& header, Bytes body) {
  Frame frame;
  if (header.code != 0) {
    FUZZ_EXPECT(!decode_error(header, body).ok());
    return {};
  }
  switch (static_cast<Opcode>(header.opcode & ~kReplyBit)) {
    case Opcode::kHello: {
      HelloReply hello;
      PETPS_RETURN_IF_ERROR(decode_hello_reply(header, body, hello));
      FUZZ_EXPECT(!partitions_text(hello.shard.owned).empty());
      hello.shard.owns_all();
      return {};
    }
    case Opcode::kTables: {
      TablesReply tables;
      PETPS_RETURN_IF_ERROR(decode_tables_reply(header, body, tables));
      FUZZ_EXPECT(encode_tables_reply(header.request_id, tables, frame).ok());
      if (tables.state.counter != 0) check_same(decode_tables_reply, frame, tables);
      return {};
    }
    case Opcode::kPull:
      return decode_pull_reply(header, body);
    case Opcode::kPush: {
      PushReply push;
      PETPS_RETURN_IF_ERROR(decode_push_reply(header, body, push));
      encode_push_reply(header.request_id, push, frame);
      check_same(decode_push_reply, frame, push);
      return {};
    }
    case Opcode::kStatus: {
      std::string_view json;
      PETPS_RETURN_IF_ERROR(decode_status_reply(header, body, json));
      check_inside(json, body);
      return {};
    }
    case Opcode::kHotKeys:
      return decode_hot_keys_reply(header, body);
    case Opcode::kShardMap: {
      ShardMap map;
      PETPS_RETURN_IF_ERROR(decode_shard_map_reply(header, body, map));
      FUZZ_EXPECT(check_shard_map(map).ok());
      use(map);
      encode_shard_map_reply(header.request_id, map, frame);
      check_same(decode_shard_map_reply, frame, map);
      return {};
    }
    case Opcode::kRdma: {
      RdmaReply rdma;
      PETPS_RETURN_IF_ERROR(decode_rdma_reply(header, body, rdma));
      encode_rdma_reply(header.request_id, rdma, frame);
      check_same(decode_rdma_reply, frame, rdma);
      return {};
    }
    case Opcode::kControl:
      break;
  }
  return Status(base::Code::kUnimplemented, "unknown opcode");
}

// Receive one frame as the transports do: the header, then a body of the length that it says.
void receive(Bytes frame) {
  FrameHeader header;
  if (const Status status = decode_header(frame, header); !status.ok()) {
    check_refusal(status);
    return;
  }
  if (frame.size() - kHeaderBytes < header.body_bytes) return;  // it waits for the rest
  // A buffer of exactly this size, aligned as the transports align it.
  const std::unique_ptr<std::byte[]> exact(new std::byte[header.body_bytes]);
  if (header.body_bytes > 0)
    std::memcpy(exact.get(), frame.data() + kHeaderBytes, header.body_bytes);
  const Bytes body(exact.get(), header.body_bytes);
  if (FrameHeader request; decode_request_header(frame, request).ok()) {
    if (const Status status = decode_request(request, body, {}); !status.ok())
      check_refusal(status);
    const Limits low{4096, 8, 2, 8, 8, 4, 4};
    if (const Status status = decode_request(request, body, low); !status.ok())
      check_refusal(status);
  }
  if (FrameHeader reply; decode_reply_header(frame, reply).ok()) {
    if (const Status status = decode_reply(reply, body); !status.ok()) check_refusal(status);
  }
}

// A map that did not come in a frame: any fields.
void check_any_map(Bytes bytes) {
  FuzzedDataProvider input(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  ShardMap map;
  map.version = input.ConsumeIntegralInRange<uint64_t>(0, 2);
  map.partitions = input.ConsumeBool() ? input.ConsumeIntegralInRange<uint32_t>(0, 8)
                                       : input.ConsumeIntegral<uint32_t>();
  const size_t servers = input.ConsumeIntegralInRange<size_t>(0, 5);
  for (size_t i = 0; i < servers; ++i) {
    ShardServer server;
    server.address = input.ConsumeRandomLengthString(12);
    server.partitions[0] = input.ConsumeIntegral<uint64_t>();
    server.partitions[15] = input.ConsumeBool() ? input.ConsumeIntegral<uint64_t>() : 0;
    if (input.ConsumeBool()) server.zone = input.ConsumeRandomLengthString(4);
    map.servers.push_back(server);
  }
  if (map.version != 0) map.model = input.ConsumeRemainingBytesAsString();
  const Status status = check_shard_map(map);
  if (!status.ok()) return check_refusal(status);
  use(map);
  Frame frame;
  encode_shard_map_reply(1, map, frame);
  check_same(decode_shard_map_reply, frame, map);
}

}  // namespace
}  // namespace petps::wire

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  if (size >= 2 && data[0] == 'M' && data[1] == 'A') {
    petps::wire::check_any_map(bytes.subspan(2));
  } else {
    petps::wire::receive(bytes);
  }
  return 0;
}
