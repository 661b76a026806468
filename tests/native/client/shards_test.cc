// One client and several servers with a shard map: which servers receive requests, how the client
// merges their replies, and what happens when the map changes or a server fails.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <thread>

#include "base/clock.h"
#include "fleet.h"

namespace petps::client {
namespace {

using base::Code;
using base::Status;
using codec::Dtype;
using testing::connect_to;
using testing::expect_error;
using testing::has_row;
using testing::kDefaultRow;
using testing::kDim;
using testing::keys_of;
using testing::kKeys;
using testing::kPartitions;
using testing::pulled_row;
using testing::quiet;
using testing::RealServer;
using testing::row_of;
using testing::rows_of;

class ShardsTest : public testing::Fleet {};

// Compare random pulls with the expected rows: all dtypes, both forms, repeated and missing keys.
TEST_F(ShardsTest, APullMergesTheRowsOfAllShards) {
  add_server(0b00010111);
  add_server(0b11000000);
  add_server(0b00101000);
  publish();
  std::mt19937_64 random(testing::seed());
  const auto client = connect();
  for (int round = 0; round < 120; ++round) {
    const auto dtype = static_cast<Dtype>(random() % 4);
    const std::string table(codec::dtype_name(dtype));
    // Many repeated keys, or some missing ones.
    const uint64_t range = round % 3 == 0 ? 40 : kKeys + kKeys / 4;
    std::vector<uint64_t> keys(random() % 3000);
    for (uint64_t& key : keys) key = random() % range;
    const bool stored = random() % 2 == 0;
    const size_t row_bytes = stored ? codec::row_bytes(dtype, kDim) : kDim * sizeof(float);
    std::vector<std::byte> out(keys.size() * row_bytes, std::byte{0xEE});
    std::vector<uint8_t> mask(random() % 2 == 0 ? keys.size() : 0, 7);
    TablePull pull{table, keys, out, mask, stored ? Form::kStored : Form::kFloat32};
    PullOptions options;
    options.dedup = static_cast<Dedup>(random() % 3);
    const auto report = client->pull_many({&pull, 1}, options);
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    uint64_t found_count = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      const bool is_present = keys[i] < kKeys;
      found_count += is_present ? 1 : 0;
      std::vector<float> row = is_present ? row_of(keys[i], kDim) : kDefaultRow;
      std::vector<std::byte> expected(codec::row_bytes(dtype, kDim));
      codec::encode(dtype, row.data(), 1, kDim, expected.data());
      if (!stored) {
        codec::decode(dtype, expected.data(), 1, kDim, row.data());
        const auto bytes = std::as_bytes(std::span(row));
        expected.assign(bytes.begin(), bytes.end());
      }
      ASSERT_EQ(0, std::memcmp(expected.data(), out.data() + i * row_bytes, row_bytes))
          << table << " key " << keys[i] << " at " << i << " of " << keys.size();
      if (!mask.empty()) {
        ASSERT_EQ(mask[i], is_present ? 1 : 0) << keys[i];
      }
    }
    EXPECT_EQ(report.value().found, found_count);
  }
  for (const auto& server : servers_) EXPECT_GT(server->server().stats().pulls, 0u);
  EXPECT_EQ(wrong_shards(), 0u);
}

TEST_F(ShardsTest, ACallPullsFromSeveralTables) {
  add_server(0b00001111);
  add_server(0b11110000);
  publish();
  const auto client = connect();
  const std::vector<uint64_t> one_shard = keys_of(0b00000001);
  const std::vector<uint64_t> all = keys_of(0xFF);
  std::vector<float> first(one_shard.size() * kDim);
  std::vector<float> second(all.size() * kDim);
  const std::vector<TablePull> pulls = {
      {"f32", one_shard, std::as_writable_bytes(std::span(first)), {}, Form::kFloat32},
      {"int8", all, std::as_writable_bytes(std::span(second)), {}, Form::kFloat32},
      {"f16", {}, {}, {}, Form::kFloat32}};
  const auto report = client->pull_many(pulls);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().found, one_shard.size() + all.size());
  for (size_t i = 0; i < all.size(); ++i)
    ASSERT_TRUE(has_row(second, i, pulled_row(Dtype::kInt8, all[i], kDim)));
  const auto none = client->pull_many({});
  ASSERT_TRUE(none.ok()) << none.status().to_string();
  EXPECT_EQ(none.value().applied_version, 0u);
}

