#include "frames.h"

#include <cstring>

namespace petps::wire {

using base::Code;
using base::Status;

namespace {

Frame sample_pull_reply() {
  const std::vector<PullSection> sections = {{7, 3}, {9, 65}};
  Frame frame(pull_reply_head_bytes(sections));
  const PullReplyParts parts = start_pull_reply(sections, frame);
  parts.sections[0].row_bytes = 4;
  parts.sections[0].rows_found = 2;
  parts.bitmaps[0] = 0b101;
  parts.sections[1].row_bytes = 3;
  parts.sections[1].rows_found = 1;
  parts.bitmaps[2] = 1;  // key 64 of the second section
  finish_pull_reply(11, 42, sections.size(), 2 * 4 + 3, frame);
  for (int i = 0; i < 11; ++i) frame.push_back(static_cast<std::byte>(0xA0 + i));
  return frame;
}

TablesReply sample_tables() {
  TablesReply reply;
  reply.instances = {{1, "ranking", "ranking@7", 4, 42}};
  reply.aliases = {{"live", 1}};
  TableInfo table{7, 1, "users", 0, 1, 2, 8, 1000, 12, {}};
  reply.tables.push_back(table);
  table = {9, 1, "items", 3, 0, 1, 9, 50, 0, {}};
  for (int i = 0; i < 9; ++i) table.default_row.push_back(static_cast<std::byte>(i));
  reply.tables.push_back(table);
  return reply;
}

HelloReply sample_hello() {
  HelloReply hello;
  for (size_t i = 0; i < 16; ++i) hello.pool_uuid[i] = static_cast<uint8_t>(i * 17);
  hello.shard = {.shard = 1, .shards = 3, .partitions = 96, .map_version = 5, .owned = {0xF0, 1}};
  hello.features = kFeatureShardMap | kFeaturePullWait;
  return hello;
}

QueuePair sample_queue_pair() {
  QueuePair pair{0x010203, 0x0a0b0c, 7, 5, 0, {}};
  pair.gid[10] = pair.gid[11] = 0xff;  // 10.0.2.15
  pair.gid[12] = 10;
  pair.gid[14] = 2;
  pair.gid[15] = 15;
  return pair;
}

// Two servers that are replicas for partitions 0 to 63 and 69, and one server of the others.
ShardMap sample_shard_map() {
  ShardMap map{"ranking", 5, 70, {}};
  const PartitionSet half{~uint64_t{0}, 0b100000};
  const PartitionSet rest{0, 0b011111};
  map.servers = {{"h1:7070", half}, {"[::1]:7070", half}, {"h3:7070", rest}};
  return map;
}

Frame sample_push(const PushOrder& order = {}) {
  const std::vector<uint64_t> keys = {1, 2, ~uint64_t{0}};
  const std::vector<uint64_t> deletions = {0b010};
  const std::vector<std::byte> rows(9, std::byte{0x5A});
  Frame frame;
  encode_push(13, {9, 1, 3, 3, 3, 77, order, keys, deletions, rows}, frame);
  return frame;
}

// Expect that a view lies inside the body that it was decoded from.
void expect_inside(const auto& view, std::span<const std::byte> body) {
  if (view.empty()) return;
  const auto bytes = std::as_bytes(std::span(view));
  EXPECT_GE(bytes.data(), body.data());
  EXPECT_LE(bytes.data() + bytes.size(), body.data() + body.size());
}

// Return the status of decoding a message of type T.
template <typename T>
Status decode_as(Status (*decode)(const FrameHeader&, std::span<const std::byte>, T&),
                 const FrameHeader& header, std::span<const std::byte> body) {
  T message{};
  return decode(header, body, message);
}

Status decode_hello_request(const FrameHeader& header, std::span<const std::byte> body) {
  HelloRequest hello;
  PETPS_RETURN_IF_ERROR(decode_hello(header, body, hello));
  expect_inside(hello.client, body);
  return {};
}

Status decode_pull_request(const FrameHeader& header, std::span<const std::byte> body) {
  PullRequest pull;
  PETPS_RETURN_IF_ERROR(decode_pull(header, body, {}, pull));
  expect_inside(pull.sections, body);
  expect_inside(pull.keys, body);
  EXPECT_LE(pull.keys.size(), Limits().keys_per_pull);
  return {};
}

Status decode_push_request(const FrameHeader& header, std::span<const std::byte> body) {
  PushRequest push;
  PETPS_RETURN_IF_ERROR(decode_push(header, body, {}, push));
  expect_inside(push.keys, body);
  expect_inside(push.deletions, body);
  expect_inside(push.rows, body);
  EXPECT_EQ(push.rows.size(), push.keys.size() * push.row_bytes);
  return {};
}

Status decode_hot_keys_request(const FrameHeader& header, std::span<const std::byte> body) {
  HotKeysRequest hot;
  PETPS_RETURN_IF_ERROR(decode_hot_keys(header, body, {}, hot));
  expect_inside(hot.keys, body);
  return {};
}

Status decode_request(const FrameHeader& header, std::span<const std::byte> body) {
  switch (static_cast<Opcode>(header.opcode)) {
    case Opcode::kHello:
      return decode_hello_request(header, body);
    case Opcode::kTables:
      return decode_as(decode_tables, header, body);
    case Opcode::kPull:
      return decode_pull_request(header, body);
    case Opcode::kPush:
      return decode_push_request(header, body);
    case Opcode::kStatus:
      return decode_status(header, body);
    case Opcode::kHotKeys:
      return decode_hot_keys_request(header, body);
    case Opcode::kShardMap:
      return decode_shard_map(header, body);
    case Opcode::kRdma:
      return decode_as(decode_rdma, header, body);
    case Opcode::kControl:
      break;
  }
  return Status(Code::kUnimplemented, "unknown opcode");
}

Status decode_pull_reply(const FrameHeader& header, std::span<const std::byte> body) {
  PullReplyPrefix prefix;
  PETPS_RETURN_IF_ERROR(decode_pull_reply_prefix(header, body, prefix));
  EXPECT_LE(prefix.rows_offset, body.size());
  PullReply reply;
  PETPS_RETURN_IF_ERROR(decode_pull_reply_head(header, body.first(prefix.rows_offset), reply));
  expect_inside(reply.sections, body);
  expect_inside(reply.bitmaps, body);
  uint64_t bytes = 0;
  for (const PullReplySection& section : reply.sections)
    bytes += uint64_t{section.rows_found} * section.row_bytes;
  EXPECT_EQ(bytes, body.size() - reply.rows_offset);
  return {};
}

Status decode_reply(const FrameHeader& header, std::span<const std::byte> body) {
  if (header.code != 0) {
    EXPECT_FALSE(decode_error(header, body).ok());
    return {};
  }
  switch (static_cast<Opcode>(header.opcode & ~kReplyBit)) {
    case Opcode::kHello:
      return decode_as(decode_hello_reply, header, body);
    case Opcode::kTables:
      return decode_as(decode_tables_reply, header, body);
    case Opcode::kPull:
      return decode_pull_reply(header, body);
    case Opcode::kPush:
      return decode_as(decode_push_reply, header, body);
    case Opcode::kStatus:
      return decode_as(decode_status_reply, header, body);
    case Opcode::kHotKeys:
      return decode_hot_keys_reply(header, body);
    case Opcode::kShardMap: {
      ShardMap map;
      PETPS_RETURN_IF_ERROR(decode_shard_map_reply(header, body, map));
      EXPECT_TRUE(check_shard_map(map).ok());
      return {};
    }
    case Opcode::kControl:
      break;
    case Opcode::kRdma:
      return decode_as(decode_rdma_reply, header, body);
  }
  return Status(Code::kUnimplemented, "unknown opcode");
}

}  // namespace

std::vector<NamedFrame> sample_frames() {
  std::vector<NamedFrame> frames;
  const auto add = [&](const char* name, auto&& encode) {
    Frame frame;
    encode(frame);
    frames.push_back({name, std::move(frame)});
  };
  const std::vector<uint64_t> keys = {1, 2, 1, 0x0102030405060708};
  const std::vector<PullSection> sections = {{7, 3}, {9, 1}};
  add("hello", [](Frame& f) { encode_hello(10, {1, 1, "trainer"}, f); });
  add("hello_reply", [](Frame& f) { encode_hello_reply(10, sample_hello(), f); });
  add("tables", [](Frame& f) { encode_tables(12, {}, f); });
  add("tables_reply",
      [](Frame& f) { ASSERT_TRUE(encode_tables_reply(12, sample_tables(), f).ok()); });
  add("tables_state", [](Frame& f) { encode_tables(12, {.with_state = true}, f); });
  add("tables_state_reply", [](Frame& f) {
    TablesReply reply = sample_tables();
    reply.state = {sample_hello().pool_uuid, 0x0102030405060708};
    reply.aliases[0].previous = 3;
    ASSERT_TRUE(encode_tables_reply(12, reply, f).ok());
  });
  add("pull", [&](Frame& f) { encode_pull(11, {42, 1, 0, sections, keys}, f); });
  add("pull_wait", [&](Frame& f) { encode_pull(11, {42, 1, 250, sections, keys}, f); });
  add("pull_trace", [&](Frame& f) {
    PullRequest pull{42, 1, 0, sections, keys};
    for (size_t i = 0; i < 16; ++i) pull.trace.trace_id[i] = static_cast<uint8_t>(0x10 + i);
    for (size_t i = 0; i < 8; ++i) pull.trace.span_id[i] = static_cast<uint8_t>(0xA0 + i);
    pull.trace.flags = kTraceSampled;
    encode_pull(11, pull, f);
  });
  frames.push_back({"pull_reply", sample_pull_reply()});
  frames.push_back({"push", sample_push()});
  frames.push_back({"push_order", sample_push({0x1122334455667788, 12, 10, 0b1010})});
  add("push_reply", [](Frame& f) { encode_push_reply(13, {1, 2, 3, 4, 5}, f); });
  add("status", [](Frame& f) { encode_status(14, f); });
  add("status_reply",
      [](Frame& f) { ASSERT_TRUE(encode_status_reply(14, "{\"rows\":1}", f).ok()); });
  add("hot_keys", [&](Frame& f) { encode_hot_keys(15, {7, keys}, f); });
  add("hot_keys_reply", [](Frame& f) { encode_hot_keys_reply(15, f); });
  add("shard_map", [](Frame& f) { encode_shard_map(17, f); });
  add("shard_map_reply", [](Frame& f) { encode_shard_map_reply(17, sample_shard_map(), f); });
  add("rdma", [](Frame& f) {
    encode_rdma(18, {sample_queue_pair(), 0x55, 0x7f0102030000, 4u << 20, 64}, f);
  });
  add("rdma_reply", [](Frame& f) { encode_rdma_reply(18, {sample_queue_pair(), 16, 8192, 0}, f); });
  add("error",
      [](Frame& f) { encode_error(3, 16, Status(Code::kStale, "version 5 is not here yet"), f); });
  return frames;
}

Frame sample_frame(std::string_view name) {
  for (const NamedFrame& sample : sample_frames()) {
    if (sample.name == name) return sample.bytes;
  }
  ADD_FAILURE() << "no sample frame is called " << name;
  return {};
}

Status decode_any(std::span<const std::byte> frame) {
  FrameHeader header;
  PETPS_RETURN_IF_ERROR(decode_header(frame, header));
  // Like a transport: wait for more bytes, or pass on exactly the frame.
  if (frame.size() - kHeaderBytes < header.body_bytes)
    return Status(Code::kInvalidArgument, "incomplete");
  const std::span<const std::byte> body = frame.subspan(kHeaderBytes, header.body_bytes);
  if ((header.opcode & kReplyBit) != 0) return decode_reply(header, body);
  PETPS_RETURN_IF_ERROR(decode_request_header(frame, header));
  return decode_request(header, body);
}

std::string to_hex(std::span<const std::byte> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const auto value = std::to_integer<unsigned>(bytes[i]);
    text += kDigits[value >> 4];
    text += kDigits[value & 15];
    text += i % 16 == 15 || i + 1 == bytes.size() ? '\n' : ' ';
  }
  return text;
}

Frame from_hex(const std::string& text) {
  Frame bytes;
  int high = -1;
  for (const char c : text) {
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (digit < 0) continue;
    if (high < 0) {
      high = digit;
    } else {
      bytes.push_back(static_cast<std::byte>(high * 16 + digit));
      high = -1;
    }
  }
  return bytes;
}

}  // namespace petps::wire
