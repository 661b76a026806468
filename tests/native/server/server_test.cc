// Requests and their replies through a raw socket, with the message of every refusal.
// bad_frames_test.cc has the frames that no petps client sends.
#include "server/server.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <thread>

#include "base/clock.h"
#include "server/push_writer.h"
#include "server_fixture.h"
#include "tests/seed.h"

namespace petps::server {
namespace {

using base::Code;
using base::Status;

TEST_F(ServerTest, HelloReportsTheLimits) {
  options_.limits.keys_per_pull = 1234;
  options_.hot_set_seconds = 3;
  start();
  wire::Frame frame;
  wire::encode_hello(5, {1, 1, "tester"}, frame);
  const Reply reply = connect()->call(frame);
  EXPECT_EQ(reply.header.request_id, 5u);
  wire::HelloReply hello;
  ASSERT_TRUE(wire::decode_hello_reply(reply.header, reply.body, hello).ok());
  EXPECT_EQ(hello.limits, options_.limits);
  EXPECT_EQ(hello.pool_uuid, pool_.tables->pool().uuid());
  EXPECT_EQ(hello.hot_set_seconds, 3u);
  EXPECT_TRUE(hello.shard.owns_all());
}

TEST_F(ServerTest, AHelloOfANewerClientIsRefused) {
  start();
  wire::Frame frame;
  wire::encode_hello(5, {7, 9, "tester"}, frame);
  expect_error(connect()->call(frame).error(), Code::kUnimplemented, "protocol versions 7 to 9");
}

TEST_F(ServerTest, TheCatalogueStateIsReportedOnRequest) {
  start();
  const auto read_tables = [&] {
    wire::Frame frame;
    wire::encode_tables(6, {.with_state = true}, frame);
    const Reply reply = connect()->call(frame);
    wire::TablesReply list;
    EXPECT_TRUE(wire::decode_tables_reply(reply.header, reply.body, list).ok());
    return list;
  };
  pool::Pool& pool = pool_.tables->pool();
  uint64_t counter = read_tables().state.counter;
  EXPECT_EQ(read_tables().state.pool_uuid, pool.uuid());
  EXPECT_EQ(counter, pool.names().sequence);
  const auto grows = [&] {
    const uint64_t before = std::exchange(counter, read_tables().state.counter);
    return counter > before;
  };
  EXPECT_FALSE(grows()) << "nothing has changed";
  const auto second = pool.create_instance("ranking", "ranking@2", 2);
  ASSERT_TRUE(second.ok()) << second.status().to_string();
  EXPECT_TRUE(grows());
  ASSERT_TRUE(pool.set_alias("live", pool_.instance).ok());
  EXPECT_TRUE(grows());
  ASSERT_TRUE(pool.set_alias("live", second.value().id).ok());
  EXPECT_TRUE(grows());
  for (const wire::AliasInfo& alias : read_tables().aliases)
    EXPECT_EQ(alias.previous, alias.name == "live" ? pool_.instance : 0u) << alias.name;
  EXPECT_EQ(pool.drop_instance(second.value().id).code(), Code::kFailedPrecondition);
  EXPECT_FALSE(grows()) << "a refused change leaves the names as they are";
  ASSERT_TRUE(pool.set_alias("live", pool_.instance).ok());
  ASSERT_TRUE(pool.drop_instance(second.value().id).ok());
  EXPECT_TRUE(grows());
}

TEST_F(ServerTest, TablesAreListed) {
  start();
  ASSERT_TRUE(pool_.tables->pool().set_alias("live", pool_.instance).ok());
  wire::Frame frame;
  wire::encode_tables(6, {}, frame);
  const Reply reply = connect()->call(frame);
  wire::TablesReply list;
  ASSERT_TRUE(wire::decode_tables_reply(reply.header, reply.body, list).ok());
  EXPECT_EQ(list.state, wire::CatalogueState()) << "clients of the first release cannot decode it";
  ASSERT_EQ(list.tables.size(), 3u);
  EXPECT_EQ(list.tables[0].name, "users");
  EXPECT_EQ(list.tables[0].rows, 100u);
  EXPECT_EQ(list.tables[1].row_bytes, 6u);
  EXPECT_EQ(list.tables[2].feed, 1);
  ASSERT_EQ(list.instances.size(), 1u);
  EXPECT_EQ(list.instances[0].name, "ranking@1");
  ASSERT_EQ(list.aliases.size(), 1u);
  EXPECT_EQ(list.aliases[0].name, "live");
}

TEST_F(ServerTest, APullAnswersFoundMissingAndRepeatedKeys) {
  start();
  const std::vector<uint64_t> keys = {3, 1'000'000, 99, 3, ~uint64_t{0}, 0};
  const Pulled pulled = decode_pulled(connect()->call(pull_frame(1, {{users_.id(), keys}})));
  ASSERT_TRUE(pulled.status.ok()) << pulled.status.to_string();
  ASSERT_EQ(pulled.rows.size(), keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    EXPECT_EQ(pulled.rows[i], keys[i] < 100 ? row_of(keys[i], 1, 64) : std::vector<std::byte>())
        << keys[i];
  }
  EXPECT_EQ(pulled.sections[0].rows_found, 4u);
  const StatsSnapshot stats = server_->stats();
  EXPECT_EQ(stats.pulls, 1u);
  EXPECT_EQ(stats.keys, 6u);
  EXPECT_EQ(stats.misses, 2u);
}

TEST_F(ServerTest, APullWithoutKeysIsAnswered) {
  start();
  auto client = connect();
  const Pulled pulled = decode_pulled(client->call(pull_frame(7, {{users_.id(), {}}})));
  ASSERT_TRUE(pulled.status.ok()) << pulled.status.to_string();
  EXPECT_EQ(pulled.sections[0].rows_found, 0u);
  expect_serves(*client);
}

TEST_F(ServerTest, APullReadsSeveralTables) {
  start();
  const Pulled pulled = decode_pulled(connect()->call(pull_frame(
      1, {{items_.id(), {1, 70, 2}}, {users_.id(), {5}}, {items_.id(), {}}, {99, {1, 2}}})));
  ASSERT_TRUE(pulled.status.ok()) << pulled.status.to_string();
  ASSERT_EQ(pulled.rows.size(), 6u);
  EXPECT_EQ(pulled.rows[0], row_of(1, 1, 6));
  EXPECT_TRUE(pulled.rows[1].empty());
  EXPECT_EQ(pulled.rows[2], row_of(2, 1, 6));
  EXPECT_EQ(pulled.rows[3], row_of(5, 1, 64));
  EXPECT_EQ(pulled.sections[2].keys, 0u);
  EXPECT_EQ(pulled.sections[3].code, static_cast<uint16_t>(Code::kNotFound))
      << "an unknown table among known ones";
  EXPECT_EQ(pulled.sections[3].table, 99u);
}

TEST_F(ServerTest, EveryGatherModeGivesTheSameRows) {
  table::Table& wide = pool_.add_table("wide", 1024, 4096, 200);
  fill(wide, 100, 1);
  std::vector<uint64_t> keys;
  for (uint64_t key = 0; key < 150; ++key) keys.push_back(key * 7 % 150);  // a third is missing
  for (const transport::GatherMode mode :
       {transport::GatherMode::kAuto, transport::GatherMode::kCopy,
        transport::GatherMode::kSendmsg}) {
    options_.gather = mode;
    start();
    auto client = connect();
    for (const std::vector<Section>& sections :
         {std::vector<Section>{{users_.id(), keys}, {wide.id(), keys}, {items_.id(), keys}},
          std::vector<Section>{{users_.id(), keys}, {99, keys}, {items_.id(), keys}}}) {
      const Pulled pulled = decode_pulled(client->call(pull_frame(1, sections)));
      ASSERT_TRUE(pulled.status.ok()) << pulled.status.to_string();
      size_t at = 0;
      for (const wire::PullReplySection& section : pulled.sections) {
        const uint64_t rows = section.table == items_.id() ? 50 : section.table == 99 ? 0 : 100;
        for (const uint64_t key : keys) {
          ASSERT_EQ(pulled.rows[at++],
                    key < rows ? row_of(key, 1, section.row_bytes) : std::vector<std::byte>());
        }
      }
    }
    ASSERT_TRUE(server_->stop().ok());
  }
}

TEST_F(ServerTest, ARefusalOfAnUnknownTableListsTheKnownOnes) {
  start();
  auto client = connect();
  const Status status = client->call(pull_frame(1, {{99, {1}}})).error();
  expect_error(status, Code::kNotFound, "table 99 is unknown");
  expect_error(status, Code::kNotFound, std::to_string(users_.id()) + " (users)");
  expect_serves(*client);
}

TEST_F(ServerTest, ATableOfAnotherInstanceIsRefused) {
  start();
  auto client = connect();
  expect_error(client->call(pull_frame(1, {{users_.id(), {1}}}, 55)).error(),
               Code::kInvalidArgument,
               "(users) is of instance " + std::to_string(pool_.instance) + ", not of instance 55");
  EXPECT_TRUE(client->call(pull_frame(1, {{users_.id(), {1}}}, pool_.instance)).error().ok());
}

TEST_F(ServerTest, AMinVersionAboveTheAppliedVersionIsStale) {
  start();
  auto client = connect();
  pool_.record_version(7);
  expect_error(client->call(pull_frame(1, {{users_.id(), {1}}}, 0, 8)).error(), Code::kStale,
               "version 8 was requested, this server has applied 7");
  const Pulled pulled = decode_pulled(client->call(pull_frame(1, {{users_.id(), {1}}}, 0, 7)));
  ASSERT_TRUE(pulled.status.ok());
  EXPECT_EQ(pulled.applied_version, 7u);
  EXPECT_EQ(server_->stats().errors_of(Code::kStale), 1u);
}

TEST_F(ServerTest, APushInsertsUpdatesAndDeletes) {
  start();
  auto client = connect();
  Reply reply = client->call(push_frame(9, users_, {5, 500, 501}, 2));
  EXPECT_EQ(reply.header.request_id, 9u);
  wire::PushReply counts;
  ASSERT_TRUE(wire::decode_push_reply(reply.header, reply.body, counts).ok())
      << reply.error().to_string();
  EXPECT_EQ(counts, (wire::PushReply{2, 1, 0, 0, 0}));
  const std::vector<uint64_t> keys = {500, 777};
  const std::vector<uint64_t> deletions = {0b11};
  wire::PushRequest deletion;
  deletion.table = users_.id();
  deletion.keys = keys;
  deletion.deletions = deletions;
  wire::Frame frame;
  wire::encode_push(10, deletion, frame);
  reply = client->call(frame);
  ASSERT_TRUE(wire::decode_push_reply(reply.header, reply.body, counts).ok())
      << reply.error().to_string();
  EXPECT_EQ(counts, (wire::PushReply{0, 0, 1, 1, 0}));
  const Pulled pulled = decode_pulled(client->call(pull_frame(1, {{users_.id(), {5, 500, 501}}})));
  ASSERT_TRUE(pulled.status.ok());
  EXPECT_EQ(pulled.rows[0], row_of(5, 2, 64));
  EXPECT_TRUE(pulled.rows[1].empty());
  EXPECT_EQ(pulled.rows[2], row_of(501, 2, 64));
}

TEST_F(ServerTest, APushThatItsClientGaveUpIsRefusedAfterANewerOne) {
  start();
  auto client = connect();
  const auto push = [&](uint64_t version, const wire::PushOrder& order) {
    return client->call(push_frame(1, users_, {5}, version, order)).error();
  };
  const auto row = [&] {
    const Pulled pulled = decode_pulled(client->call(pull_frame(2, {{users_.id(), {5}}})));
    EXPECT_TRUE(pulled.status.ok()) << pulled.status.to_string();
    return pulled.rows.at(0);
  };
  constexpr uint64_t kClient = 1;
  constexpr uint64_t kOtherClient = 2;
  EXPECT_TRUE(push(2, {kClient, 12, 12, 0}).ok());
  EXPECT_TRUE(push(3, {kClient, 14, 13, 0}).ok()) << "call 13 has not finished";
  EXPECT_TRUE(push(4, {kClient, 13, 13, 0}).ok());
  expect_error(push(5, {kClient, 12, 12, 0}), Code::kDeadlineExceeded,
               "push of 1 rows was not applied: its client gave it up");
  EXPECT_EQ(row(), row_of(5, 4, 64));
  EXPECT_TRUE(push(6, {kOtherClient, 1, 1, 0}).ok()) << "another client's numbers are its own";
  EXPECT_TRUE(push(7, {}).ok()) << "a client of an earlier release";
  expect_error(push(8, {kClient, 12, 12, 0}), Code::kDeadlineExceeded, "not applied");
  EXPECT_EQ(row(), row_of(5, 7, 64));
}

TEST(GivenUpPushes, AreDetectedForTheMostRecentClients) {
  GivenUpPushes given_up;
  EXPECT_FALSE(given_up.has({1, 5, 5, 0}));
  for (uint64_t client = 2; client <= kPushClients; ++client)
    EXPECT_FALSE(given_up.has({client, 1, 1, 0}));
  for (uint64_t client = 0; client < kPushClients - 1; ++client)
    EXPECT_FALSE(given_up.has({kPushClients + 1 + client, 1, 1, 0}));
  EXPECT_TRUE(given_up.has({1, 4, 4, 0})) << "fewer than twice kPushClients clients came since";
  EXPECT_FALSE(given_up.has({1, 5, 5, 0}));
}

TEST(GivenUpPushes, AreDetectedWhileAnOlderCallIsInFlight) {
  GivenUpPushes given_up;
  EXPECT_FALSE(given_up.has({1, 4, 4, 0}));
  EXPECT_FALSE(given_up.has({1, 6, 4, 0b010})) << "5 has finished, 4 has not";
  EXPECT_TRUE(given_up.has({1, 5, 4, 0}));
  EXPECT_FALSE(given_up.has({1, 4, 4, 0b010})) << "4 is in flight";
  EXPECT_FALSE(given_up.has({1, 8, 6, 0b010})) << "6 and 8 are in flight";
  EXPECT_FALSE(given_up.has({1, 6, 6, 0}));
  EXPECT_TRUE(given_up.has({1, 7, 4, 0}));
  EXPECT_FALSE(given_up.has({1, 200, 200, 0}));
  EXPECT_TRUE(given_up.has({1, 8, 8, 0}));
  EXPECT_FALSE(given_up.has({1, 263, 200, 0}));
  EXPECT_FALSE(given_up.has({1, 264, 200, 0})) << "beyond the calls that the bits cover";
}

// A slow model keeps the finished calls in a set. The pushes arrive in any order, as over several
// connections.
TEST(GivenUpPushes, AgreeWithASlowModel) {
  std::mt19937_64 random(tests::seed());
  for (int round = 0; round < 200; ++round) {
    GivenUpPushes given_up;
    std::set<uint64_t> in_flight;
    std::set<uint64_t> reported;  // finished, according to the received pushes
    uint64_t next = 1;
    std::vector<std::pair<wire::PushOrder, std::set<uint64_t>>> sent;
    for (int step = 0; step < 300; ++step) {
      if (in_flight.empty() || (in_flight.size() < 8 && random() % 2 == 0))
        in_flight.insert(next++);
      const uint64_t number = *std::next(in_flight.begin(), random() % in_flight.size());
      wire::PushOrder order{9, number, *in_flight.begin(), 0};
      std::set<uint64_t> finished;
      for (uint64_t call = 1; call < next; ++call) {
        if (in_flight.contains(call) || call >= order.oldest + wire::kPushOrderCalls) continue;
        finished.insert(call);
        if (call > order.oldest) order.finished |= uint64_t{1} << (call - order.oldest);
      }
      sent.emplace_back(order, finished);
      if (random() % 2 == 0) in_flight.erase(number);
      const size_t arrived = random() % sent.size();
      reported.insert(sent[arrived].second.begin(), sent[arrived].second.end());
      ASSERT_EQ(given_up.has(sent[arrived].first), reported.contains(sent[arrived].first.number))
          << "PETPS_SEED=" << tests::seed() << ", step " << step;
      sent.erase(sent.begin() + static_cast<ptrdiff_t>(arrived));
    }
  }
}

TEST_F(ServerTest, APushOfTheWrongShapeIsRefused) {
  start();
  auto client = connect();
  const std::vector<uint64_t> keys = {1};
  const std::vector<std::byte> rows(64);
  const auto push = [&](uint32_t table, uint32_t dim, uint32_t dtype, uint32_t row_bytes) {
    wire::Frame frame;
    const auto row = std::span(rows).first(row_bytes);
    wire::encode_push(1, {table, 0, dim, dtype, row_bytes, 0, {}, keys, {}, row}, frame);
    return client->call(frame).error();
  };
  expect_error(push(users_.id(), 32, 0, 64), Code::kInvalidArgument,
               "(users) has rows of dim 16, the push has dim 32");
  expect_error(push(users_.id(), 16, 1, 64), Code::kInvalidArgument, "the push has dtype 1");
  expect_error(push(users_.id(), 16, 0, 32), Code::kInvalidArgument,
               "64 bytes a row, the push has dtype 0 in 32");
  expect_error(push(98, 16, 0, 32), Code::kNotFound, "table 98 is unknown");
  expect_serves(*client);
}

TEST_F(ServerTest, APushToADeltaFedTableIsRefused) {
  start();
  auto client = connect();
  expect_error(client->call(push_frame(1, deltas_, {1}, 2)).error(), Code::kFailedPrecondition,
               "(clicks) is fed by deltas: a push to it is refused");
  expect_serves(*client);
}

TEST_F(ServerTest, AFullTableRefusesNewKeysAndKeepsServing) {
  table::Table& small = pool_.add_table("small", 16, 64, 40);
  start();
  auto client = connect();
  std::vector<uint64_t> keys;
  for (uint64_t key = 0; key < 400; ++key) keys.push_back(key);
  wire::PushReply counts;
  Reply reply = client->call(push_frame(1, small, keys, 2));
  ASSERT_TRUE(wire::decode_push_reply(reply.header, reply.body, counts).ok())
      << reply.error().to_string();
  EXPECT_GE(counts.inserted, 40u);
  EXPECT_EQ(counts.inserted + counts.refused, 400u);
  EXPECT_GT(counts.refused, 0u);
  EXPECT_EQ(server_->stats().rows_refused, counts.refused);
  reply = client->call(push_frame(1, small, {0, 1}, 3));
  ASSERT_TRUE(wire::decode_push_reply(reply.header, reply.body, counts).ok());
  EXPECT_EQ(counts.updated, 2u);
  expect_serves(*client);
}

TEST_F(ServerTest, HotKeysAreAccepted) {
  start();
  auto client = connect();
  const std::vector<uint64_t> keys = {1, 2, 3};
  wire::Frame frame;
  wire::encode_hot_keys(3, {users_.id(), keys}, frame);
  const Reply reply = client->call(frame);
  EXPECT_TRUE(wire::decode_hot_keys_reply(reply.header, reply.body).ok())
      << reply.error().to_string();
  wire::encode_hot_keys(3, {77, keys}, frame);
  expect_error(client->call(frame).error(), Code::kNotFound, "table 77 is unknown");
  EXPECT_EQ(server_->stats().hot_sets, 1u);
}

TEST_F(ServerTest, TheStatusIsJson) {
  start();
  server_->set_status_member("ingest", "{\"lag\":3}");
  wire::Frame frame;
  wire::encode_status(3, frame);
  const Reply reply = connect()->call(frame);
  std::string_view json;
  ASSERT_TRUE(wire::decode_status_reply(reply.header, reply.body, json).ok());
  for (const char* part :
       {"\"software\":\"test \\\"quoted\\\"\"", "\"durability\":\"volatile\"", "\"name\":\"users\"",
        "\"ingest\":{\"lag\":3}", "\"transport\":\"tcp\"", "\"incidents\":[]"}) {
    EXPECT_NE(json.find(part), std::string_view::npos) << part << " in " << json;
  }
  EXPECT_EQ(std::count(json.begin(), json.end(), '{'), std::count(json.begin(), json.end(), '}'));
}

// The server has not counted all of a pipeline when it has answered the pull of another client.
TEST_F(ServerTest, APipelineOfCostlyRequestsDelaysOthersByOneTurn) {
  // So many that a pipeline takes longer than a turn, and so few that a status is made each time.
  for (int i = 0; i < 5; ++i) pool_.add_table("table" + std::to_string(i), 1, 4, 16);
  options_.workers = 1;
  start();
  wire::Frame frame;
  wire::encode_status(3, frame);
  wire::Frame pipeline;
  for (uint32_t i = 0; i < options_.limits.in_flight; ++i)
    pipeline.insert(pipeline.end(), frame.begin(), frame.end());
  const wire::Frame pull = pull_frame(1, {{users_.id(), {1}}});
  auto greedy = connect();
  auto other = connect();
  const auto statuses = [&] {
    return server_->stats().latency[static_cast<size_t>(wire::Opcode::kStatus)].count;
  };
  // The pull may also arrive after the pipeline.
  const uint64_t until_ns = base::monotonic_ns() + 40'000'000'000;
  bool was_between = false;
  while (!was_between && base::monotonic_ns() < until_ns) {
    const uint64_t before = statuses();
    ASSERT_TRUE(greedy->send(pipeline));
    while (statuses() == before) std::this_thread::yield();
    ASSERT_TRUE(other->send(pull));
    EXPECT_TRUE(decode_pulled(other->receive()).status.ok());
    was_between = statuses() < before + options_.limits.in_flight;
    for (uint32_t i = 0; i < options_.limits.in_flight; ++i) greedy->receive();
    while (statuses() < before + options_.limits.in_flight) std::this_thread::yield();
  }
  EXPECT_TRUE(was_between);
}

TEST_F(ServerTest, TooManyKeysAreRefused) {
  start();
  auto client = connect();
  const std::vector<uint64_t> keys(wire::kMaxKeysPerPull + 1, 1);
  expect_error(client->call(pull_frame(1, {{users_.id(), keys}})).error(), Code::kResourceExhausted,
               "pull of 65537 keys is above the limit of 65536: split the request");
  expect_serves(*client);
}

TEST_F(ServerTest, APullWhoseReplyCouldExceedTheFrameLimitIsRefused) {
  table::Table& wide = pool_.add_table("wide", 4096, 16384, 100);
  start();
  auto client = connect();
  const std::vector<uint64_t> keys(1100, 1);
  expect_error(client->call(pull_frame(1, {{wide.id(), keys}})).error(), Code::kResourceExhausted,
               "above the frame limit of 16777216: split the request by row bytes");
  expect_serves(*client);
}

TEST_F(ServerTest, TheStatusShowsTheGatherModeAndItsMeasurement) {
  options_.gather = transport::GatherMode::kSendmsg;
  start();
  expect_serves(*connect());
  EXPECT_TRUE(
      status_contains("\"gather\":{\"mode\":\"sendmsg\",\"lists_copied\":0,"
                      "\"lists_gathered\":1,"))
      << server_->status_json();
  EXPECT_TRUE(status_contains("\"measured\":false")) << "only kAuto measures";

  options_.gather = transport::GatherMode::kAuto;
  start();
  expect_serves(*connect());
  EXPECT_TRUE(waits_until([&] { return status_contains("\"measured\":true"); }));
  EXPECT_TRUE(status_contains("\"mode\":\"auto\"")) << server_->status_json();
  EXPECT_TRUE(status_contains("{\"row_bytes\":4096,\"rows\":2000,\"mode\":"))
      << server_->status_json();
  expect_serves(*connect());
}

TEST_F(ServerTest, AClientThatNeverReadsIsClosed) {
  options_.transport.output_stall_ms = 200;
  start();
  auto mute = connect();
  const std::vector<uint64_t> keys(20'000, 1);
  const wire::Frame frame = pull_frame(1, {{users_.id(), keys}});  // 1.3 MB per reply
  std::thread flood([&] {
    for (int i = 0; i < 200 && mute->send(frame); ++i) {
    }
  });
  // The worker reports the incident after it counts the connection.
  EXPECT_TRUE(waits_until([&] { return status_contains("has read nothing for 200 ms"); }))
      << server_->status_json();
  flood.join();
  EXPECT_EQ(server_->stats().connections_closed_for_cause, 1u);
  auto other = connect();
  expect_serves(*other);
}

TEST_F(ServerTest, AConnectionAboveTheLimitIsRefused) {
  options_.limits.connections = 2;
  start();
  auto first = connect();
  auto second = connect();
  expect_serves(*first);
  expect_serves(*second);
  // A connection that is idle for a second gives its place up. One that waits for a reply does not.
  for (const auto& client : {first.get(), second.get()})
    client->send(pull_frame(8, {{users_.id(), {1}}}, 0, 2, 60'000));
  ASSERT_TRUE(waits_until([&] { return server_->stats().waits_for_version == 2; }));
  expect_error(connect()->last_error(), Code::kResourceExhausted, "has its 2 connections already");
  EXPECT_EQ(server_->stats().connections_refused, 1u);
}

TEST_F(ServerTest, MoreRequestsThanMayBeInFlightAreAllAnswered) {
  options_.limits.in_flight = 4;  // far fewer than are sent: the others wait in the connection
  start();
  auto client = connect();
  constexpr uint64_t kRequests = 300;
  std::thread sender([&] {
    for (uint64_t id = 0; id < kRequests; ++id) {
      EXPECT_TRUE(client->send(id % 3 == 0 ? push_frame(id, users_, {id % 100, id % 100 + 1}, id)
                                           : pull_frame(id, {{users_.id(), {id % 100}}})));
    }
  });
  std::vector<int> answers(kRequests);
  for (uint64_t i = 0; i < kRequests; ++i) {
    const Reply reply = client->receive();
    ASSERT_TRUE(reply.error().ok()) << reply.error().to_string();
    ++answers[reply.header.request_id];
  }
  sender.join();
  for (uint64_t id = 0; id < kRequests; ++id) EXPECT_EQ(answers[id], 1) << id;
}

TEST_F(ServerTest, StopAnswersArrivedRequestsAndThenClosesConnections) {
  options_.drain_ms = 60'000;
  start();
  auto client = connect();
  expect_serves(*client);
  constexpr uint64_t kRequests = 50;
  wire::Frame all;
  for (uint64_t id = 0; id < kRequests; ++id) {
    const wire::Frame frame = push_frame(id, users_, {id}, 9);
    all.insert(all.end(), frame.begin(), frame.end());
  }
  const uint64_t received = server_->stats().bytes_received;
  client->send(all);
  EXPECT_TRUE(
      waits_until([&] { return server_->stats().bytes_received == received + all.size(); }));
  const Status stopped = server_->stop();
  EXPECT_TRUE(stopped.ok()) << stopped.to_string();
  for (uint64_t i = 0; i < kRequests; ++i) {
    const Reply reply = client->receive();
    ASSERT_TRUE(reply.error().ok()) << i << " " << reply.error().to_string();
  }
  expect_error(client->last_error(), Code::kUnavailable, "the server is stopping");
  EXPECT_TRUE(server_->stop().ok()) << "stopping twice does nothing";
}

TEST_F(ServerTest, InvalidOptionsAreRefused) {
  const auto expect_refused = [&](const std::string& part) {
    expect_error(Server::start(*pool_.tables, options_).status(), Code::kInvalidArgument, part);
    options_ = {};
    options_.port = 0;
  };
  options_.workers = 0;
  expect_refused("workers = 0");
  options_.limits.keys_per_pull = wire::kMaxKeysPerPull + 1;
  expect_refused("keys_per_pull = 65537 is outside 1..65536");
  options_.host = "example.org";
  expect_refused("'example.org' is not a numeric");
  options_.shard_map = {"ranking", 1, 2, {}};
  expect_refused("partition 0 is owned by no server");
}

}  // namespace
}  // namespace petps::server
