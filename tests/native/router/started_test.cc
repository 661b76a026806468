// Pulls that a worker sends and reads without a thread of a call: how many these are, and how they
// end when a server, a caller or the router is not as usual.
#include <atomic>
#include <random>

#include "router_fixture.h"
#include "tests/native/client/drip.h"
#include "tests/seed.h"

namespace petps::router {
namespace {

using client::testing::Drip;
using client::testing::first_keys;
using client::testing::kKeys;
using client::testing::kPartitions;
using client::testing::rows_of;

class StartedPullsTest : public RouterFixture {
 protected:
  // Start a router of one server that is behind a drip.
  void start_behind_drip() {
    drip_ = std::make_unique<Drip>();
    server::ServerOptions options;
    options.address = drip_->address();
    drip_->lead_to(add_server(kAllPartitions, 0, options).address());
    wire::ShardMap map{"ranking", 1, kPartitions, {}};
    map.servers.push_back({options.address, {kAllPartitions}});
    servers_[0]->set_shard_map(map);
    start_for("petps://" + options.address);
  }
  // Return a caller that has pulled once, and the id of its table.
  std::unique_ptr<RawClient> caller(uint32_t& table) const {
    auto client = raw();
    EXPECT_TRUE(hello(*client).ok());
    table = id_of(tables_of(*client), "f32");
    EXPECT_TRUE(client->call(server::pull_frame(4, {{table, {1, 2}}})).error().ok());
    return client;
  }
  std::unique_ptr<Drip> drip_;
};

// The first pull may have to open connections, and then it has a thread.
TEST_F(StartedPullsTest, AreAllPullsButTheFirst) {
  add_server(kFirstHalf);
  add_server(kSecondHalf);
  publish();
  start();
  const auto routed = connect_to_router();
  for (int round = 0; round < 100; ++round) ASSERT_TRUE(pull(*routed, first_keys(400)).ok());
  const RouterSnapshot snapshot = router_->snapshot();
  EXPECT_EQ(snapshot.stats.pulls, 100u);
  EXPECT_GE(snapshot.pulls_without_thread, 99u);
  EXPECT_EQ(snapshot.stats.rows_found, 40'000u);
  EXPECT_EQ(snapshot.calls_in_flight, 0u);
}

// Workers share the connections of a caller: each has all of them in its own epoll after a while.
TEST_F(StartedPullsTest, GetTheirOwnRowsWithSeveralWorkers) {
  add_server(kFirstHalf);
  add_server(kSecondHalf);
  publish();
  options_.workers = 3;
  start();
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 6; ++i) {
    threads.emplace_back([&, i] {
      const auto routed = connect_to_router();
      std::mt19937_64 random(tests::seed() + i);
      for (int round = 0; round < 200; ++round) {
        std::vector<uint64_t> keys(1 + random() % 400);
        for (uint64_t& key : keys) key = random() % kKeys;
        std::vector<float> rows(keys.size() * kDim);
        const auto report = routed->pull("f32", keys, rows);
        ASSERT_TRUE(report.ok()) << report.status().to_string();
        ASSERT_EQ(rows, rows_of(keys, kDim));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const RouterSnapshot snapshot = router_->snapshot();
  EXPECT_GT(snapshot.pulls_without_thread * 2, snapshot.stats.pulls);
  EXPECT_EQ(snapshot.stats.errors, 0u);
}

TEST_F(StartedPullsTest, EndWhenTheirCallerHasLeft) {
  start_behind_drip();
  uint32_t table = 0;
  auto client = caller(table);
  drip_->hold(true);
  client->send(server::pull_frame(5, {{table, first_keys(400)}}));
  ASSERT_TRUE(waits_until([&] { return router_->snapshot().calls_in_flight == 1; }));
  client.reset();
  drip_->hold(false);
  EXPECT_TRUE(waits_until([&] { return router_->snapshot().stats.memory_used_bytes == 0; }));
  EXPECT_EQ(router_->snapshot().calls_in_flight, 0u);
  client = caller(table);  // the next caller's replies are its own
}

// A pull whose server is silent gets a thread at its deadline, and then the error.
TEST_F(StartedPullsTest, EndAtTheirDeadline) {
  options_.deadline_ms = 500;
  start_behind_drip();
  uint32_t table = 0;
  const auto client = caller(table);
  drip_->hold(true);
  client->send(server::pull_frame(5, {{table, first_keys(400)}}));
  const Status status = client->receive().error();
  EXPECT_TRUE(status.code() == Code::kDeadlineExceeded || status.code() == Code::kUnavailable)
      << status.to_string();
  EXPECT_TRUE(waits_until([&] { return router_->snapshot().calls_in_flight == 0; }));
  drip_->hold(false);
  EXPECT_TRUE(waits_until([&] {
    return client->call(server::pull_frame(6, {{table, {1}}})).error().ok();
  }));
}

// The router stops while a server is silent.
TEST_F(StartedPullsTest, AreGivenUpWhenTheRouterHasToStop) {
  options_.drain_ms = 50;
  start_behind_drip();
  uint32_t table = 0;
  const auto client = caller(table);
  drip_->hold(true);
  client->send(server::pull_frame(5, {{table, first_keys(400)}}));
  ASSERT_TRUE(waits_until([&] { return router_->snapshot().calls_in_flight == 1; }));
  EXPECT_EQ(router_->stop().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(router_->snapshot().calls_in_flight, 0u);
  EXPECT_EQ(router_->snapshot().stats.memory_used_bytes, 0u);
}

// Keys of a table that nobody has, and none of one that exists: there are no rows to wait for.
TEST_F(StartedPullsTest, WithoutKeysOfAKnownTableAreAnsweredAtOnce) {
  options_.deadline_ms = 600'000;  // a wait for it would be seen as a hang
  start_behind_drip();
  uint32_t table = 0;
  const auto client = caller(table);
  EXPECT_TRUE(client->call(server::pull_frame(5, {{99'999, {1, 2}}, {table, {}}})).error().ok());
}

// More pulls than connections: those that wait for one are not passed by later ones for ever.
TEST_F(StartedPullsTest, LeaveConnectionsToThoseThatWait) {
  add_server(kAllPartitions);
  publish();
  options_.calls = 256;
  start();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const auto client = raw("127.0.0." + std::to_string(i + 1));
      ASSERT_TRUE(hello(*client).ok());
      const uint32_t table = id_of(tables_of(*client), "f32");
      const std::vector<uint64_t> keys = first_keys(200);
      constexpr uint64_t kPipeline = 60;
      constexpr uint64_t kPulls = 3'000;
      for (uint64_t pull = 0; pull < kPulls + kPipeline; ++pull) {
        if (pull < kPulls) client->send(server::pull_frame(100 + pull, {{table, keys}}));
        if (pull < kPipeline) continue;
        const Status status = client->receive().error();
        ASSERT_TRUE(status.ok()) << status.to_string();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(router_->snapshot().stats.errors, 0u);
}

}  // namespace
}  // namespace petps::router
