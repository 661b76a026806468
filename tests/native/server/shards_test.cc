// Ownership of keys, changes of the map, and pulls that wait for a version.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <random>
#include <thread>

#include "base/clock.h"
#include "server_fixture.h"

namespace petps::server {
namespace {

using base::Code;
using base::Status;

constexpr const char* kOwn = "here:1";
constexpr const char* kOther = "there:1";

// Return a map of the two partitions of the pool's instance.
wire::ShardMap map_of(uint64_t version, uint64_t own) {
  wire::ShardMap map{"ranking", version, 2, {}};
  const uint64_t other = own == 0b11 ? 0 : 0b11 & ~own;
  if (own != 0) map.servers.push_back({kOwn, {own}});
  if (other != 0) map.servers.push_back({kOther, {other}});
  return map;
}

class ShardsTest : public ServerTest {
 protected:
  ShardsTest() {
    options_.address = kOwn;
    for (uint64_t key = 0; key < 100; ++key) keys_[wire::partition_of(key, 2)].push_back(key);
  }
  // Start a server that owns the partitions whose bits are set.
  void start_with(uint64_t own) {
    options_.shard_map = map_of(1, own);
    start();
  }
  void change_map(uint64_t version, uint64_t own) {
    const Status status = server_->set_shard_map(map_of(version, own));
    ASSERT_TRUE(status.ok()) << status.to_string();
  }
  Reply pull(const std::vector<uint64_t>& keys, uint64_t min_version = 0, uint32_t wait_ms = 0) {
    return connect()->call(pull_frame(1, {{users_.id(), keys}}, 0, min_version, wait_ms));
  }
  // Return a client whose pull of version 2 waits in the server.
  std::unique_ptr<RawClient> wait_for_version_2() {
    auto client = connect();
    client->send(pull_frame(1, {{users_.id(), {1}}}, 0, 2, 60'000));
    EXPECT_TRUE(waits_until([&] { return server_->stats().waits_for_version > 0; }));
    return client;
  }

  // Return clients of a host whose pulls of version 2 wait in the server.
  std::vector<std::unique_ptr<RawClient>> wait_from(const std::string& host, size_t count) {
    const uint64_t expected = server_->stats().waits_for_version + count;
    std::vector<std::unique_ptr<RawClient>> clients;
    for (size_t i = 0; i < count; ++i) {
      clients.push_back(std::make_unique<RawClient>(server_->port(), "127.0.0.1", host));
      clients.back()->send(pull_frame(1, {{users_.id(), {1}}}, 0, 2, 60'000));
    }
    EXPECT_TRUE(waits_until([&] { return server_->stats().waits_for_version >= expected; }));
    return clients;
  }

  std::vector<uint64_t> keys_[2];  // by partition
};

TEST_F(ShardsTest, AForeignKeyRefusesTheWholeRequest) {
  start_with(0b01);
  auto client = connect();
  std::vector<uint64_t> keys = keys_[0];
  EXPECT_TRUE(decode_pulled(pull(keys)).status.ok());
  EXPECT_TRUE(client->call(push_frame(2, users_, keys, 2)).error().ok());
  keys.push_back(keys_[1][0]);
  const std::string named = "key " + std::to_string(keys_[1][0]) +
                            " is in partition 1, which here:1 does not own (map version 1)";
  expect_error(pull(keys).error(), Code::kWrongShard, named);
  expect_error(client->call(push_frame(2, users_, keys, 3)).error(), Code::kWrongShard, named);
  EXPECT_EQ(server_->stats().errors_of(Code::kWrongShard), 2u);
  // No row of the refused push was applied.
  EXPECT_EQ(decode_pulled(pull({keys_[0][0]})).rows[0], row_of(keys_[0][0], 2, 64));
}

TEST_F(ShardsTest, PausedPushesAreRefusedAndPullsAfterTheirTime) {
  options_.pauses = {{0b01}, {}};
  start_with(0b11);
  auto client = connect();
  const std::string named = "is in partition 0, which moves to or from here:1 now: try again";
  expect_error(client->call(push_frame(1, users_, keys_[0], 2)).error(), Code::kWrongShard, named);
  EXPECT_TRUE(client->call(push_frame(2, users_, keys_[1], 2)).error().ok());
  EXPECT_TRUE(decode_pulled(pull(keys_[0])).status.ok());
  server_->keep_pulls(UINT64_MAX);
  server_->set_pauses({{0b01}, {0b01}});
  EXPECT_TRUE(decode_pulled(pull(keys_[0])).status.ok());
  server_->keep_pulls(0);
  expect_error(pull(keys_[0]).error(), Code::kWrongShard, named);
  EXPECT_TRUE(decode_pulled(pull(keys_[1])).status.ok());
  change_map(2, 0b11);  // a map ends no pause
  expect_error(client->call(push_frame(3, users_, keys_[0], 3)).error(), Code::kWrongShard, named);
  server_->set_pauses({});
  EXPECT_TRUE(decode_pulled(pull(keys_[0])).status.ok());
  EXPECT_TRUE(client->call(push_frame(4, users_, keys_[0], 4)).error().ok());
}

// Pushes run on several connections. Once set_pauses() has returned, no row of the partition
// changes any more, and every key that changed was remembered.
TEST_F(ShardsTest, NoPushIsAppliedAfterAPauseAndEachIsTracked) {
  start_with(0b11);
  for (uint64_t round = 0; round < 20; ++round) {
    server_->set_pauses({});
    server_->track_pushes(0, true);
    std::atomic<bool> is_over = false;
    std::array<std::atomic<uint64_t>, 3> pushes{};
    const auto each_pushed = [&](uint64_t more) {
      std::array<uint64_t, 3> least{};
      for (size_t i = 0; i < 3; ++i) least[i] = pushes[i] + more;
      return waits_until(
          [&] { return pushes[0] > least[0] && pushes[1] > least[1] && pushes[2] > least[2]; });
    };
    std::vector<std::thread> threads;
    for (uint64_t thread = 0; thread < 3; ++thread) {
      threads.emplace_back([&, thread] {
        auto client = connect();
        for (uint64_t i = 0; !is_over; ++i) {
          const uint64_t version = 1'000'000 * (round + 1) + 3 * i + thread;
          (void)client->call(push_frame(i, users_, {keys_[0][thread], keys_[1][thread]}, version));
          ++pushes[thread];
        }
      });
    }
    EXPECT_TRUE(each_pushed(10));
    server_->set_pauses({{0b01}, {}});
    std::vector<PushedKey> pushed;
    EXPECT_TRUE(server_->take_pushed(0, pushed));
    const Pulled before = decode_pulled(pull({keys_[0][0], keys_[0][1], keys_[0][2]}));
    EXPECT_TRUE(each_pushed(10));
    EXPECT_EQ(decode_pulled(pull({keys_[0][0], keys_[0][1], keys_[0][2]})).rows, before.rows);
    is_over = true;
    for (std::thread& thread : threads) thread.join();
    std::vector<uint64_t> keys;
    for (const PushedKey& key : pushed) {
      EXPECT_EQ(key.table, users_.id());
      keys.push_back(key.key);
    }
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    std::vector<uint64_t> expected(keys_[0].begin(), keys_[0].begin() + 3);
    EXPECT_EQ(keys, expected);
    EXPECT_TRUE(server_->take_pushed(0, pushed));
    EXPECT_TRUE(pushed.empty());
    server_->track_pushes(0, false);
  }
}

// The server itself refuses the push, with the text of the client library. It accepts the push once
// the map assigns the keys to a single server.
TEST_F(ShardsTest, APushToAReplicaIsRefused) {
  start_with(0b11);
  auto client = connect();
  EXPECT_TRUE(client->call(push_frame(1, users_, keys_[0], 2)).error().ok());
  wire::ShardMap replicated = map_of(2, 0b11);
  replicated.servers.push_back({kOther, {0b11}});
  ASSERT_TRUE(server_->set_shard_map(replicated).ok());
  const std::vector<std::string> names = {kOwn, kOther};
  expect_error(client->call(push_frame(2, users_, keys_[0], 3)).error(), Code::kFailedPrecondition,
               std::string(wire::refuse_replicated_push("users", names).message()));
  EXPECT_EQ(decode_pulled(pull({keys_[0][0]})).rows[0], row_of(keys_[0][0], 2, 64));
  change_map(3, 0b01);
  EXPECT_TRUE(client->call(push_frame(3, users_, keys_[0], 3)).error().ok());
}

TEST_F(ShardsTest, OnlyAPushToAPartitionWithSeveralOwnersIsRefused) {
  start_with(0b11);
  wire::ShardMap map = map_of(2, 0b11);
  map.servers.push_back({kOther, {0b10}});
  ASSERT_TRUE(server_->set_shard_map(map).ok());
  auto client = connect();
  EXPECT_TRUE(client->call(push_frame(1, users_, keys_[0], 2)).error().ok());
  const std::vector<uint64_t> mixed = {keys_[0][0], keys_[1][0]};
  expect_error(client->call(push_frame(2, users_, mixed, 3)).error(), Code::kFailedPrecondition,
               "servers here:1, there:1 are replicas");
  EXPECT_EQ(decode_pulled(pull({keys_[0][0]})).rows[0], row_of(keys_[0][0], 2, 64));
}

TEST_F(ShardsTest, ClientsCanReadTheMap) {
  start_with(0b10);
  const auto read_map = [&] {
    wire::Frame frame;
    wire::encode_shard_map(7, frame);
    const Reply reply = connect()->call(frame);
    wire::ShardMap map;
    EXPECT_TRUE(wire::decode_shard_map_reply(reply.header, reply.body, map).ok());
    return map;
  };
  EXPECT_EQ(read_map(), map_of(1, 0b10));
  change_map(4, 0b11);
  EXPECT_EQ(read_map(), map_of(4, 0b11));
  wire::Frame frame;
  wire::encode_hello(5, {1, 1, "tester"}, frame);
  const Reply reply = connect()->call(frame);
  wire::HelloReply hello;
  ASSERT_TRUE(wire::decode_hello_reply(reply.header, reply.body, hello).ok());
  EXPECT_EQ(hello.shard, wire::shard_of(map_of(4, 0b11), kOwn));
  EXPECT_EQ(hello.features, wire::kFeatureShardMap | wire::kFeaturePullWait |
                                wire::kFeatureCatalogueState | wire::kFeaturePushOrder);
  EXPECT_TRUE(status_contains(
      R"("shard":{"address":"here:1","map_version":4,"partitions":2,"owned":"0-1"})"))
      << server_->status_json();
}

TEST_F(ShardsTest, AServerWithoutAMapOwnsEverything) {
  start();
  EXPECT_TRUE(server_->shard().owns_all());
  EXPECT_TRUE(decode_pulled(pull({1, 2, 3})).status.ok());
}

TEST_F(ShardsTest, AnInvalidMapIsRefusedAndTheOldOneStaysInUse) {
  start_with(0b01);
  wire::ShardMap map = map_of(1, 0b11);
  expect_error(server_->set_shard_map(map), Code::kFailedPrecondition,
               "version 1, but version 1 is in use: a changed map needs a higher version");
  map.version = 2;
  map.model = "other";
  expect_error(server_->set_shard_map(map), Code::kInvalidArgument, "of model 'other'");
  map = {"ranking", 2, 1, {{kOwn, {1}}}};
  expect_error(server_->set_shard_map(map), Code::kInvalidArgument,
               "1 partitions, but instance 'ranking@1' has 2");
  map = map_of(2, 0b01);
  map.servers.pop_back();
  expect_error(server_->set_shard_map(map), Code::kInvalidArgument, "partition 1 is owned by no");
  EXPECT_EQ(server_->shard(), wire::shard_of(map_of(1, 0b01), kOwn));
}

TEST_F(ShardsTest, TheAppliedVersionCountsOnlyOwnedPartitions) {
  start_with(0b01);
  pool_.record_version(0, 5);
  EXPECT_EQ(decode_pulled(pull(keys_[0])).applied_version, 5u);
  pool_.record_version(1, 3);
  EXPECT_EQ(decode_pulled(pull(keys_[0])).applied_version, 5u);
  change_map(2, 0b11);
  EXPECT_EQ(decode_pulled(pull(keys_[0])).applied_version, 3u);
  change_map(3, 0b10);
  EXPECT_EQ(decode_pulled(pull(keys_[1])).applied_version, 3u);
  change_map(4, 0);
  expect_error(pull({keys_[0][0]}).error(), Code::kWrongShard, "map version 4");
}

class CameLaterTest : public ShardsTest {
 protected:
  void start_named(uint64_t own) {
    start_with(own);
    ASSERT_TRUE(pool_.tables->switch_alias("ranking", pool_.instance).ok());
  }
  uint32_t create_next() {
    const auto next = pool_.tables->pool().create_instance("ranking", "ranking@2", 2);
    EXPECT_TRUE(next.ok());
    return next.value().id;
  }
  Status switch_to(uint32_t instance) { return pool_.tables->switch_alias("ranking", instance); }
  // Pull keys of the old instance.
  Status pull_old(const table::Table& table, uint32_t partition, uint64_t min_version = 0) {
    const wire::Frame frame =
        pull_frame(1, {{table.id(), keys_[partition]}}, pool_.instance, min_version, 60'000);
    return connect()->call(frame).error();
  }
  Status record(uint32_t instance, uint32_t partition, uint64_t run, uint64_t target = 0,
                pool::ProgressState state = pool::ProgressState::kFollowing) {
    pool::Progress progress;
    progress.instance = instance;
    progress.partition = partition;
    progress.run = run;
    progress.target = target;
    progress.state = state;
    return pool_.tables->record_progress(progress);
  }

  static constexpr const char* kText =
      "partition 1 of this instance is not at here:1: it came when the model's name referred to a "
      "newer instance";
  table::Table& fed_ = pool_.add_table("fed", 16, 64, 1000, pool::Feed::kDelta);
};

// A partition that comes to the server after a switch is loaded into the new instance only. Misses
// of the old one would look like an answer.
TEST_F(CameLaterTest, KeysOfThePartitionAreNotFoundInTheOldInstance) {
  start_named(0b01);
  pool_.record_version(0, 5);
  const uint32_t next = create_next();
  change_map(2, 0b11);
  EXPECT_TRUE(pull_old(fed_, 1).ok()) << "it is written still: its rows may be on their way";
  change_map(3, 0b01);
  ASSERT_TRUE(switch_to(next).ok());
  EXPECT_TRUE(pull_old(fed_, 0).ok());
  change_map(4, 0b11);
  EXPECT_TRUE(pull_old(fed_, 0).ok());
  expect_error(pull_old(fed_, 1), Code::kNotFound, kText);
  expect_error(pull_old(fed_, 1, 6), Code::kNotFound, kText);  // and does not wait for a version
  wire::Frame unnamed = pull_frame(1, {{fed_.id(), keys_[1]}});
  expect_error(connect()->call(unnamed).error(), Code::kNotFound, kText);
  unnamed = pull_frame(1, {{users_.id(), keys_[1]}, {fed_.id(), keys_[1]}});
  expect_error(connect()->call(unnamed).error(), Code::kNotFound, kText);
  EXPECT_TRUE(pull_old(users_, 1).ok()) << "pushes feed this table";
  pool_.record_version(1, 0);
  EXPECT_TRUE(pull_old(fed_, 1).ok()) << "loaded from a base of version 0";
}

// The record of a partition that was removed claims nothing, also where no other is left.
TEST_F(CameLaterTest, ARemovedPartitionThatComesBackIsNotLoaded) {
  start_named(0b10);
  ASSERT_TRUE(record(pool_.instance, 1, 0, 3).ok());
  const uint32_t next = create_next();
  for (const uint64_t target : {0, 3}) {
    ASSERT_TRUE(record(next, 1, 0, target).ok());
    expect_error(switch_to(next), Code::kFailedPrecondition, "is loaded in 0 of 1 partitions");
  }
  EXPECT_TRUE(pull_old(fed_, 1).ok());
  change_map(2, 0b01);
  ASSERT_TRUE(switch_to(next).ok());
  change_map(3, 0b10);
  expect_error(pull_old(fed_, 1), Code::kNotFound, kText);
}

// The name may switch past an instance that is being loaded, and clients may know it from servers
// that have switched to it.
TEST_F(CameLaterTest, AnInstanceThatTheNamePassedOverAnswersForWhatIsLoaded) {
  start_named(0b11);
  ASSERT_TRUE(record(pool_.instance, 0, 2).ok());
  EXPECT_TRUE(pull_old(fed_, 1).ok());
  const uint32_t next = create_next();
  ASSERT_TRUE(pool_.tables->pool().set_alias("ranking", next).ok());
  ASSERT_TRUE(record(pool_.instance, 0, 3).ok());
  EXPECT_TRUE(pull_old(fed_, 0).ok());
  expect_error(pull_old(fed_, 1), Code::kNotFound, kText);
  ASSERT_TRUE(record(pool_.instance, 1, 0, 3, pool::ProgressState::kCatchingUp).ok());
  expect_error(pull_old(fed_, 1), Code::kNotFound, kText);
  ASSERT_TRUE(record(pool_.instance, 1, 3).ok());
  EXPECT_TRUE(pull_old(fed_, 1).ok());
}

// An instance that `petps load` filled has no progress, or only passes over the log.
TEST_F(CameLaterTest, AnInstanceThatNoLogFedIsAnswered) {
  start_named(0b11);
  ASSERT_TRUE(switch_to(create_next()).ok());
  EXPECT_TRUE(pull_old(fed_, 1).ok());
  for (const uint32_t partition : {0, 1})
    ASSERT_TRUE(record(pool_.instance, partition, 0, 3, pool::ProgressState::kPassing).ok());
  EXPECT_TRUE(pull_old(fed_, 1).ok());
  EXPECT_TRUE(switch_to(pool_.instance).ok());
}

// Nothing of the instance is in partition 1 yet: ingest reads older runs there.
TEST_F(CameLaterTest, APartitionThatPassesOverTheLogIsNotLoadedWhereOthersAre) {
  start_named(0b11);
  const uint32_t next = create_next();
  ASSERT_TRUE(record(next, 0, 4).ok());
  ASSERT_TRUE(record(next, 1, 0, 3, pool::ProgressState::kPassing).ok());
  expect_error(switch_to(next), Code::kFailedPrecondition, "is loaded in 1 of 2 partitions");
  ASSERT_TRUE(record(next, 1, 4, 3, pool::ProgressState::kPassing).ok());
  EXPECT_TRUE(switch_to(next).ok());
}

// Tables of several instances in one request: each one is checked.
TEST_F(CameLaterTest, ARequestWithoutAnInstanceIsCheckedByTable) {
  start_named(0b11);
  pool_.record_version(0, 5);
  const uint32_t next = create_next();
  pool::TableSpec spec = fed_.record().spec;
  spec.instance = next;
  const auto newer = pool_.tables->create_table(spec);
  ASSERT_TRUE(newer.ok());
  for (const uint32_t partition : {0, 1}) ASSERT_TRUE(record(next, partition, 4).ok());
  ASSERT_TRUE(switch_to(next).ok());
  const auto pull_both = [&](uint32_t of_old, uint32_t of_new) {
    const wire::Frame frame =
        pull_frame(1, {{newer.value()->id(), keys_[of_new]}, {fed_.id(), keys_[of_old]}});
    return connect()->call(frame).error();
  };
  EXPECT_TRUE(pull_both(0, 1).ok());
  expect_error(pull_both(1, 0), Code::kNotFound, kText);
}

// A pool that was lost comes back empty, and the map names its server still (decision 123).
TEST_F(CameLaterTest, KeysOfAPartitionWhoseLogIsUnreadAreNotFound) {
  constexpr const char* kUnread = "partition 1 of this instance is not yet at here:1: the log has";
  const auto set_unread = [&](uint64_t partitions) {
    pool_.tables->set_unread(pool_.instance, {&partitions, 1});
  };
  set_unread(0b11);
  start_named(0b11);
  expect_error(pull_old(fed_, 1), Code::kNotFound, kUnread);
  EXPECT_TRUE(pull_old(users_, 1).ok()) << "pushes feed this table";
  const wire::Frame named = pull_frame(1, {{fed_.id(), keys_[1]}}, pool_.instance, 3, 0);
  expect_error(connect()->call(named).error(), Code::kStale, "version 3 was requested");
  pool_.record_version(0, 5);
  pool_.record_version(1, 3);
  expect_error(pull_old(fed_, 1), Code::kNotFound, kUnread);  // only a part of the log is read
  expect_error(connect()->call(named).error(), Code::kStale, "version 3 was requested");
  EXPECT_EQ(pool_.tables->applied_version(pool_.instance), 0u);
  set_unread(0b10);
  EXPECT_TRUE(pull_old(fed_, 0).ok());
  expect_error(pull_old(fed_, 1), Code::kNotFound, kUnread);
  change_map(2, 0b01);
  EXPECT_EQ(decode_pulled(pull(keys_[0])).applied_version, 5u) << "partition 1 is another's";
  change_map(3, 0b11);
  expect_error(pull_old(fed_, 1), Code::kNotFound, kUnread);
  set_unread(0);
  EXPECT_TRUE(pull_old(fed_, 1).ok());
  EXPECT_EQ(pool_.tables->applied_version(pool_.instance), 3u);
}

// Clients ask for it while other servers have not switched.
TEST_F(CameLaterTest, AnUnreadInstanceThatTheNameHasLeftIsNotAnswered) {
  const uint64_t both = 0b11;
  pool_.tables->set_unread(pool_.instance, {&both, 1});
  start_named(0b11);
  const uint32_t next = create_next();
  for (const uint32_t partition : {0, 1}) ASSERT_TRUE(record(next, partition, 4).ok());
  ASSERT_TRUE(switch_to(next).ok());
  expect_error(pull_old(fed_, 1), Code::kNotFound, kText);
}

// Partition 0 is at version 9, partition 1 at version 2, and the map changes back and forth. A
// pull of partition 1 never claims more than version 2. A pull of both is answered as a whole or
// refused, and never misses a row.
TEST_F(ShardsTest, EachRequestUsesOneMap) {
  start_with(0b01);
  pool_.record_version(0, 9);
  pool_.record_version(1, 2);
  std::vector<uint64_t> both = keys_[0];
  both.insert(both.end(), keys_[1].begin(), keys_[1].end());
  std::atomic<bool> is_done{false};
  std::atomic<uint64_t> answered[2] = {0, 0};
  std::atomic<uint64_t> refused{0};
  const auto pull_until_done = [&](const std::vector<uint64_t>& keys, size_t puller) {
    auto client = connect();
    while (!is_done.load()) {
      const Reply reply = client->call(pull_frame(1, {{users_.id(), keys}}));
      if (reply.header.code == static_cast<uint16_t>(Code::kWrongShard)) {
        refused.fetch_add(1);
        continue;
      }
      const Pulled pulled = decode_pulled(reply);
      ASSERT_TRUE(pulled.status.ok()) << pulled.status.to_string();
      ASSERT_EQ(pulled.sections[0].rows_found, keys.size());
      ASSERT_EQ(pulled.applied_version, 2u);
      answered[puller].fetch_add(1);
    }
  };
  std::thread first([&] { pull_until_done(keys_[1], 0); });
  std::thread second([&] { pull_until_done(both, 1); });
  uint64_t version = 1;
  const uint64_t until = base::monotonic_ns() + 50'000'000'000;
  while ((answered[0] < 200 || answered[1] < 200 || refused < 200 || version < 3000) &&
         base::monotonic_ns() < until) {
    constexpr uint64_t kOwned[] = {0b11, 0b10, 0b01};
    ++version;
    change_map(version, kOwned[version % 3]);
    std::this_thread::sleep_for(std::chrono::microseconds(version % 7 * 20));
  }
  is_done = true;
  first.join();
  second.join();
  EXPECT_GE(answered[0].load(), 200u);
  EXPECT_GE(answered[1].load(), 200u);
  EXPECT_GE(refused.load(), 200u);
}

// ---- Pulls that wait for min_version

TEST_F(ShardsTest, APullThatWaitsForItsVersionDoesNotDelayOthers) {
  start_with(0b11);
  pool_.record_version(1);
  auto waiting = wait_for_version_2();
  EXPECT_EQ(decode_pulled(pull({1})).applied_version, 1u);  // by the same worker, the only one
  pool_.record_version(0, 2);
  EXPECT_EQ(decode_pulled(pull({1})).applied_version, 1u);
  pool_.record_version(1, 3);
  const Pulled pulled = decode_pulled(waiting->receive(20'000));
  ASSERT_TRUE(pulled.status.ok()) << pulled.status.to_string();
  EXPECT_EQ(pulled.applied_version, 2u);
  EXPECT_EQ(pulled.rows[0], row_of(1, 1, 64));
  EXPECT_EQ(server_->stats().errors_of(Code::kStale), 0u);
  // The connection stays open, and its next pull has its own time limit.
  expect_error(waiting->call(pull_frame(2, {{users_.id(), {1}}}, 0, 9, 1)).error(), Code::kStale,
               "version 9 was requested, this server has applied 2");
}

TEST_F(ShardsTest, APullIsStaleIfItsVersionDoesNotArriveInTime) {
  start_with(0b11);
  const uint64_t begin = base::monotonic_ns();
  expect_error(pull({1}, 7, 50).error(), Code::kStale, "version 7 was requested");
  EXPECT_GE(base::monotonic_ns() - begin, 50'000'000u);
  EXPECT_EQ(server_->stats().waits_for_version, 1u);
  expect_error(pull({1}, 7, 0).error(), Code::kStale, "version 7 was requested");
  EXPECT_EQ(server_->stats().waits_for_version, 1u);
}

TEST_F(ShardsTest, AStopAnswersPullsThatWait) {
  options_.drain_ms = 60'000;
  start_with(0b11);
  auto waiting = wait_for_version_2();
  std::thread stopping([&] { EXPECT_TRUE(server_->stop().ok()); });
  expect_error(waiting->receive(20'000).error(), Code::kStale, "version 2 was requested");
  stopping.join();
}

TEST_F(ShardsTest, ThePullsThatMayWaitAreLimited) {
  options_.transport.connections_per_peer = 0;
  start_with(0b11);
  auto waiting = wait_from("127.0.0.1", kMaxParkedPulls / 2);
  expect_error(pull({1}, 2, 60'000).error(), Code::kStale, "version 2 was requested");
  // One host has half of the places, and another one the rest.
  for (auto& client : wait_from("127.0.0.2", kMaxParkedPulls / 2))
    waiting.push_back(std::move(client));
  RawClient third(server_->port(), "127.0.0.1", "127.0.0.3");
  expect_error(third.call(pull_frame(1, {{users_.id(), {1}}}, 0, 2, 60'000)).error(), Code::kStale,
               "version 2 was requested");
  pool_.record_version(2);
  for (const auto& client : waiting) EXPECT_TRUE(client->receive(20'000).error().ok());
}

TEST_F(ShardsTest, ClientsThatLeaveInOrderMakeRoomForOthers) {
  options_.transport.connections_per_peer = 0;
  start_with(0b11);
  auto waiting = wait_from("127.0.0.1", kMaxParkedPulls / 2);
  auto stays = wait_from("127.0.0.2", 1);
  waiting.clear();
  ASSERT_TRUE(waits_until([&] { return server_->stats().connections == 1; }));
  waiting = wait_from("127.0.0.1", kMaxParkedPulls / 2);
  pool_.record_version(2);
  EXPECT_TRUE(stays[0]->receive(20'000).error().ok());
  for (const auto& client : waiting) EXPECT_TRUE(client->receive(20'000).error().ok());
}

TEST_F(ShardsTest, PullsOfClosedConnectionsLeaveRoomForOthers) {
  options_.transport.connections_per_peer = 0;
  start_with(0b11);
  const auto waiting = wait_from("127.0.0.1", kMaxParkedPulls / 2);
  for (const auto& client : waiting) client->reset();
  ASSERT_TRUE(waits_until([&] { return server_->stats().connections == 0; }));
  auto other = connect();
  other->send(pull_frame(1, {{users_.id(), {1}}}, 0, 2, 60'000));
  ASSERT_TRUE(waits_until([&] {
    const auto stats = server_->stats();
    return stats.waits_for_version > kMaxParkedPulls / 2 || stats.errors_of(Code::kStale) > 0;
  }));
  pool_.record_version(2);
  EXPECT_TRUE(other->receive(20'000).error().ok());
}

TEST_F(ShardsTest, AConnectionThatEndsWhileItsPullWaitsIsRemoved) {
  start_with(0b11);
  auto waiting = wait_for_version_2();
  waiting.reset();
  pool_.record_version(2);
  EXPECT_TRUE(decode_pulled(pull({1}, 2)).status.ok());
  EXPECT_TRUE(waits_until([&] { return server_->stats().connections == 0; }));
}

}  // namespace
}  // namespace petps::server