TEST_F(ShardsTest, TheAppliedVersionIsTheLowestOfTheShards) {
  RealServer& first = add_server(0b00001111);
  RealServer& second = add_server(0b11110000);
  publish();
  record(first, 0b00001111, 9);
  record(second, 0b11110000, 4);
  const auto client = connect();
  EXPECT_EQ(pull(*client, keys_of(0xFF)).value().applied_version, 4u);
  EXPECT_EQ(pull(*client, keys_of(0b00001111)).value().applied_version, 9u);
  PullOptions options;
  options.min_version = 9;
  EXPECT_TRUE(pull(*client, keys_of(0b00001111), options).ok());
  expect_error(pull(*client, keys_of(0xFF), options).status(), Code::kStale,
               {"version 9 was requested, this server has applied 4"});
}

TEST_F(ShardsTest, APullWaitsUntilEveryShardHasItsMinimumVersion) {
  RealServer& first = add_server(0b00001111);
  RealServer& second = add_server(0b11110000);
  publish();
  record(first, 0b00001111, 3);
  record(second, 0b11110000, 2);
  const auto client = connect();
  PullOptions options;
  options.min_version = 3;
  options.wait_ms = 20'000;
  std::thread later([&] {
    while (second.server().stats().waits_for_version == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    record(second, 0b11110000, 3);
  });
  const auto report = pull(*client, keys_of(0xFF), options);
  later.join();
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().applied_version, 3u);
  options.min_version = 4;
  options.wait_ms = 30;
  expect_error(pull(*client, keys_of(0xFF), options).status(), Code::kStale, {"version 4"});
  // The servers' wait ends before the deadline: the result is STALE, not a timeout.
  options.wait_ms = 60'000;
  options.deadline_ms = 2'400;
  Status status = pull(*client, keys_of(0xFF), options).status();
  // The wait ends 500 ms before the deadline. A busy machine may stall for longer.
  for (int i = 0; i < 10 && status.code() == Code::kDeadlineExceeded; ++i)
    status = pull(*client, keys_of(0xFF), options).status();
  expect_error(status, Code::kStale, {"version 4"});
  EXPECT_TRUE(pull(*client, keys_of(0xFF)).ok());
}

// No pull waits for the lagging replica while the other one has the version.
TEST_F(ShardsTest, APullUsesTheReplicaThatHasTheVersionAlready) {
  RealServer& lagging = add_server(0xFF);
  RealServer& current = add_server(0xFF);
  publish();
  record(lagging, 0xFF, 1);
  record(current, 0xFF, 2);
  Options without_hedges = quiet();
  without_hedges.hedge = false;
  const auto client = connect(without_hedges);
  // A pull waits 550 ms for a new connection if there is another replica, but until its deadline
  // for a reply. So connect to both first, because a busy machine may stall for longer.
  const auto are_connected = [&] {
    return lagging.server().stats().pulls >= 5 && current.server().stats().pulls >= 5;
  };
  while (!are_connected()) ASSERT_TRUE(pull(*client, keys_of(0xFF)).ok());
  PullOptions options;
  options.min_version = 2;
  options.wait_ms = 10'000;
  options.deadline_ms = 40'000;
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(pull(*client, keys_of(0xFF), options).ok());
  EXPECT_EQ(lagging.server().stats().waits_for_version, 0u);
}

TEST_F(ShardsTest, PullsAreDividedOverTheReplicas) {
  for (const uint64_t owned : {0b00001111, 0b11110000, 0b00001111, 0b11110000}) add_server(owned);
  publish();
  const auto client = connect();
  const auto have_pulls = [&] {
    return std::all_of(servers_.begin(), servers_.end(),
                       [](const auto& server) { return server->server().stats().pulls >= 10; });
  };
  while (!have_pulls()) ASSERT_TRUE(pull(*client, {1, 2, 3, 4, 5, 6, 7, 8}).ok());
}

