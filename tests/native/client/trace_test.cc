// Traced pulls: what servers receive of the trace, and what the caller learns of the parts.
#include <gtest/gtest.h>

#include "base/clock.h"
#include "fixtures.h"
#include "fleet.h"

namespace petps::client {
namespace {

using base::Code;
using testing::connect_to;
using testing::FakeServer;
using testing::Fleet;
using testing::quiet;

PullTrace trace_of(size_t parts) {
  PullTrace trace;
  trace.trace_id[0] = 0xAB;
  trace.span_id[0] = 0xCD;
  for (size_t i = 0; i < parts; ++i) trace.part_ids.push_back({static_cast<uint8_t>(i + 1)});
  return trace;
}

base::Status pull(Client& client, PullTrace* trace, size_t keys) {
  std::vector<float> rows(keys * FakeServer::kDim);
  PullOptions options;
  options.trace = trace;
  return client.pull("users", testing::first_keys(keys), rows, {}, options).status();
}

// 1,300 keys are three requests, and each carries the context.
TEST(PullTrace, AServerThatRecordsSpansReceivesTheIdOfItsPart) {
  FakeServer server;
  server.hello().features = wire::kFeatureTrace;
  const auto client = connect_to(server.url(), quiet());
  PullTrace trace = trace_of(1);
  ASSERT_TRUE(pull(*client, &trace, 1300).ok());
  const auto traces = server.traces();
  ASSERT_EQ(traces.size(), 3u);
  for (const auto& [context, bytes] : traces) {
    EXPECT_TRUE(context.is_sampled());
    EXPECT_EQ(context.trace_id, trace.trace_id);
    EXPECT_EQ(context.span_id, trace.part_ids[0]);
  }
  ASSERT_EQ(trace.parts.size(), 1u);
  EXPECT_EQ(trace.parts[0].server, server.address());
  EXPECT_EQ(trace.parts[0].keys, 1300u);
  EXPECT_EQ(trace.parts[0].found, 650u);
  EXPECT_EQ(trace.parts[0].attempts, 1u);
  EXPECT_EQ(trace.parts[0].code, Code::kOk);
  EXPECT_LE(trace.parts[0].end_ns, base::wall_ns() + 1'000'000'000);
  EXPECT_GE(trace.parts[0].end_ns, base::wall_ns() - 60'000'000'000);
}

TEST(PullTrace, APullThatIsNotTracedHasNoByteMore) {
  FakeServer server;
  server.hello().features = wire::kFeatureTrace;
  const auto client = connect_to(server.url(), quiet());
  PullTrace trace = trace_of(1);
  ASSERT_TRUE(pull(*client, nullptr, 10).ok());
  ASSERT_TRUE(pull(*client, &trace, 10).ok());
  const auto traces = server.traces();
  ASSERT_EQ(traces.size(), 2u);
  EXPECT_EQ(traces[0].first, wire::TraceContext{});
  EXPECT_EQ(traces[0].second, wire::pull_request_bytes(1, 10) - wire::kHeaderBytes);
  EXPECT_EQ(traces[1].second, traces[0].second + sizeof(wire::TraceContext));
}

TEST(PullTrace, AnOlderServerReceivesNoContext) {
  FakeServer server;
  server.hello().features = wire::kFeatureShardMap | wire::kFeaturePullWait |
                            wire::kFeatureCatalogueState | wire::kFeaturePushOrder;
  server.tables().state.pool_uuid = server.hello().pool_uuid;
  server.tables().state.counter = 1;
  const auto client = connect_to(server.url(), quiet());
  PullTrace trace = trace_of(1);
  ASSERT_TRUE(pull(*client, &trace, 10).ok());
  ASSERT_EQ(server.traces().size(), 1u);
  EXPECT_EQ(server.traces()[0].first, wire::TraceContext{});
  ASSERT_EQ(trace.parts.size(), 1u);  // the client's own span exists nevertheless
  EXPECT_EQ(trace.parts[0].found, 5u);
}

// The limit of a body counts for requests too: the server would close the connection.
TEST(PullTrace, ARequestThatJustFitsGoesWithoutTheContext) {
  server::ServerOptions with_spans;
  with_spans.trace = true;
  with_spans.limits.body_bytes = 4096;
  testing::RealServer server(with_spans);
  server.add_table("tiny", codec::Dtype::kF32, 1, 2000, 1000);
  server.start();
  Options options = quiet();
  options.keys_per_request = 509;  // with one section 4,096 bytes
  ASSERT_EQ(wire::pull_request_bytes(1, 509) - wire::kHeaderBytes, 4096u);
  const auto client = connect_to(server.url(), options);
  std::vector<server::Span> spans;
  for (const size_t keys : {509u, 505u}) {
    std::vector<float> rows(keys);
    PullTrace trace = trace_of(1);
    PullOptions traced;
    traced.trace = &trace;
    ASSERT_TRUE(client->pull("tiny", testing::first_keys(keys), rows, {}, traced).ok());
    EXPECT_EQ(trace.parts[0].attempts, 1u);
  }
  ASSERT_TRUE(server.server().stop().ok());  // after the last span
  EXPECT_EQ(server.server().take_spans(10, spans), 0u);
  ASSERT_EQ(spans.size(), 1u);
  EXPECT_EQ(spans[0].keys, 505u);
}

TEST(PullTrace, AFailedPullClosesItsParts) {
  FakeServer server([](wire::Opcode opcode, uint64_t, wire::Frame& reply) {
    if (opcode == wire::Opcode::kPull)
      testing::replace_by_error(reply, Code::kInvalidArgument, "no");
    return testing::Answer::kSend;
  });
  server.hello().features = wire::kFeatureTrace;
  const auto client = connect_to(server.url(), quiet());
  PullTrace trace = trace_of(1);
  EXPECT_EQ(pull(*client, &trace, 10).code(), Code::kInvalidArgument);
  ASSERT_EQ(trace.parts.size(), 1u);
  EXPECT_EQ(trace.parts[0].code, Code::kInvalidArgument);
  EXPECT_EQ(trace.parts[0].attempts, 1u);
  EXPECT_NE(trace.parts[0].end_ns, 0u);
}

TEST(PullTrace, ARetryCountsAsAnAttempt) {
  FakeServer server([](wire::Opcode opcode, uint64_t count, wire::Frame&) {
    return opcode == wire::Opcode::kPull && count == 0 ? testing::Answer::kSendAndClose
                                                       : testing::Answer::kSend;
  });
  server.hello().features = wire::kFeatureTrace;
  const auto client = connect_to(server.url(), quiet());
  PullTrace trace = trace_of(1);
  ASSERT_TRUE(pull(*client, &trace, 1300).ok());
  ASSERT_EQ(trace.parts.size(), 1u);
  EXPECT_EQ(trace.parts[0].attempts, 2u);
  EXPECT_EQ(trace.parts[0].code, Code::kOk);
  EXPECT_EQ(trace.parts[0].found, 650u);
}

class TracedFleet : public Fleet {
 protected:
  base::Status pull(Client& client, PullTrace& trace, const std::vector<uint64_t>& keys) {
    std::vector<float> rows(keys.size() * testing::kDim);
    PullOptions options;
    options.trace = &trace;
    return client.pull("f32", keys, rows, {}, options).status();
  }
  // Return a client that has read the map of two servers. filled: as for add_server().
  std::unique_ptr<Client> connect_to_two(uint64_t filled = 0) {
    for (const uint64_t owned : {0x0F, 0xF0}) add_server(owned, filled);
    publish();
    auto client = connect();
    PullTrace warm = trace_of(0);
    EXPECT_TRUE(pull(*client, warm, testing::first_keys(10)).ok());
    return client;
  }
};

TEST_F(TracedFleet, EachShardHasAPart) {
  const auto client = connect_to_two();
  EXPECT_EQ(client->shards(), 2u);
  PullTrace trace = trace_of(2);
  const std::vector<uint64_t> keys = testing::first_keys(400);
  ASSERT_TRUE(pull(*client, trace, keys).ok());
  ASSERT_EQ(trace.parts.size(), 2u);
  EXPECT_EQ(trace.parts[0].keys + trace.parts[1].keys, keys.size());
  EXPECT_EQ(trace.parts[0].found + trace.parts[1].found, keys.size());
  EXPECT_NE(trace.parts[0].server, trace.parts[1].server);
  for (const PullTrace::Part& part : trace.parts) {
    EXPECT_EQ(part.code, Code::kOk);
    EXPECT_EQ(part.attempts, 1u);
    EXPECT_NE(part.end_ns, 0u);
  }
}

// A group without keys has a part too, so that the ids stay with their groups.
TEST_F(TracedFleet, AShardWithoutKeysIsNotAsked) {
  const auto client = connect_to_two();
  for (const uint64_t partitions : {0x0Fu, 0xF0u}) {
    PullTrace trace = trace_of(2);
    ASSERT_TRUE(pull(*client, trace, testing::keys_of(partitions)).ok());
    size_t asked = 0;
    for (const PullTrace::Part& part : trace.parts) {
      asked += part.attempts;
      EXPECT_EQ(part.keys == 0, part.attempts == 0);
    }
    EXPECT_EQ(asked, 1u);
  }
}

TEST_F(TracedFleet, APartOfAnOlderMapEndsAsWrongShard) {
  const auto client = connect_to_two(0xFF);
  split_between_two(0x03);  // partitions 2 and 3 move to the other server
  for (const auto& server : servers_) server->set_shard_map(map());
  PullTrace trace = trace_of(2);
  ASSERT_TRUE(pull(*client, trace, testing::first_keys(400)).ok());
  ASSERT_EQ(trace.parts.size(), 4u);  // two of each map
  size_t wrong = 0;
  for (size_t i = 0; i < trace.parts.size(); ++i) {
    EXPECT_NE(trace.parts[i].end_ns, 0u);
    if (i < 2) {
      wrong += trace.parts[i].code == Code::kWrongShard;
    } else {
      EXPECT_EQ(trace.parts[i].code, Code::kOk);
    }
  }
  EXPECT_GE(wrong, 1u);
}

}  // namespace
}  // namespace petps::client
