// Encoded messages decode unchanged; each refusal has its code and message.
#include "wire/wire.h"

#include <gtest/gtest.h>

#include <cstring>

#include "frames.h"

namespace petps::wire {
namespace {

using base::Code;
using base::Status;

struct OpenedFrame {
  FrameHeader header;
  std::span<const std::byte> body;
};

OpenedFrame open_frame(const Frame& frame) {
  OpenedFrame opened;
  EXPECT_TRUE(decode_header(frame, opened.header).ok());
  opened.body = std::span<const std::byte>(frame).subspan(kHeaderBytes);
  EXPECT_EQ(opened.header.body_bytes, opened.body.size());
  return opened;
}

template <typename T>
void change_header(Frame& frame, T FrameHeader::*field, T value) {
  FrameHeader header = open_frame(frame).header;
  header.*field = value;
  std::memcpy(frame.data(), &header, kHeaderBytes);
}

template <typename T>
void change_body(Frame& frame, size_t body_offset, T value) {
  std::memcpy(frame.data() + kHeaderBytes + body_offset, &value, sizeof(value));
}

Frame pull_frame(uint32_t sections, uint32_t keys_each) {
  const std::vector<PullSection> heads(sections, PullSection{1, keys_each});
  const std::vector<uint64_t> keys(size_t{sections} * keys_each, 5);
  Frame frame;
  encode_pull(1, {0, 0, 0, heads, keys}, frame);
  return frame;
}

Status decode_pull_frame(const Frame& frame, const Limits& limits = {}) {
  const OpenedFrame opened = open_frame(frame);
  PullRequest pull;
  return decode_pull(opened.header, opened.body, limits, pull);
}

TEST(Wire, APullIsDecodedUnchanged) {
  const std::vector<PullSection> sections = {{7, 2}, {9, 0}, {8, 3}};
  const std::vector<uint64_t> keys = {5, 5, 6, ~uint64_t{0}, 0};
  Frame frame;
  encode_pull(99, {17, 3, 20, sections, keys}, frame);
  EXPECT_EQ(frame.size(), pull_request_bytes(3, 5));
  const OpenedFrame opened = open_frame(frame);
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

TEST(Wire, APushIsDecodedUnchanged) {
  for (const bool has_order : {false, true}) {
    const Frame frame = sample_frame(has_order ? "push_order" : "push");
    const OpenedFrame opened = open_frame(frame);
    EXPECT_EQ(opened.header.body_bytes % kBodyAlignment, 0u);
    EXPECT_EQ(frame.size(), push_request_bytes(3, 3, true) - (has_order ? 0 : sizeof(PushOrder)));
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

TEST(Wire, TheTablesAreDecodedUnchangedWithAndWithoutState) {
  for (const bool with_state : {false, true}) {
    const Frame frame = sample_frame(with_state ? "tables_state_reply" : "tables_reply");
    TablesReply reply;
    ASSERT_TRUE(decode_frame(decode_tables_reply, frame, reply).ok());
    ASSERT_EQ(reply.tables.size(), 2u);
    EXPECT_EQ(reply.tables[1].name, "items");
    EXPECT_EQ(reply.tables[1].default_row.size(), 9u);
    EXPECT_EQ(reply.state.counter, with_state ? 0x0102030405060708u : 0u);
    EXPECT_EQ(reply.state.pool_uuid[1], with_state ? 17 : 0);
    EXPECT_EQ(reply.aliases[0].previous, with_state ? 3u : 0u);
    Frame encoded_again;
    ASSERT_TRUE(encode_tables_reply(12, reply, encoded_again).ok());
    EXPECT_EQ(encoded_again, frame);
  }
}

TEST(Wire, RefusesAListAboveTheLimitsOfTablesInstancesAndAliases) {
  const struct {
    size_t offset;
    uint32_t most;
    std::string name;
  } counts[] = {
      {0, kMaxInstances, "instances"}, {4, kMaxAliases, "aliases"}, {8, kMaxTables, "tables"}};
  for (const auto& [offset, most, name] : counts) {
    Frame frame = sample_frame("tables_reply");
    TablesReply reply;
    change_body<uint32_t>(frame, offset, most);  // the frame ends before
    const Status status = decode_frame(decode_tables_reply, frame, reply);
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(status.message().find(name + ", more than"), std::string_view::npos);
    change_body<uint32_t>(frame, offset, most + 1);
    expect_refused(decode_frame(decode_tables_reply, frame, reply), Code::kInvalidArgument,
                   std::to_string(most + 1) + " " + name);
  }
  TablesReply most;
  most.tables.resize(kMaxTables);
  Frame frame;
  ASSERT_TRUE(encode_tables_reply(1, most, frame).ok());
  TablesReply decoded;
  EXPECT_TRUE(decode_frame(decode_tables_reply, frame, decoded).ok());
  EXPECT_EQ(decoded, most);
  most.tables.emplace_back();
  expect_refused(encode_tables_reply(1, most, frame), Code::kResourceExhausted, "65537 tables");
}

TEST(Wire, AHelloReplyIsDecodedUnchanged) {
  HelloReply reply;
  ASSERT_TRUE(decode_frame(decode_hello_reply, sample_frame("hello_reply"), reply).ok());
  EXPECT_EQ(reply.limits, Limits());
  EXPECT_TRUE(reply.shard.owns(64));
  EXPECT_FALSE(reply.shard.owns(0));
  EXPECT_FALSE(reply.shard.owns(96));
  EXPECT_FALSE(reply.shard.owns_all());
  EXPECT_EQ(reply.pool_uuid[15], 255);
}

TEST(Wire, AnRdmaOfferIsDecodedUnchangedAndABadAddressIsRefused) {
  RdmaRequest request{{5, 6, 7, 3, 0, {}}, 8, 9, 65536, 4};
  Frame frame;
  encode_rdma(1, request, frame);
  FrameHeader header;
  ASSERT_TRUE(decode_request_header(frame, header).ok());
  RdmaRequest decoded;
  ASSERT_TRUE(decode_frame(decode_rdma, frame, decoded).ok());
  EXPECT_EQ(decoded, request);
  for (const QueuePair& bad : {QueuePair{0, 6, 7, 3, 0, {}}, QueuePair{1u << 24, 6, 7, 3, 0, {}},
                               QueuePair{5, 1u << 24, 7, 3, 0, {}}, QueuePair{5, 6, 7, 0, 0, {}},
                               QueuePair{5, 6, 7, 6, 0, {}}, QueuePair{5, 6, 7, 3, 1, {}}}) {
    request.pair = bad;
    encode_rdma(1, request, frame);
    EXPECT_EQ(decode_frame(decode_rdma, frame, decoded).code(), Code::kInvalidArgument);
  }
}

TEST(Wire, AnRdmaReplyIsDecodedUnchangedAndZeroCreditsAreRefused) {
  RdmaReply reply{{5, 6, 7, 3, 0, {}}, 16, 8192, 0};
  Frame frame;
  encode_rdma_reply(1, reply, frame);
  FrameHeader header;
  ASSERT_TRUE(decode_reply_header(frame, header).ok());
  RdmaReply decoded;
  ASSERT_TRUE(decode_frame(decode_rdma_reply, frame, decoded).ok());
  EXPECT_EQ(decoded, reply);
  reply.credits = 0;
  encode_rdma_reply(1, reply, frame);
  EXPECT_EQ(decode_frame(decode_rdma_reply, frame, decoded).code(), Code::kInvalidArgument);
}

TEST(Wire, AnErrorKeepsItsCodeAndALongMessageIsCut) {
  for (uint16_t code = 1; code <= static_cast<uint16_t>(Code::kInUse); ++code) {
    Frame frame;
    encode_error(static_cast<uint16_t>(Opcode::kPull), 5,
                 Status(static_cast<Code>(code), std::string(9000, 'x')), frame);
    const OpenedFrame opened = open_frame(frame);
    EXPECT_EQ(opened.header.opcode, 0x8003);
    const Status status = decode_error(opened.header, opened.body);
    EXPECT_EQ(status.code(), static_cast<Code>(code));
    EXPECT_EQ(status.message().size(), kMaxErrorBytes);
  }
}

TEST(Wire, NamesEveryOpcode) {
  EXPECT_EQ(opcode_name(static_cast<uint16_t>(Opcode::kHello)), "hello");
  EXPECT_EQ(opcode_name(static_cast<uint16_t>(Opcode::kRdma) | kReplyBit), "rdma");
  EXPECT_EQ(opcode_name(0), "unknown");
  EXPECT_EQ(opcode_name(kOpcodesEnd), "unknown");
}

TraceContext sampled_context() {
  TraceContext trace;
  trace.trace_id[15] = 1;
  trace.span_id[0] = 2;
  trace.flags = kTraceSampled;
  return trace;
}

Frame traced_frame(const TraceContext& trace) {
  const std::vector<PullSection> sections = {{7, 1}};
  const std::vector<uint64_t> keys = {5};
  Frame frame;
  encode_pull(1, {0, 0, 0, sections, keys, trace}, frame);
  return frame;
}

TEST(Wire, ASampledTraceIsDecodedUnchanged) {
  const Frame frame = traced_frame(sampled_context());
  EXPECT_EQ(frame.size(), pull_request_bytes(1, 1) + sizeof(TraceContext));
  const OpenedFrame opened = open_frame(frame);
  PullRequest pull;
  ASSERT_TRUE(decode_pull(opened.header, opened.body, {}, pull).ok());
  EXPECT_EQ(pull.trace, sampled_context());
  EXPECT_EQ(pull.keys.size(), 1u);
}

TEST(Wire, ATraceThatIsNotSampledAddsNoByte) {
  for (size_t missing = 0; missing < 3; ++missing) {
    TraceContext trace = sampled_context();
    if (missing == 0) trace.flags = 0xfe;
    if (missing == 1) trace.trace_id = {};
    if (missing == 2) trace.span_id = {};
    EXPECT_EQ(traced_frame(trace), traced_frame({}));
  }
  EXPECT_EQ(traced_frame({}).size(), pull_request_bytes(1, 1));
}

TEST(Wire, ADecoderForgetsTheTraceOfAnEarlierPull) {
  PullRequest pull;
  pull.trace = sampled_context();
  const Frame frame = pull_frame(1, 1);
  const OpenedFrame opened = open_frame(frame);
  ASSERT_TRUE(decode_pull(opened.header, opened.body, {}, pull).ok());
  EXPECT_FALSE(pull.trace.is_sampled());
}

TEST(Wire, RefusesATraceThatIsCutOffOrNotAnnounced) {
  Frame frame = traced_frame(sampled_context());
  change_header(frame, &FrameHeader::flags, 0u);
  expect_refused(decode_pull_frame(frame), Code::kInvalidArgument, "32 bytes are left");
  frame = pull_frame(1, 1);
  change_header(frame, &FrameHeader::flags, kFlagTrace);
  expect_refused(decode_pull_frame(frame), Code::kInvalidArgument, "inside the trace context");
  FrameHeader header;
  change_header(frame, &FrameHeader::flags, kFlagTrace | 2);
  expect_refused(decode_header(frame, header), Code::kInvalidArgument, "flags");
  frame = sample_frame("push");
  change_header(frame, &FrameHeader::flags, kFlagTrace);
  expect_refused(decode_header(frame, header), Code::kInvalidArgument, "flags");
  frame = sample_frame("pull_reply");
  change_header(frame, &FrameHeader::flags, kFlagTrace);
  expect_refused(decode_header(frame, header), Code::kInvalidArgument, "flags");
}

TEST(Wire, AnyValuesOfATraceAreAccepted) {
  Frame frame = traced_frame(sampled_context());
  for (size_t at = frame.size() - sizeof(TraceContext); at < frame.size(); ++at)
    frame[at] = std::byte{0xff};
  EXPECT_TRUE(decode_pull_frame(frame).ok());
  for (size_t at = frame.size() - sizeof(TraceContext); at < frame.size(); ++at)
    frame[at] = std::byte{0};
  EXPECT_TRUE(decode_pull_frame(frame).ok());
}

TEST(Wire, RefusesBytesOfAnotherProtocol) {
  const char garbage[] = "GET / HTTP/1.1\r\nHost: example\r\n\r\n";
  FrameHeader header;
  expect_refused(decode_header(std::as_bytes(std::span(garbage)), header), Code::kInvalidArgument,
                 "PTPS");
}

TEST(Wire, RefusesAnotherVersionAnOversizedFrameAndAnOddLength) {
  FrameHeader header;
  Frame frame = pull_frame(1, 1);
  change_header(frame, &FrameHeader::version, uint16_t{2});
  expect_refused(decode_header(frame, header), Code::kUnimplemented, "protocol version 2");
  frame = pull_frame(1, 1);
  change_header(frame, &FrameHeader::body_bytes, kMaxBodyBytes + 8);
  expect_refused(decode_header(frame, header), Code::kResourceExhausted,
                 "16777224 bytes is above the limit");
  frame = pull_frame(1, 1);
  change_header(frame, &FrameHeader::body_bytes, 17u);
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
  change_body<uint32_t>(frame, 20, 5);  // the section says 5 keys, the frame has 4
  expect_refused(decode_pull_frame(frame), Code::kInvalidArgument, "truncated pull");
  change_body<uint32_t>(frame, 20, 3);
  expect_refused(decode_pull_frame(frame), Code::kInvalidArgument, "8 bytes are left");
  change_body<uint32_t>(frame, 20, 0xffffffff);
  expect_refused(decode_pull_frame(frame), Code::kResourceExhausted, "4294967295 keys");
}

TEST(Wire, RefusesASectionCountBeyondTheBody) {
  Frame frame = pull_frame(1, 1);
  change_header(frame, &FrameHeader::sections, 4096u);
  expect_refused(decode_pull_frame(frame), Code::kInvalidArgument, "inside the sections");
  change_header(frame, &FrameHeader::sections, 0u);
  expect_refused(decode_pull_frame(frame), Code::kInvalidArgument, "without sections");
}

TEST(Wire, RefusesAPushWithoutRowsThatDoesNotDeleteAllKeys) {
  const std::vector<uint64_t> keys = {1, 2};
  PushRequest push;
  push.keys = keys;
  const auto decode = [&](const std::vector<uint64_t>& deletions) {
    push.deletions = deletions;
    Frame frame;
    encode_push(1, push, frame);
    return decode_any(frame);
  };
  expect_refused(decode({}), Code::kInvalidArgument, "2 keys are not marked");
  expect_refused(decode({0b01}), Code::kInvalidArgument, "1 keys are not marked");
  expect_refused(decode({0b111}), Code::kInvalidArgument, "beyond the last");
  EXPECT_TRUE(decode({0b11}).ok());
}

TEST(Wire, RefusesAnInvalidPushOrder) {
  const std::vector<uint64_t> keys = {1};
  const std::vector<uint64_t> deleted = {1};
  PushRequest push;
  push.keys = keys;
  push.deletions = deleted;
  push.order = {7, 3, 4, 0};
  Frame frame;
  encode_push(1, push, frame);
  expect_refused(decode_any(frame), Code::kInvalidArgument,
                 "number 3, which is below its oldest call 4");
  push.order = {7, 3, 3, 0};
  encode_push(1, push, frame);
  EXPECT_TRUE(decode_any(frame).ok());
  change_body<uint64_t>(frame, 32, 0);
  expect_refused(decode_any(frame), Code::kInvalidArgument, "client 0");
}

TEST(Wire, RefusesAPullReplyWhosePartsDisagree) {
  const Frame frame = sample_frame("pull_reply");
  ASSERT_TRUE(decode_any(frame).ok());
  Frame broken = frame;
  change_body<uint64_t>(broken, 16 + 48, 0b100);  // first bitmap: one bit, two rows
  expect_refused(decode_any(broken), Code::kInvalidArgument, "presence bits");
  broken = frame;
  change_body<uint64_t>(broken, 16 + 48, 0b1010);  // a bit beyond the 3 keys
  expect_refused(decode_any(broken), Code::kInvalidArgument, "presence bits");
  broken = frame;
  change_body<uint32_t>(broken, 16 + 8, 5);  // other row bytes
  expect_refused(decode_any(broken), Code::kInvalidArgument, "row bytes");
  broken = frame;
  change_body<uint64_t>(broken, 8, uint64_t{1} << 60);  // rows offset
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