TEST_F(ShardsTest, AReplicaReplacesADeadServerAndAShardWithoutServersIsAnError) {
  add_server(0b00001111);
  add_server(0b11110000);
  add_server(0b11110000);
  publish();
  const auto client = connect();
  EXPECT_EQ(pull(*client, keys_of(0xFF)).value().found, kKeys);
  servers_[1]->stop();
  for (int i = 0; i < 20; ++i) {
    const auto report = pull(*client, keys_of(0xFF));
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    EXPECT_EQ(report.value().found, kKeys);
  }
  servers_[2]->stop();
  // On a busy machine a short deadline may pass before the last attempts are refused.
  PullOptions options;
  options.deadline_ms = 1'000;
  Status status = pull(*client, keys_of(0xFF), options).status();
  const auto is_late = [&] { return status.code() == Code::kDeadlineExceeded; };
  const auto is_refused = [&] { return status.message().find("refused") != std::string::npos; };
  for (; !status.ok() && !is_refused() && options.deadline_ms < 10'000; options.deadline_ms *= 3)
    status = pull(*client, keys_of(0xFF), options).status();
  expect_error(status, is_late() ? status.code() : Code::kUnavailable, {"Connection refused"});
  EXPECT_TRUE(pull(*client, keys_of(0b00001111)).ok()) << "the other shard still serves";
  std::thread later([&] { servers_[1]->start(); });
  EXPECT_EQ(pull(*client, keys_of(0xFF)).value().found, kKeys);
  later.join();
}

TEST_F(ShardsTest, APullFindsAMapThatMovesTheKeysOfADeadServer) {
  add_server(0b00001111);
  add_server(0b11110000, 0xFF);
  publish();
  const auto client = connect();
  EXPECT_EQ(pull(*client, keys_of(0xFF)).value().found, kKeys);
  servers_[0]->stop();
  split_between_two(0);
  servers_[1]->set_shard_map(map());
  const auto report = pull(*client, keys_of(0xFF));
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().found, kKeys);
}

// Partitions move back and forth, and the servers receive each map at different moments. Both
// pools have all rows, so a missing key would mean that a server replied for a key it does not own.
TEST_F(ShardsTest, PullsContinueWhileTheMapChanges) {
  add_server(0b00001111, 0xFF);
  add_server(0b11110000, 0xFF);
  publish();
  const auto client = connect();
  std::atomic<bool> done{false};
  std::atomic<uint64_t> pulls{0};
  const auto pull_repeatedly = [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    while (!done.load()) {
      std::vector<uint64_t> keys(700);
      for (uint64_t& key : keys) key = random() % kKeys;
      std::vector<float> rows(keys.size() * kDim);
      const auto report = client->pull("f32", keys, rows);
      ASSERT_TRUE(report.ok()) << report.status().to_string();
      ASSERT_EQ(report.value().found, keys.size());
      ASSERT_EQ(rows, rows_of(keys, kDim));
      pulls.fetch_add(1);
    }
  };
  std::mt19937_64 random(testing::seed());
  std::thread first_thread(pull_repeatedly, random());
  std::thread second_thread(pull_repeatedly, random());
  constexpr uint64_t kOwned[] = {0b00001111, 0b00000011, 0b11111100, 0b01010101};
  const uint64_t until = base::monotonic_ns() + 50'000'000'000;
  while ((version_ < 60 || pulls < 200 || wrong_shards() == 0) && base::monotonic_ns() < until) {
    split_between_two(kOwned[(version_ + 1) % 4]);
    const size_t first = version_ % 2;
    servers_[first]->set_shard_map(map());
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 20));
    servers_[1 - first]->set_shard_map(map());
    // The servers agree until some pulls have ended: those under a sanitizer take longer.
    const uint64_t enough = pulls + 2 + random() % 4;
    while (pulls < enough && base::monotonic_ns() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  done = true;
  first_thread.join();
  second_thread.join();
  EXPECT_GE(pulls.load(), 200u);
  EXPECT_GT(wrong_shards(), 0u);
}

// The client returns the connection that received WRONG_SHARD before it reads the map.
TEST_F(ShardsTest, AChangedMapIsReadOverTheOnlyConnection) {
  add_server(0b00001111, 0xFF);
  add_server(0b11110000, 0xFF);
  publish();
  Options options = quiet();
  options.connections = 1;
  const auto client = connect(options);
  EXPECT_EQ(pull(*client, keys_of(0xFF)).value().found, kKeys);
  split_between_two(0b00000011);
  for (const auto& server : servers_) server->set_shard_map(map());
  const auto report = pull(*client, keys_of(0xFF));
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().found, kKeys);
}

TEST_F(ShardsTest, AClientWithoutAMapFollowsALaterOne) {
  add_server(0b00001111, 0xFF);
  add_server(0b11110000);
  const auto client = connect();  // knows one server, without a map
  EXPECT_EQ(pull(*client, keys_of(0xFF)).value().found, kKeys);
  publish();
  EXPECT_EQ(pull(*client, keys_of(0xFF)).value().found, kKeys);
  EXPECT_GT(servers_[1]->server().stats().pulls, 0u);
}

