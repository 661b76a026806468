// Round trips, and the message of each refusal.
#include "wire/wire.h"

#include <gtest/gtest.h>

#include <cstring>

#include "frames.h"

namespace petps::wire {
namespace {

using base::Code;
using base::Status;

struct Opened {
  FrameHeader header;
  std::span<const std::byte> body;
};

Opened open_frame(const Frame& frame) {
  Opened opened;
  EXPECT_TRUE(decode_header(frame, opened.header).ok());
  opened.body = std::span<const std::byte>(frame).subspan(kHeaderBytes);
  EXPECT_EQ(opened.header.body_bytes, opened.body.size());
  return opened;
}

void change_header(Frame& frame, const FrameHeader& header) {
  std::memcpy(frame.data(), &header, kHeaderBytes);
}

template <typename T>
void change(Frame& frame, size_t body_offset, T value) {
  std::memcpy(frame.data() + kHeaderBytes + body_offset, &value, sizeof(value));
}

void expect_refused(const Status& status, Code code, const std::string& part) {
  EXPECT_EQ(status.code(), code) << status.to_string();
  EXPECT_NE(status.message().find(part), std::string_view::npos) << status.to_string();
}

Frame pull_frame(uint32_t sections, uint32_t keys_each) {
  const std::vector<PullSection> heads(sections, PullSection{1, keys_each});
  const std::vector<uint64_t> keys(size_t{sections} * keys_each, 5);
  Frame frame;
  encode_pull(1, {0, 0, 0, heads, keys}, frame);
  return frame;
}

Status decode_pull_frame(const Frame& frame, const Limits& limits = {}) {
  const Opened opened = open_frame(frame);
  PullRequest pull;
  return decode_pull(opened.header, opened.body, limits, pull);
}

TEST(Wire, PullComesBack) {
  const std::vector<PullSection> sections = {{7, 2}, {9, 0}, {8, 3}};
  const std::vector<uint64_t> keys = {5, 5, 6, ~uint64_t{0}, 0};
  Frame frame;
  encode_pull(99, {17, 3, 20, sections, keys}, frame);
  EXPECT_EQ(frame.size(), pull_request_bytes(3, 5));
  const Opened opened = open_frame(frame);
  EXPECT_EQ(opened.header.request_id, 99u);
  PullRequest pull;
  ASSERT_TRUE(decode_pull(opened.header, opened.body, {}, pull).ok());
  EXPECT_EQ(pull.min_version, 17u);
  EXPECT_EQ(pull.instance, 3u);
  EXPECT_EQ(pull.wait_ms, 20u);
  ASSERT_EQ(pull.sections.size(), 3u);
  EXPECT_EQ(pull.sections[2].table, 8u);
  EXPECT_EQ(std::vector<uint64_t>(pull.keys.begin(), pull.keys.end()), keys);
}

TEST(Wire, PushComesBack) {
  for (const NamedFrame& sample : sample_frames()) {
    if (sample.name != "push" && sample.name != "push_order") continue;
    const bool has_order = sample.name == "push_order";
    const Opened opened = open_frame(sample.bytes);
    EXPECT_EQ(opened.header.body_bytes % kBodyAlignment, 0u);
    EXPECT_EQ(sample.bytes.size(),
              push_request_bytes(3, 3, true) - (has_order ? 0 : sizeof(PushOrder)));
    PushRequest push;
    ASSERT_TRUE(decode_push(opened.header, opened.body, {}, push).ok());
    EXPECT_EQ(push.table, 9u);
    EXPECT_EQ(push.stamp, 77u);
    EXPECT_EQ(push.order,
              has_order ? (PushOrder{0x1122334455667788, 12, 10, 0b1010}) : PushOrder());
    EXPECT_EQ(push.keys.size(), 3u);
    EXPECT_EQ(push.deletions[0], 2u);
    EXPECT_EQ(push.rows.size(), 9u);
  }
}

TEST(Wire, TablesAndHelloComeBack) {
  for (const NamedFrame& sample : sample_frames()) {
    if (sample.name == "tables_reply" || sample.name == "tables_state_reply") {
      const Opened opened = open_frame(sample.bytes);
      TablesReply reply;
      ASSERT_TRUE(decode_tables_reply(opened.header, opened.body, reply).ok());
      ASSERT_EQ(reply.tables.size(), 2u);
      EXPECT_EQ(reply.tables[1].name, "items");
      EXPECT_EQ(reply.tables[1].default_row.size(), 9u);
      const bool with_state = sample.name == "tables_state_reply";
      EXPECT_EQ(reply.state.counter, with_state ? 0x0102030405060708u : 0u);
      EXPECT_EQ(reply.state.pool_uuid[1], with_state ? 17 : 0);
      EXPECT_EQ(reply.aliases[0].previous, with_state ? 3u : 0u);
      Frame again;
      ASSERT_TRUE(encode_tables_reply(12, reply, again).ok());
      EXPECT_EQ(again, sample.bytes);
    } else if (sample.name == "hello_reply") {
      const Opened opened = open_frame(sample.bytes);
      HelloReply reply;
      ASSERT_TRUE(decode_hello_reply(opened.header, opened.body, reply).ok());
      EXPECT_EQ(reply.limits, Limits());
      EXPECT_TRUE(reply.shard.owns(64));
      EXPECT_FALSE(reply.shard.owns(0));
      EXPECT_FALSE(reply.shard.owns(96));
      EXPECT_FALSE(reply.shard.owns_all());
      EXPECT_EQ(reply.pool_uuid[15], 255);
    }
  }
}

TEST(Wire, RdmaComesBackAndNoAddressIsRefused) {
  RdmaRequest request{{5, 6, 7, 3, 0, {}}, 8, 9, 65536, 4};
  Frame frame;
  encode_rdma(1, request, frame);
  FrameHeader header;
  ASSERT_TRUE(decode_request_header(frame, header).ok());
  RdmaRequest out;
  const auto body = [&] { return std::span<const std::byte>(frame).subspan(kHeaderBytes); };
  ASSERT_TRUE(decode_rdma(header, body(), out).ok());
  EXPECT_EQ(out, request);
  const auto refuses = [&](const QueuePair& pair) {
    request.pair = pair;
    encode_rdma(1, request, frame);
    return decode_rdma(header, body(), out).code() == Code::kInvalidArgument;
  };
  EXPECT_TRUE(refuses({0, 6, 7, 3, 0, {}}));
  EXPECT_TRUE(refuses({1u << 24, 6, 7, 3, 0, {}}));
  EXPECT_TRUE(refuses({5, 1u << 24, 7, 3, 0, {}}));
  EXPECT_TRUE(refuses({5, 6, 7, 0, 0, {}}));
  EXPECT_TRUE(refuses({5, 6, 7, 6, 0, {}}));
  EXPECT_TRUE(refuses({5, 6, 7, 3, 1, {}}));
  RdmaReply reply{{5, 6, 7, 3, 0, {}}, 16, 8192, 0};
  encode_rdma_reply(1, reply, frame);
  ASSERT_TRUE(decode_reply_header(frame, header).ok());
  RdmaReply got;
  ASSERT_TRUE(decode_rdma_reply(header, body(), got).ok());
  EXPECT_EQ(got, reply);
  reply.credits = 0;
  encode_rdma_reply(1, reply, frame);
  EXPECT_EQ(decode_rdma_reply(header, body(), got).code(), Code::kInvalidArgument);
}

TEST(Wire, AnErrorTravelsWithItsCodeAndIsCut) {
  Frame frame;
  encode_error(static_cast<uint16_t>(Opcode::kPull), 5,
               Status(Code::kWrongShard, std::string(9000, 'x')), frame);
  const Opened opened = open_frame(frame);
  EXPECT_EQ(opened.header.opcode, 0x8003);
  const Status status = decode_error(opened.header, opened.body);
  EXPECT_EQ(status.code(), Code::kWrongShard);
  EXPECT_EQ(status.message().size(), kMaxErrorBytes);
}

TEST(Wire, RefusesForeignBytes) {
  const char garbage[] = "GET / HTTP/1.1\r\nHost: example\r\n\r\n";
  FrameHeader header;
  expect_refused(decode_header(std::as_bytes(std::span(garbage)), header), Code::kInvalidArgument,
                 "PTPS");
}

TEST(Wire, RefusesAnotherVersion) {
  Frame frame = pull_frame(1, 1);
  FrameHeader header = open_frame(frame).header;
  header.version = 2;
  change_header(frame, header);
  expect_refused(decode_header(frame, header), Code::kUnimplemented, "protocol version 2");
}

TEST(Wire, RefusesAnOversizedFrame) {
  Frame frame = pull_frame(1, 1);
  FrameHeader header = open_frame(frame).header;
  header.body_bytes = kMaxBodyBytes + 8;
  change_header(frame, header);
  expect_refused(decode_header(frame, header), Code::kResourceExhausted,
                 "16777224 bytes is above the limit");
}

TEST(Wire, RefusesAnOddLength) {
  Frame frame = pull_frame(1, 1);
  FrameHeader header = open_frame(frame).header;
  header.body_bytes = 17;
  change_header(frame, header);
  expect_refused(decode_request_header(frame, header), Code::kInvalidArgument, "multiple of 8");
}

TEST(Wire, RefusesTooManyKeysAndSections) {
  Limits limits;
  limits.keys_per_pull = 10;
  limits.sections_per_pull = 2;
  expect_refused(decode_pull_frame(pull_frame(1, 11), limits), Code::kResourceExhausted, "11 keys");
  expect_refused(decode_pull_frame(pull_frame(3, 1), limits), Code::kResourceExhausted,
                 "3 sections");
  EXPECT_TRUE(decode_pull_frame(pull_frame(2, 5), limits).ok());
}

TEST(Wire, RefusesCountsThatDoNotFit) {
  Frame frame = pull_frame(1, 4);
  change<uint32_t>(frame, 20, 5);  // the section says 5 keys, the frame has 4
  expect_refused(decode_pull_frame(frame), Code::kInvalidArgument, "truncated pull");
  change<uint32_t>(frame, 20, 3);
  expect_refused(decode_pull_frame(frame), Code::kInvalidArgument, "8 bytes are left");
  change<uint32_t>(frame, 20, 0xffffffff);
  expect_refused(decode_pull_frame(frame), Code::kResourceExhausted, "4294967295 keys");
}

TEST(Wire, RefusesASectionCountBeyondTheBody) {
  Frame frame = pull_frame(1, 1);
  FrameHeader header = open_frame(frame).header;
  header.sections = 4096;
  change_header(frame, header);
  expect_refused(decode_pull_frame(frame), Code::kInvalidArgument, "inside the sections");
  header.sections = 0;
  change_header(frame, header);
  expect_refused(decode_pull_frame(frame), Code::kInvalidArgument, "without sections");
}

TEST(Wire, RefusesRowlessPushOfLiveKeys) {
  const std::vector<uint64_t> keys = {1, 2};
  const std::vector<uint64_t> one = {0b01};
  const std::vector<uint64_t> both = {0b11};
  const std::vector<uint64_t> beyond = {0b111};
  PushRequest push;
  push.keys = keys;
  const auto decode = [&](std::span<const uint64_t> deletions) {
    push.deletions = deletions;
    Frame frame;
    encode_push(1, push, frame);
    const Opened opened = open_frame(frame);
    PushRequest out;
    return decode_push(opened.header, opened.body, {}, out);
  };
  expect_refused(decode({}), Code::kInvalidArgument, "2 keys are not marked");
  expect_refused(decode(one), Code::kInvalidArgument, "1 keys are not marked");
  expect_refused(decode(beyond), Code::kInvalidArgument, "beyond the last");
  EXPECT_TRUE(decode(both).ok());
}

TEST(Wire, RefusesAnOrderThatCannotBe) {
  const std::vector<uint64_t> keys = {1};
  const std::vector<uint64_t> deleted = {1};
  PushRequest push;
  push.keys = keys;
  push.deletions = deleted;
  push.order = {7, 3, 4, 0};
  Frame frame;
  encode_push(1, push, frame);
  expect_refused(decode_any(frame), Code::kInvalidArgument, "number 3 and an oldest of 4");
  push.order = {7, 3, 3, 0};
  encode_push(1, push, frame);
  EXPECT_TRUE(decode_any(frame).ok());
  change<uint64_t>(frame, 32, 0);
  expect_refused(decode_any(frame), Code::kInvalidArgument, "client 0");
}

TEST(Wire, RefusesAReplyWhosePartsDisagree) {
  Frame frame;
  for (const NamedFrame& sample : sample_frames()) {
    if (sample.name == "pull_reply") frame = sample.bytes;
  }
  ASSERT_TRUE(decode_any(frame).ok());
  Frame broken = frame;
  change<uint64_t>(broken, 16 + 48, 0b100);  // first bitmap: one bit, two rows
  expect_refused(decode_any(broken), Code::kInvalidArgument, "presence bits");
  broken = frame;
  change<uint64_t>(broken, 16 + 48, 0b1010);  // a bit beyond the 3 keys
  expect_refused(decode_any(broken), Code::kInvalidArgument, "presence bits");
  broken = frame;
  change<uint32_t>(broken, 16 + 8, 5);  // other row bytes
  expect_refused(decode_any(broken), Code::kInvalidArgument, "row bytes");
  broken = frame;
  change<uint64_t>(broken, 8, uint64_t{1} << 60);  // rows offset
  expect_refused(decode_any(broken), Code::kInvalidArgument, "rows at byte");
}

TEST(Wire, FullSizePullAndReplyFitTheirLimits) {
  const std::vector<PullSection> sections(kMaxSectionsPerPull,
                                          PullSection{1, kMaxKeysPerPull / kMaxSectionsPerPull});
  EXPECT_LE(pull_request_bytes(kMaxSectionsPerPull, kMaxKeysPerPull) - kHeaderBytes, kMaxBodyBytes);
  EXPECT_LE(pull_reply_head_bytes(sections) - kHeaderBytes, kMaxBodyBytes / 4);
}

}  // namespace
}  // namespace petps::wire
