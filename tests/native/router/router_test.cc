// Pulls, pushes and names through a router, against a client that asks the servers itself.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>

#include "router_fixture.h"
#include "tests/seed.h"

namespace petps::router {
namespace {

using client::Form;
using client::TablePull;
using client::testing::first_keys;
using client::testing::has_row;
using client::testing::kDefaultRow;
using client::testing::kKeys;
using client::testing::row_of;
using client::testing::rows_of;

class RouterTest : public RouterFixture {
 protected:
  RouterTest() { options_.deadline_ms = 20'000; }
  // Connect to a router with a short deadline, however often it passes before a server answers.
  std::unique_ptr<Client> connect_patiently() const {
    std::unique_ptr<Client> client;
    EXPECT_TRUE(waits_until([&] {
      auto connected = Client::connect(url(), quiet());
      if (connected.ok()) client = std::move(connected).value();
      return client != nullptr;
    }));
    return client;
  }
  // Push keys to a table of kDim values in one frame. deletions: the bit of each key to delete.
  static wire::PushReply push_mixed(RawClient& client, const std::string& table,
                                    const std::vector<uint64_t>& keys, uint64_t deletions) {
    const std::vector<float> rows = rows_of(keys, kDim, 9);
    wire::PushRequest push;
    push.table = id_of(tables_of(client), table);
    push.dim = kDim;
    push.row_bytes = kDim * sizeof(float);
    push.keys = keys;
    push.deletions = {&deletions, 1};
    push.rows = std::as_bytes(std::span(rows));
    wire::Frame frame;
    wire::encode_push(3, push, frame);
    const server::Reply reply = client.call(frame);
    wire::PushReply counts;
    const Status status = reply.error().ok()
                              ? wire::decode_push_reply(reply.header, reply.body, counts)
                              : reply.error();
    EXPECT_TRUE(status.ok()) << status.to_string();
    return counts;
  }
};

// What one client received for several tables.
struct Received {
  std::vector<std::vector<std::byte>> rows;
  std::vector<std::vector<uint8_t>> masks;
  PullReport report;
};

Received pull_tables(Client& client, const std::vector<std::string>& tables,
                     const std::vector<std::vector<uint64_t>>& keys, Form form,
                     const std::vector<size_t>& row_bytes) {
  Received answer;
  std::vector<TablePull> pulls;
  for (size_t i = 0; i < tables.size(); ++i) {
    answer.rows.emplace_back(keys[i].size() * row_bytes[i]);
    answer.masks.emplace_back(keys[i].size());
  }
  for (size_t i = 0; i < tables.size(); ++i)
    pulls.push_back({tables[i], keys[i], answer.rows[i], answer.masks[i], form});
  const auto report = client.pull_many(pulls);
  EXPECT_TRUE(report.ok()) << report.status().to_string();
  if (report.ok()) answer.report = report.value();
  return answer;
}

TEST_F(RouterTest, AnswersAsTheServersDoBitByBit) {
  add_server(kFirstHalf);
  add_server(kSecondHalf);
  add_server(kAllPartitions, kAllPartitions);  // a replica of both
  publish();
  start();
  const auto direct = connect();
  const auto routed = connect_to_router();
  std::mt19937_64 random(tests::seed());
  const std::vector<std::string> tables = {"f32", "f16", "bf16", "int8"};
  for (int round = 0; round < 60; ++round) {
    const Form form = round % 2 == 0 ? Form::kStored : Form::kFloat32;
    std::vector<std::string> names;
    std::vector<std::vector<uint64_t>> keys;
    std::vector<size_t> row_bytes;
    for (const std::string& table : tables) {
      if (random() % 3 == 0 && !(names.empty() && table == "int8")) continue;
      names.push_back(table);
      keys.emplace_back(random() % (round % 10 == 0 ? 3000 : 200) + 1);
      // A fifth of the keys do not exist, and some are repeated.
      for (uint64_t& key : keys.back()) key = random() % (kKeys + kKeys / 4);
      const auto known = direct->describe(table);
      ASSERT_TRUE(known.ok()) << known.status().to_string();
      row_bytes.push_back(form == Form::kStored ? known.value().row_bytes : kDim * sizeof(float));
    }
    const Received expected = pull_tables(*direct, names, keys, form, row_bytes);
    const Received actual = pull_tables(*routed, names, keys, form, row_bytes);
    ASSERT_EQ(expected.rows, actual.rows) << "round " << round;
    ASSERT_EQ(expected.masks, actual.masks);
    ASSERT_EQ(expected.report.found, actual.report.found);
    ASSERT_EQ(expected.report.applied_version, actual.report.applied_version);
    ASSERT_EQ(expected.report.instance, actual.report.instance);
  }
  const RouterSnapshot snapshot = router_->snapshot();
  EXPECT_GE(snapshot.stats.pulls, 60u);
  EXPECT_EQ(snapshot.stats.errors, 0u);
  EXPECT_EQ(snapshot.servers.size(), 3u);
}

TEST_F(RouterTest, ServesSeveralPullsOfOneConnectionAtOnce) {
  add_server(kFirstHalf);
  add_server(kSecondHalf);
  publish();
  start();
  const auto routed = connect_to_router();
  const std::vector<uint64_t> keys = first_keys(kKeys);  // four requests in flight
  for (int round = 0; round < 50; ++round) {
    std::vector<float> rows(keys.size() * kDim);
    const auto report = routed->pull("f32", keys, rows);
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    ASSERT_EQ(rows, rows_of(keys, kDim));
  }
}

TEST_F(RouterTest, SendsPushesToTheServersOfTheirKeys) {
  add_server(kFirstHalf);
  add_server(kSecondHalf);
  publish();
  start();
  const auto routed = connect_to_router();
  const std::vector<uint64_t> keys = first_keys(500);
  const auto pushed = routed->push("f32", keys, rows_of(keys, kDim, 7), kDim);
  ASSERT_TRUE(pushed.ok()) << pushed.status().to_string();
  EXPECT_EQ(pushed.value().updated, 500u);
  const auto erased = routed->erase("f32", first_keys(10));
  ASSERT_TRUE(erased.ok()) << erased.status().to_string();
  EXPECT_EQ(erased.value().deleted, 10u);
  std::vector<float> rows(keys.size() * kDim);
  std::vector<uint8_t> mask(keys.size());
  ASSERT_TRUE(connect()->pull("f32", keys, rows, mask).ok());
  for (size_t i = 0; i < keys.size(); ++i) {
    ASSERT_EQ(mask[i], i < 10 ? 0 : 1);
    ASSERT_TRUE(has_row(rows, i, i < 10 ? kDefaultRow : row_of(i, kDim, 7))) << i;
  }
  // A NaN is refused by the client itself, and a wrong shape by the router.
  const std::vector<float> wrong(3, 0.0f);
  expect_error(routed->push("f32", first_keys(1), wrong, 3).status(), Code::kInvalidArgument,
               {"dim"});
}

TEST_F(RouterTest, TakesRowsAndDeletionsInOnePush) {
  add_server(kFirstHalf);
  add_server(kSecondHalf);
  publish();
  start();
  const auto client = raw();
  ASSERT_TRUE(hello(*client).ok());
  // Key 1 is written; key 2 is written, then deleted; key 3 is deleted, then written.
  const wire::PushReply counts = push_mixed(*client, "f32", {1, 2, 3, 2, 3}, 0b01100);
  EXPECT_EQ(counts.updated, 2u);
  EXPECT_EQ(counts.deleted, 1u);
  std::vector<float> stored(3 * kDim);
  std::vector<uint8_t> mask(3);
  ASSERT_TRUE(connect()->pull("f32", std::vector<uint64_t>{1, 2, 3}, stored, mask).ok());
  EXPECT_EQ(mask, (std::vector<uint8_t>{1, 0, 1}));
  EXPECT_TRUE(has_row(stored, 0, row_of(1, kDim, 9)));
  EXPECT_TRUE(has_row(stored, 2, row_of(3, kDim, 9)));
}

// A full table refuses a key. The other rows are applied, a repeated one too, and the deletions.
TEST_F(RouterTest, AFullTableLeavesNoDeletionOut) {
  RealServer& server = add_server(kAllPartitions);
  server.add_table("tight", codec::Dtype::kF32, kDim, 16, 0);
  publish();
  start();
  const auto direct = connect();
  const std::vector<uint64_t> some = first_keys(10);
  ASSERT_TRUE(direct->push("tight", some, rows_of(some, kDim), kDim).ok());
  const auto client = raw();
  ASSERT_TRUE(hello(*client).ok());
  std::vector<uint64_t> keys = {1, 1, 2};  // 2 is deleted
  for (uint64_t key = 100; key < 160; ++key) keys.push_back(key);
  const wire::PushReply counts = push_mixed(*client, "tight", keys, 0b100);
  EXPECT_GT(counts.refused, 0u);
  EXPECT_EQ(counts.deleted, 1u);
  std::vector<float> stored(2 * kDim);
  std::vector<uint8_t> mask(2);
  ASSERT_TRUE(direct->pull("tight", std::vector<uint64_t>{1, 2}, stored, mask).ok());
  EXPECT_EQ(mask, (std::vector<uint8_t>{1, 0}));
  EXPECT_TRUE(has_row(stored, 0, row_of(1, kDim, 9)));
}

TEST_F(RouterTest, RefusesPushesToReplicas) {
  add_server(kAllPartitions);
  add_server(kAllPartitions);
  publish();
  start();
  const auto routed = connect_to_router();
  const std::vector<uint64_t> keys = first_keys(1);
  expect_error(routed->push("f32", keys, rows_of(keys, kDim), kDim).status(),
               Code::kFailedPrecondition, {servers_[0]->address(), servers_[1]->address()});
}

TEST_F(RouterTest, PassesHotKeysOnToTheirServers) {
  add_server(kFirstHalf);
  add_server(kSecondHalf);
  publish();
  start();
  const auto client = raw();
  ASSERT_TRUE(hello(*client).ok());
  const std::vector<uint64_t> keys = first_keys(100);
  wire::Frame frame;
  wire::encode_hot_keys(3, {id_of(tables_of(*client), "f32"), keys}, frame);
  const Status status = client->call(frame).error();
  ASSERT_TRUE(status.ok()) << status.to_string();
  for (const auto& server : servers_) EXPECT_EQ(server->server().stats().hot_sets, 1u);
}

TEST_F(RouterTest, PassesVersionFloorsOn) {
  add_server(kFirstHalf);
  add_server(kSecondHalf);
  publish();
  for (const auto& server : servers_) record(*server, kAllPartitions, 3);
  start();
  const auto routed = connect_to_router();
  const std::vector<uint64_t> keys = first_keys(600);
  PullOptions options;
  options.min_version = 3;
  const auto report = pull(*routed, keys, options);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().applied_version, 3u);
  options.min_version = 4;
  expect_error(pull(*routed, keys, options).status(), Code::kStale, {"4"});
  // It waits until the last server has the version.
  options.wait_ms = 60'000;
  options.deadline_ms = 60'000;
  record(*servers_[0], kAllPartitions, 4);
  std::thread later([&] {
    EXPECT_TRUE(waits_until([&] { return router_->snapshot().stats.waits_for_version > 0; }));
    record(*servers_[1], kAllPartitions, 4);
  });
  const auto waited = pull(*routed, keys, options);
  later.join();
  ASSERT_TRUE(waited.ok()) << waited.status().to_string();
  EXPECT_EQ(waited.value().applied_version, 4u);
}

TEST_F(RouterTest, GivesTheWaitOfACallerThatLeavesBack) {
  add_server(kAllPartitions);
  publish();
  start();
  auto client = raw();
  ASSERT_TRUE(hello(*client).ok());
  const uint32_t table = id_of(tables_of(*client), "f32");
  client->send(server::pull_frame(5, {{table, {1, 2}}}, 0, 99, 60'000));
  EXPECT_TRUE(waits_until([&] { return router_->snapshot().stats.waits_for_version == 1; }));
  const auto left_at = std::chrono::steady_clock::now();
  client->end_sending();
  EXPECT_TRUE(waits_until([&] { return router_->snapshot().calls_in_flight == 0; }));
  // Long before its time is over.
  EXPECT_LT(std::chrono::steady_clock::now() - left_at, std::chrono::seconds(50));
  // Without keys, the version is that of the names.
  const auto other = raw();
  ASSERT_TRUE(hello(*other).ok());
  EXPECT_EQ(other->call(server::pull_frame(6, {{table, {}}}, 0, 99)).error().code(), Code::kStale);
  EXPECT_TRUE(other->call(server::pull_frame(7, {{table, {}}})).error().ok());
}

TEST_F(RouterTest, FollowsTheShardMapUnderLoad) {
  add_server(kFirstHalf, kAllPartitions);
  add_server(kSecondHalf, kAllPartitions);
  publish();
  start();
  std::atomic<bool> is_over{false};
  std::atomic<uint64_t> pulls{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const auto routed = connect_to_router();
      std::mt19937_64 random(tests::seed() + static_cast<uint64_t>(i));
      while (!is_over) {
        std::vector<uint64_t> keys(300);
        for (uint64_t& key : keys) key = random() % kKeys;
        std::vector<float> rows(keys.size() * kDim);
        const auto report = routed->pull("f32", keys, rows);
        ASSERT_TRUE(report.ok()) << report.status().to_string();
        ASSERT_EQ(rows, rows_of(keys, kDim));
        ++pulls;
      }
    });
  }
  for (const uint64_t owned : {0x3Cu, 0xFEu, 0x01u, 0x0Fu, 0xAAu, 0x55u}) {
    const uint64_t before = pulls;
    split_between_two(owned);
    for (const auto& server : servers_) server->set_shard_map(map());
    EXPECT_TRUE(waits_until([&] { return pulls >= before + 20; }));
  }
  is_over = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(wrong_shards(), 0u);  // the router has met old maps
}

// The servers have different maps for longer than the router asks them. A caller would take
// WRONG_SHARD for "nothing is applied", and send the whole push again.
TEST_F(RouterTest, CallersDoNotHearThatServersHaveDifferentMaps) {
  add_server(kFirstHalf, kAllPartitions);
  add_server(kSecondHalf, kAllPartitions);
  publish();
  options_.deadline_ms = 1'000;
  start();
  const auto routed = connect_patiently();
  const std::vector<uint64_t> keys = first_keys(500);
  ASSERT_TRUE(waits_until([&] { return pull(*routed, keys).ok(); }));
  split_between_two(0x3F);
  servers_[1]->set_shard_map(map());
  Status status;
  do {  // if the machine stalls, the deadline passes before the servers have answered
    status = routed->push("f32", keys, rows_of(keys, kDim), kDim).status();
    ASSERT_FALSE(status.ok());
    ASSERT_NE(status.code(), Code::kWrongShard) << status.to_string();
  } while (status.message().find("partitions move") == std::string_view::npos);
  expect_error(status, Code::kUnavailable, {"partitions move", "router.deadline_seconds"});
  servers_[0]->set_shard_map(map());
  EXPECT_TRUE(waits_until([&] { return pull(*routed, keys).ok(); }));
}

TEST_F(RouterTest, ServesAgainWhenAServerIsBack) {
  add_server(kFirstHalf);
  add_server(kSecondHalf);
  publish();
  options_.deadline_ms = 300;
  start();
  const auto routed = connect_patiently();
  const std::vector<uint64_t> keys = first_keys(500);
  ASSERT_TRUE(waits_until([&] { return pull(*routed, keys).ok(); }));
  servers_[1]->stop();
  PullOptions options;
  options.deadline_ms = 1'000;
  const Status gone = pull(*routed, keys, options).status();
  EXPECT_TRUE(gone.code() == Code::kUnavailable || gone.code() == Code::kDeadlineExceeded)
      << gone.to_string();
  // The keys of the other server are served during that time.
  const std::vector<uint64_t> served = client::testing::keys_of(kFirstHalf);
  ASSERT_TRUE(waits_until([&] { return pull(*routed, served).ok(); }));
  servers_[1]->start();
  EXPECT_TRUE(waits_until([&] { return pull(*routed, keys).ok(); }));
}

TEST_F(RouterTest, ClientsSurviveARestart) {
  add_server(kAllPartitions);
  publish();
  options_.port = client::testing::stable_port();
  start();
  const auto routed = connect_to_router();
  ASSERT_TRUE(pull(*routed, first_keys(10)).ok());
  router_.reset();
  start();
  // The restarted router gives the tables other ids, under another uuid.
  servers_[0]->add_table("another", codec::Dtype::kF32, 1, 10, 0);
  ASSERT_TRUE(pull(*routed, first_keys(10)).ok());
}

TEST_F(RouterTest, AnswersWhatHasArrivedBeforeItStops) {
  add_server(kAllPartitions);
  publish();
  options_.drain_ms = 60'000;
  start();
  auto client = raw();
  ASSERT_TRUE(hello(*client).ok());
  const uint32_t table = id_of(tables_of(*client), "f32");
  client->send(server::pull_frame(5, {{table, {1, 2}}}, 0, 99, 60'000));
  EXPECT_TRUE(waits_until([&] { return router_->snapshot().stats.waits_for_version == 1; }));
  EXPECT_TRUE(router_->stop().ok());  // the pull ends its wait
  EXPECT_EQ(client->receive().error().code(), Code::kStale);
  expect_error(client->last_error(), Code::kUnavailable, {"the router is stopping"});
}

TEST_F(RouterTest, FollowsASwitchOnceEveryPartitionHasIt) {
  add_server(kFirstHalf);
  add_server(kSecondHalf);
  publish();
  start();
  std::vector<uint32_t> next;
  for (const auto& server : servers_) {
    const auto record = server->tables().pool().create_instance("ranking", "ranking@2",
                                                                client::testing::kPartitions);
    ASSERT_TRUE(record.ok());
    next.push_back(record.value().id);
  }
  const auto client = raw();
  ASSERT_TRUE(hello(*client).ok());
  const auto instance_now = [&] {
    const wire::TablesReply tables = tables_of(*client);
    for (const wire::AliasInfo& alias : tables.aliases) {
      for (const wire::InstanceInfo& instance : tables.instances) {
        if (alias.name == "ranking" && instance.id == alias.instance) return instance.name;
      }
    }
    return std::string();
  };
  EXPECT_TRUE(waits_until([&] { return instance_now() == "ranking@1"; }));
  const uint64_t counter = tables_of(*client).state.counter;
  for (size_t i = 0; i < servers_.size(); ++i) {
    EXPECT_EQ(instance_now(), "ranking@1");  // until every partition has the next one
    ASSERT_TRUE(servers_[i]->tables().pool().set_alias("ranking", next[i]).ok());
  }
  EXPECT_TRUE(waits_until([&] { return instance_now() == "ranking@2"; }));
  EXPECT_GT(tables_of(*client).state.counter, counter);
}

}  // namespace
}  // namespace petps::router