TEST_F(ShardsTest, HotSetsGoToTheOwnersOfTheirKeys) {
  add_server(0b00001111);
  add_server(0b11110000);
  publish();
  Options options = quiet();
  options.hot_sample_every = 1;
  options.hot_set_ms = 3'600'000;
  const auto client = connect(options);
  const auto hot_sets = [&](size_t server) { return servers_[server]->server().stats().hot_sets; };
  // Pull and send until the servers have received the hot set. The client waits one second for
  // each, which a busy machine may take.
  const auto send_sets = [&](uint64_t partitions, const std::vector<size_t>& owners) {
    uint64_t sets = 0;
    for (bool is_sent = false; !is_sent && sets < 20; ++sets) {
      std::vector<uint64_t> before;
      for (const size_t owner : owners) before.push_back(hot_sets(owner));
      for (int i = 0; i < 5; ++i) EXPECT_TRUE(pull(*client, keys_of(partitions)).ok());
      is_sent = client->send_hot_sets().ok();
      for (size_t i = 0; i < owners.size(); ++i)
        is_sent = is_sent && hot_sets(owners[i]) > before[i];
    }
    return sets;
  };
  const uint64_t first_sets = send_sets(0b00000001, {0});
  EXPECT_GE(hot_sets(0), 1u);
  EXPECT_LE(hot_sets(0), first_sets);
  EXPECT_EQ(hot_sets(1), 0u);
  const uint64_t second_sets = send_sets(0b00010001, {0, 1});
  EXPECT_GE(hot_sets(0), 2u);
  EXPECT_LE(hot_sets(0), first_sets + second_sets);
  EXPECT_GE(hot_sets(1), 1u);
  EXPECT_LE(hot_sets(1), second_sets);
}

class ShardVersionsTest : public ShardsTest {
 protected:
  // Two servers with "ranking@5" and "ranking@6", whose ids differ between the servers. The alias
  // "live" resolves to the first.
  ShardVersionsTest() {
    add_server(0b00001111);
    add_server(0b11110000);
    for (size_t i = 0; i < 2; ++i) {
      pool::Pool& pool = servers_[i]->tables().pool();
      for (size_t extra = 0; extra < i; ++extra)
        EXPECT_TRUE(pool.create_instance("ranking", "ranking@x", kPartitions).ok());
      for (uint64_t version = 5; version <= 6; ++version) {
        table::Table& table = add_instance(i, version, kDim);
        RealServer::fill(table, keys_of(owned_[i]), version);
      }
      switch_to(i, 0);
    }
    publish();
  }
  // Create "ranking@<version>" with the table "rows" on a server.
  table::Table& add_instance(size_t server, uint64_t version, uint32_t dim) {
    const auto record = servers_[server]->tables().pool().create_instance(
        "ranking", "ranking@" + std::to_string(version), kPartitions);
    EXPECT_TRUE(record.ok()) << record.status().to_string();
    instances_[server].push_back(record.value().id);
    return servers_[server]->add_table("rows", Dtype::kF32, dim, 4 * kKeys, 0, {},
                                       pool::Feed::kPush, record.value().id);
  }
  // Make "live" resolve to instance number `instance` of a server.
  void switch_to(size_t server, size_t instance) {
    EXPECT_TRUE(
        servers_[server]->tables().pool().set_alias("live", instances_[server][instance]).ok());
  }
  std::unique_ptr<Client> connect_to_live(const Options& options) {
    return connect_to("petps://" + servers_[0]->address() + "/live", options);
  }
  // Connect to "live", and let `call` use the client, until no server has failed during it. The
  // first call waits 550 ms for what each server's alias resolves to, and then does without. A busy
  // machine may stall for longer.
  std::unique_ptr<Client> connect_undisturbed(const std::function<void(Client&)>& call) {
    for (int i = 0;; ++i) {
      auto client = connect_to_live(quiet());
      call(*client);
      const std::vector<ServerCounts> counts = client->server_counts();
      const bool is_undisturbed = std::all_of(
          counts.begin(), counts.end(), [](const ServerCounts& of) { return of.failures == 0; });
      if (is_undisturbed) return client;
      if (i == 20) ADD_FAILURE() << "a server failed each time";
      if (i == 20) return client;
    }
  }
  // Pull every key. Return the version that all rows have.
  uint64_t pull_version(Client& client) {
    const std::vector<uint64_t> keys = keys_of(0xFF);
    std::vector<float> rows(keys.size() * kDim);
    const auto report = client.pull("rows", keys, rows);
    EXPECT_TRUE(report.ok()) << report.status().to_string();
    if (!report.ok()) return 0;
    EXPECT_EQ(report.value().found, keys.size());
    const uint64_t version = has_row(rows, 0, row_of(keys[0], kDim, 5)) ? 5 : 6;
    for (size_t i = 0; i < keys.size(); ++i)
      EXPECT_TRUE(has_row(rows, i, row_of(keys[i], kDim, version))) << keys[i];
    return version;
  }

