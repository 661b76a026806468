// Peers that break the rules of the protocol, and servers that do not answer.
#include <atomic>
#include <cstring>
#include <random>

#include "router_fixture.h"
#include "tests/seed.h"

namespace petps::router {
namespace {

using client::testing::Answer;
using client::testing::FakeServer;
using client::testing::first_keys;

class HostilePeers : public RouterFixture {
 protected:
  HostilePeers() { options_.deadline_ms = 20'000; }
  void start_two() {
    add_server(kFirstHalf);
    add_server(kSecondHalf);
    publish();
    start();
  }
  void expect_serves() { ASSERT_TRUE(pull(*connect_to_router(), first_keys(100)).ok()); }
};

TEST_F(HostilePeers, GarbageEndsItsConnectionOnly) {
  start_two();
  std::mt19937_64 random(tests::seed());
  for (int round = 0; round < 50; ++round) {
    const auto client = raw();
    const bool has_said_hello = round % 2 == 0;
    EXPECT_TRUE(!has_said_hello || hello(*client).ok());
    std::vector<std::byte> garbage(random() % 2000 + 32);
    for (std::byte& byte : garbage) byte = static_cast<std::byte>(random());
    client->send(garbage);
    EXPECT_FALSE(client->last_error().ok());
    EXPECT_TRUE(client->receive().closed);
  }
  expect_serves();
}

TEST_F(HostilePeers, OversizedFramesAreRefused) {
  options_.limits.body_bytes = 64 << 10;
  start_two();
  {  // before a hello, 1,024 bytes are the limit
    const auto client = raw();
    client->send(server::pull_frame(1, {{1, std::vector<uint64_t>(200)}}));
    expect_error(client->last_error(), Code::kResourceExhausted, {"begin with a hello"});
  }
  {
    const auto client = raw();
    ASSERT_TRUE(hello(*client).ok());
    client->send(server::pull_frame(1, {{1, std::vector<uint64_t>(10'000)}}));
    expect_error(client->last_error(), Code::kResourceExhausted, {"split the request"});
  }
  const auto client = raw();
  ASSERT_TRUE(hello(*client).ok());
  const uint32_t table = id_of(tables_of(*client), "f32");
  // The reply would be too long: the connection stays.
  const server::Reply reply =
      client->call(server::pull_frame(2, {{table, std::vector<uint64_t>(4'000)}}));
  expect_error(reply.error(), Code::kResourceExhausted, {"split the request by row bytes"});
  EXPECT_TRUE(client->call(server::pull_frame(3, {{table, {1}}})).error().ok());
  expect_serves();
}

// It has another id, as at a server, so that a peer that knew the table lists the tables.
TEST_F(HostilePeers, ATableThatWasCreatedAgainIsAnother) {
  std::atomic<bool> is_again{false};
  FakeServer server([&](wire::Opcode opcode, uint64_t, wire::Frame& reply) {
    if (opcode != wire::Opcode::kTables || !is_again) return Answer::kSend;
    wire::FrameHeader header;
    std::memcpy(&header, reply.data(), sizeof(header));
    wire::TablesReply tables;
    EXPECT_TRUE(
        wire::decode_tables_reply(header, std::span(reply).subspan(sizeof(header)), tables).ok());
    tables.tables[0].dim *= 2;
    tables.tables[0].row_bytes *= 2;
    reply.clear();
    EXPECT_TRUE(wire::encode_tables_reply(header.request_id, tables, reply).ok());
    return Answer::kSend;
  });
  start_for("petps://" + server.address());
  const auto client = raw();
  ASSERT_TRUE(hello(*client).ok());
  const wire::TablesReply before = tables_of(*client);
  const wire::TableInfo& table = before.tables.at(0);
  const auto push = [&](uint32_t id, uint32_t dim) {
    const std::vector<uint64_t> keys = {1};
    const std::vector<std::byte> rows(dim * sizeof(float));
    wire::PushRequest request;
    request.table = id;
    request.keys = keys;
    request.rows = rows;
    request.dim = dim;
    request.row_bytes = static_cast<uint32_t>(rows.size());
    wire::Frame frame;
    wire::encode_push(3, request, frame);
    return client->call(frame).error();
  };
  EXPECT_EQ(push(table.id, 2 * table.dim).code(), Code::kInvalidArgument);
  is_again = true;
  EXPECT_EQ(push(table.id, 2 * table.dim).code(), Code::kNotFound);
  const wire::TablesReply after = tables_of(*client);
  EXPECT_GT(after.tables.at(0).id, table.id);
  EXPECT_EQ(after.tables.at(0).dim, 2 * table.dim);
  EXPECT_EQ(push(after.tables.at(0).id, table.dim).code(), Code::kInvalidArgument);
  router_.reset();
}

TEST_F(HostilePeers, WhatARouterDoesNotDoIsRefusedByName) {
  start_two();
  const auto client = raw();
  ASSERT_TRUE(hello(*client).ok());
  for (const auto& [opcode, part] :
       {std::pair{uint16_t{8}, "takes no administration"}, std::pair{uint16_t{9}, "offers no RDMA"},
        std::pair{uint16_t{77}, "is unknown to this router"}}) {
    wire::Frame frame;
    wire::encode_status(4, frame);
    std::memcpy(frame.data() + 6, &opcode, sizeof(opcode));
    const server::Reply reply = client->call(frame);
    EXPECT_EQ(reply.header.request_id, 4u);
    expect_error(reply.error(), Code::kUnimplemented, {part});
  }
  // Sections of unknown tables do not harm the others.
  const uint32_t table = id_of(tables_of(*client), "f32");
  const server::Pulled pulled =
      server::decode_pulled(client->call(server::pull_frame(5, {{4711, {1, 2}}, {table, {1}}})));
  ASSERT_TRUE(pulled.status.ok()) << pulled.status.to_string();
  EXPECT_EQ(pulled.sections[0].code, static_cast<uint16_t>(Code::kNotFound));
  EXPECT_EQ(pulled.sections[1].rows_found, 1u);
  expect_error(client->call(server::pull_frame(6, {{4711, {1}}})).error(), Code::kNotFound,
               {"table 4711"});
  expect_error(client->call(server::pull_frame(7, {{table, {1}}}, 99)).error(),
               Code::kInvalidArgument, {"not of instance 99"});
}

TEST_F(HostilePeers, ASilentServerTakesABoundedNumberOfCalls) {
  std::atomic<bool> is_silent{false};
  FakeServer silent([&](wire::Opcode opcode, uint64_t, wire::Frame&) {
    return opcode == wire::Opcode::kPull && is_silent ? Answer::kSilent : Answer::kSend;
  });
  options_.calls = 8;
  options_.deadline_ms = 3'000;  // after which a call gives its place back
  start_for("petps://" + silent.address());
  const auto client = raw();
  uint32_t table = 0;
  ASSERT_TRUE(waits_until([&] {  // the deadline may pass before the server has answered
    wire::Frame names;
    wire::encode_tables(2, {.with_state = true}, names);
    if (!hello(*client).ok()) return false;
    const server::Reply reply = client->call(names);
    wire::TablesReply tables;
    if (!reply.error().ok() || !wire::decode_tables_reply(reply.header, reply.body, tables).ok())
      return false;
    table = id_of(tables, "users");
    return true;
  }));
  is_silent = true;
  constexpr uint64_t kRequests = 40;
  for (uint64_t id = 1; id <= kRequests; ++id)
    client->send(server::pull_frame(id, {{table, {2, 4}}}));
  // One host has half of the places. The other requests wait in the transport.
  EXPECT_TRUE(waits_until([&] { return router_->snapshot().calls_in_flight == 4; }));
  const auto other = raw("127.0.0.2");
  wire::Frame frame;
  wire::encode_shard_map(50, frame);
  EXPECT_TRUE(hello(*other).ok());
  EXPECT_TRUE(other->call(frame).error().ok());  // while the first host waits for the server
  EXPECT_TRUE(waits_until([&] { return router_->snapshot().calls_in_flight == 4; }));
  is_silent = false;
  uint64_t served = 0;
  for (uint64_t i = 0; i < kRequests; ++i) {
    const server::Reply reply = client->receive();
    ASSERT_FALSE(reply.closed);
    served += reply.error().ok() ? 1 : 0;
  }
  EXPECT_GE(served, kRequests / 2);
  EXPECT_TRUE(waits_until([&] { return router_->snapshot().calls_in_flight == 0; }));
  router_.reset();
}

TEST_F(HostilePeers, MemoryIsBounded) {
  options_.memory_bytes = 1 << 20;
  start_two();
  const auto client = raw();
  ASSERT_TRUE(hello(*client).ok());
  const uint32_t table = id_of(tables_of(*client), "f32");
  const std::vector<uint64_t> many(60'000, 1);
  expect_error(client->call(server::pull_frame(1, {{table, many}})).error(),
               Code::kResourceExhausted, {"memory"});
  EXPECT_GT(router_->snapshot().stats.refused_for_memory, 0u);
  EXPECT_TRUE(
      waits_until([&] { return router_->snapshot().stats.memory_used_bytes < (1u << 20); }));
}

// A push is in memory twice: as it arrived, and as the requests to the servers.
TEST_F(HostilePeers, APushThatFindsNoMemoryIsRefusedBeforeItIsCopied) {
  options_.memory_bytes = 1 << 20;
  start_two();
  const auto client = raw();
  ASSERT_TRUE(hello(*client).ok());
  const uint32_t table = id_of(tables_of(*client), "f32");
  const auto push = [&](size_t keys) {
    std::vector<uint64_t> pushed(keys, 1);
    const std::vector<float> rows(keys * kDim, 0.5f);
    wire::PushRequest request;
    request.table = table;
    request.dim = kDim;
    request.row_bytes = kDim * sizeof(float);
    request.keys = pushed;
    request.rows = std::as_bytes(std::span(rows));
    wire::Frame frame;
    wire::encode_push(3, request, frame);
    return client->call(frame).error();
  };
  expect_error(push(10'000), Code::kResourceExhausted, {"memory"});
  for (const auto& server : servers_) EXPECT_EQ(server->server().stats().pushes, 0u);
  const Status status = push(100);  // the connection stays
  EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST_F(HostilePeers, WithoutServersEveryCallerGetsTheReason) {
  const std::string nobody = "127.0.0.1:" + std::to_string(client::testing::stable_port());
  start_for("petps://" + nobody);
  expect_error(refusal_of(""), Code::kUnavailable, {nobody});
  EXPECT_EQ(router_->snapshot().callers, 0u);
}

}  // namespace
}  // namespace petps::router