  std::vector<uint32_t> instances_[2];  // by server
};

// After each switch of the alias on one of two servers, once the client has read both catalogues,
// every result is of one instance.
TEST_F(ShardVersionsTest, NoResultMixesTwoInstances) {
  Options options = quiet();
  options.catalogue_ms = 10;
  auto client = connect_to_live(options);
  const auto catalogues_read = [&](size_t server) {
    const auto tables = static_cast<size_t>(wire::Opcode::kTables);
    return servers_[server]->server().stats().latency[tables].count;
  };
  std::map<uint64_t, size_t> seen;
  for (size_t round = 0; round < 4; ++round) {
    for (size_t i = 0; i < 2; ++i) {
      switch_to(i, round % 2);
      for (size_t server = 0; server < 2; ++server) {
        const uint64_t before = catalogues_read(server);
        while (catalogues_read(server) < before + 2)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      for (int pulls = 0; pulls < 5; ++pulls) seen[pull_version(*client)] += 1;
    }
  }
  EXPECT_EQ(seen.size(), 2u) << "no pull was of the other instance";
}

// One server has switched. The other has not yet loaded its part of the new instance.
TEST_F(ShardVersionsTest, TheOldInstanceIsPulledUntilTheLastServerHasSwitched) {
  for (const size_t first : {size_t{0}, size_t{1}}) {
    const size_t last = 1 - first;
    const auto part = servers_[last]->tables().find("ranking@6", "rows");
    const std::vector<uint64_t> keys = keys_of(owned_[last]);
    const std::vector<uint8_t> all(keys.size(), 1);
    table::Batch erase;
    erase.keys = keys;
    erase.deleted = all;
    ASSERT_TRUE(part->apply(erase).ok());
    switch_to(first, 1);
    Options options = quiet();
    options.catalogue_ms = 5;
    auto client = connect_to_live(options);
    for (int i = 0; i < 20; ++i) {
      EXPECT_EQ(pull_version(*client), 5u);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    RealServer::fill(*part, keys, 6);
    switch_to(last, 1);
    const uint64_t until = base::monotonic_ns() + 25'000'000'000;
    while (pull_version(*client) != 6 && base::monotonic_ns() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(pull_version(*client), 6u);
    for (const size_t i : {first, last}) switch_to(i, 0);
  }
}

// The new instance has longer rows. The length of the caller's array is checked against the
// instance that is requested.
TEST_F(ShardVersionsTest, RowsHaveTheOldLengthUntilTheLastServerHasSwitched) {
  for (const size_t i : {size_t{0}, size_t{1}}) add_instance(i, 7, 2 * kDim);
  for (const size_t first : {size_t{0}, size_t{1}}) {
    switch_to(first, 2);
    uint32_t dim = 0;
    const auto describe = [&](Client& client) { dim = client.describe("rows").value().dim; };
    auto client = connect_undisturbed(describe);
    EXPECT_EQ(dim, kDim) << first;
    EXPECT_EQ(pull_version(*client), 5u) << first;
    switch_to(1 - first, 2);
    connect_undisturbed(describe);
    EXPECT_EQ(dim, 2 * kDim);
    for (const size_t i : {size_t{0}, size_t{1}}) switch_to(i, 0);
  }
}

TEST_F(ShardVersionsTest, APushGoesToOneInstanceOnAllServers) {
  switch_to(0, 1);
  const std::vector<uint64_t> keys = keys_of(0xFF);
  float value = 1.125f;
  std::vector<float> rows(keys.size() * kDim);
  Status status;
  connect_undisturbed([&](Client& client) {
    value += 1;
    std::fill(rows.begin(), rows.end(), value);
    status = client.push("rows", keys, rows, kDim).status();
  });
  ASSERT_TRUE(status.ok()) << status.to_string();
  const auto count_pushed = [&](const std::string& instance) {
    const auto pinned = connect_to("petps://" + servers_[0]->address() + "/" + instance, quiet());
    std::vector<float> out(rows.size());
    EXPECT_TRUE(pinned->pull("rows", keys, out).ok());
    return std::count(out.begin(), out.end(), value);
  };
  EXPECT_EQ(count_pushed("ranking@5"), static_cast<ptrdiff_t>(rows.size()));
  EXPECT_EQ(count_pushed("ranking@6"), 0);
}

TEST_F(ShardVersionsTest, APullFollowsTheAliasWhenItsInstanceIsDropped) {
  auto client = connect_to_live(quiet());
  EXPECT_EQ(pull_version(*client), 5u);
  for (const size_t i : {size_t{0}, size_t{1}}) switch_to(i, 1);
  EXPECT_EQ(pull_version(*client), 5u) << "until it reads the catalogue";
  for (const size_t i : {size_t{0}, size_t{1}})
    ASSERT_TRUE(servers_[i]->tables().drop_instance(instances_[i][0]).ok());
  EXPECT_EQ(pull_version(*client), 6u);
}

// Each of two servers replies to a pull only once the other has received its part.
TEST(Shards, ReceiveTheirRequestsAtTheSameTime) {
  std::atomic<uint64_t> received{0};
  const auto wait_for_both = [&](wire::Opcode opcode, uint64_t, wire::Frame&) {
    if (opcode != wire::Opcode::kPull) return testing::Answer::kSend;
    received.fetch_add(1);
    while (received.load() < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return testing::Answer::kSend;
  };
  testing::FakeServer first(wait_for_both);
  testing::FakeServer second(wait_for_both);
  for (testing::FakeServer* server : {&first, &second})
    server->set_shard_map(
        {"ranking", 1, 2, {{first.address(), {0b01}}, {second.address(), {0b10}}}});
  const auto client = connect_to(first.url(), quiet());
  const std::vector<uint64_t> keys = testing::first_keys(100);
  std::vector<float> rows(keys.size() * testing::FakeServer::kDim);
  const auto report = client->pull("users", keys, rows);
  received.store(2);  // let the servers return if the client sent one request after the other
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().found, 50u);
  EXPECT_EQ(first.count(wire::Opcode::kPull), 1u);
  EXPECT_EQ(second.count(wire::Opcode::kPull), 1u);
}

// The client receives the rows of one shard while another server is silent. It retries only the
// silent server's part.
TEST(Shards, OnlyTheKeysOfASilentReplicaAreRetried) {
  testing::FakeServer alive;
  // Silent for good once it has received a pull, so that no probe finds it alive.
  std::atomic<bool> is_silent{false};
  testing::FakeServer silent([&](wire::Opcode opcode, uint64_t, wire::Frame&) {
    if (opcode == wire::Opcode::kPull) is_silent = true;
    return is_silent ? testing::Answer::kSilent : testing::Answer::kSend;
  });
  testing::FakeServer replica;
  const wire::ShardMap map = {
      "ranking",
      1,
      2,
      {{alive.address(), {0b01}}, {silent.address(), {0b10}}, {replica.address(), {0b10}}}};
  for (testing::FakeServer* server : {&alive, &silent, &replica}) server->set_shard_map(map);
  const auto client = connect_to(alive.url(), quiet());
  const std::vector<uint64_t> keys = testing::first_keys(100);
  std::vector<float> rows(keys.size() * testing::FakeServer::kDim);
  // The client chooses one of the two replicas at random.
  uint64_t pulls = 0;
  for (; pulls < 3 || (silent.count(wire::Opcode::kPull) == 0 && pulls < 200); ++pulls) {
    const auto report = client->pull("users", keys, rows);
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    EXPECT_EQ(report.value().found, 50u);
  }
  EXPECT_GE(silent.count(wire::Opcode::kPull), 1u);
  EXPECT_EQ(alive.count(wire::Opcode::kPull), pulls);
}

TEST_F(ShardsTest, ManyThreadsShareTheConnections) {
  add_server(0b00001111);
  add_server(0b11110000);
  publish();
  Options options = quiet();
  options.connections = 2;
  const auto client = connect(options);
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 40; ++i) {
        const auto report = pull(*client, keys_of(0xFF));
        ASSERT_TRUE(report.ok()) << report.status().to_string();
        ASSERT_EQ(report.value().found, kKeys);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace petps::client
