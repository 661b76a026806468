// One client and several servers with a shard map: which servers receive requests, how parts are
// merged, and what happens when the map changes or a server fails.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <numeric>
#include <random>
#include <thread>

#include "base/clock.h"
#include "fleet.h"

namespace petps::client {
namespace {

using base::Code;
using base::Status;
using codec::Dtype;
using testing::kDefault;
using testing::kDim;
using testing::keys_of;
using testing::kKeys;
using testing::kPartitions;
using testing::quiet;
using testing::RealServer;
using testing::row_of;
using testing::shown_row;

class ShardsTest : public testing::Fleet {};

// Compare random pulls with the expected rows: all dtypes, both forms, repeated and missing keys.
TEST_F(ShardsTest, PullsArePutTogetherFromAllShards) {
  add_server(0b00010111);
  add_server(0b11000000);
  add_server(0b00101000);
  publish();
  std::mt19937_64 random(testing::seed());
  auto client = connect();
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
    uint64_t found = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      const bool there = keys[i] < kKeys;
      found += there ? 1 : 0;
      std::vector<float> want = there ? shown_row(dtype, keys[i], kDim) : kDefault;
      std::vector<std::byte> bytes(row_bytes);
      if (stored) {
        const std::vector<float> values = there ? row_of(keys[i], kDim) : kDefault;
        codec::encode(dtype, values.data(), 1, kDim, bytes.data());
      } else {
        if (!there) {
          std::vector<std::byte> as_stored(codec::row_bytes(dtype, kDim));
          codec::encode(dtype, kDefault.data(), 1, kDim, as_stored.data());
          codec::decode(dtype, as_stored.data(), 1, kDim, want.data());
        }
        std::memcpy(bytes.data(), want.data(), row_bytes);
      }
      ASSERT_EQ(0, std::memcmp(bytes.data(), out.data() + i * row_bytes, row_bytes))
          << table << " key " << keys[i] << " at " << i << " of " << keys.size();
      if (!mask.empty()) {
        ASSERT_EQ(mask[i], there ? 1 : 0) << keys[i];
      }
    }
    EXPECT_EQ(report.value().found, found);
  }
  for (const auto& server : servers_) {
    EXPECT_GT(server->server().stats().pulls, 0u);
    EXPECT_EQ(server->server().stats().wrong_shard, 0u);
  }
}

TEST_F(ShardsTest, SeveralTablesInOneCall) {
  add_server(0b00001111);
  add_server(0b11110000);
  publish();
  auto client = connect();
  const std::vector<uint64_t> some = keys_of(0b00000001);  // keys of a single shard
  const std::vector<uint64_t> all = keys_of(0xFF);
  std::vector<float> first(some.size() * kDim);
  std::vector<float> second(all.size() * kDim);
  const std::vector<TablePull> pulls = {
      {"f32", some, std::as_writable_bytes(std::span(first)), {}, Form::kFloat32},
      {"int8", all, std::as_writable_bytes(std::span(second)), {}, Form::kFloat32},
      {"f16", {}, {}, {}, Form::kFloat32}};
  const auto report = client->pull_many(pulls);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().found, some.size() + all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    const std::vector<float> row(second.begin() + static_cast<ptrdiff_t>(i * kDim),
                                 second.begin() + static_cast<ptrdiff_t>((i + 1) * kDim));
    ASSERT_EQ(row, shown_row(Dtype::kInt8, all[i], kDim));
  }
  const auto none = client->pull_many({});
  ASSERT_TRUE(none.ok()) << none.status().to_string();
  EXPECT_EQ(none.value().applied_version, 0u);
}

TEST_F(ShardsTest, TheVersionIsTheLowestOfTheShardsAsked) {
  RealServer& first = add_server(0b00001111);
  RealServer& second = add_server(0b11110000);
  publish();
  record(first, 0b00001111, 9);
  record(second, 0b11110000, 4);
  auto client = connect();
  EXPECT_EQ(pull(*client, keys_of(0xFF)).value().applied_version, 4u);
  EXPECT_EQ(pull(*client, keys_of(0b00001111)).value().applied_version, 9u);
  PullOptions options;
  options.min_version = 9;
  EXPECT_TRUE(pull(*client, keys_of(0b00001111), options).ok());
  expect_error(pull(*client, keys_of(0xFF), options).status(), Code::kStale,
               "version 9 was requested, this server has applied 4");
}

TEST_F(ShardsTest, MinVersionWaitsForEveryShard) {
  RealServer& first = add_server(0b00001111);
  RealServer& second = add_server(0b11110000);
  publish();
  record(first, 0b00001111, 3);
  record(second, 0b11110000, 2);
  auto client = connect();
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
  expect_error(pull(*client, keys_of(0xFF), options).status(), Code::kStale, "version 4");
  // The servers' wait ends before the deadline: the result is STALE, not a timeout.
  options.wait_ms = 60'000;
  options.deadline_ms = 2'400;
  expect_error(pull(*client, keys_of(0xFF), options).status(), Code::kStale, "version 4");
  EXPECT_TRUE(pull(*client, keys_of(0xFF)).ok());
}

// No pull waits for the lagging replica while the other one has the version.
TEST_F(ShardsTest, AReplicaThatHasTheVersionIsFoundWithoutWaiting) {
  RealServer& lagging = add_server(0xFF);
  RealServer& current = add_server(0xFF);
  publish();
  record(lagging, 0xFF, 1);
  record(current, 0xFF, 2);
  auto client = connect();
  PullOptions options;
  options.min_version = 2;
  options.wait_ms = 10'000;
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(pull(*client, keys_of(0xFF), options).ok());
  EXPECT_EQ(lagging.server().stats().waits_for_version, 0u);
}

TEST_F(ShardsTest, ReplicasTakeTurns) {
  for (const uint64_t owned : {0b00001111, 0b11110000, 0b00001111, 0b11110000}) add_server(owned);
  publish();
  auto client = connect();
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(pull(*client, {1, 2, 3, 4, 5, 6, 7, 8}).ok());
  for (const auto& server : servers_) EXPECT_EQ(server->server().stats().pulls, 10u);
}

TEST_F(ShardsTest, AReplicaStandsInAndAMissingShardIsNamed) {
  add_server(0b00001111);
  add_server(0b11110000);
  add_server(0b11110000);
  publish();
  auto client = connect();
  EXPECT_EQ(pull(*client, keys_of(0xFF)).value().found, kKeys);
  servers_[1]->stop();
  for (int i = 0; i < 20; ++i) {
    const auto report = pull(*client, keys_of(0xFF));
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    EXPECT_EQ(report.value().found, kKeys);
  }
  servers_[2]->stop();
  PullOptions options;
  options.deadline_ms = 1'000;
  expect_error(pull(*client, keys_of(0xFF), options).status(), Code::kUnavailable,
               "Connection refused");
  EXPECT_TRUE(pull(*client, keys_of(0b00001111), options).ok()) << "the other shard serves on";
  std::thread later([&] { servers_[1]->start(); });
  EXPECT_EQ(pull(*client, keys_of(0xFF)).value().found, kKeys);
  later.join();
}

TEST_F(ShardsTest, AMapThatMovedTheKeysOfADeadServerIsFound) {
  add_server(0b00001111);
  add_server(0b11110000, 0xFF);
  publish();
  auto client = connect();
  EXPECT_EQ(pull(*client, keys_of(0xFF)).value().found, kKeys);
  servers_[0]->stop();
  owned_ = {0, 0xFF};
  ++version_;
  servers_[1]->set_shard_map(map());
  const auto report = pull(*client, keys_of(0xFF));
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().found, kKeys);
}

// Partitions move back and forth, and the servers receive each map at different moments. Both
// pools have all rows, so a missing key would be an unowned key that was answered as a miss.
TEST_F(ShardsTest, TheMapChangesWhilePullsGoOn) {
  add_server(0b00001111, 0xFF);
  add_server(0b11110000, 0xFF);
  publish();
  auto client = connect();
  std::atomic<bool> done{false};
  std::atomic<uint64_t> pulls{0};
  const auto puller = [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    while (!done.load()) {
      std::vector<uint64_t> keys(700);
      for (uint64_t& key : keys) key = random() % kKeys;
      std::vector<float> rows(keys.size() * kDim);
      const auto report = client->pull("f32", keys, rows);
      ASSERT_TRUE(report.ok()) << report.status().to_string();
      ASSERT_EQ(report.value().found, keys.size());
      for (size_t i = 0; i < keys.size(); ++i) {
        ASSERT_EQ(row_of(keys[i], kDim),
                  std::vector<float>(rows.begin() + static_cast<ptrdiff_t>(i * kDim),
                                     rows.begin() + static_cast<ptrdiff_t>((i + 1) * kDim)));
      }
      pulls.fetch_add(1);
    }
  };
  std::mt19937_64 random(testing::seed());
  std::thread one(puller, random());
  std::thread two(puller, random());
  constexpr uint64_t kOwned[] = {0b00001111, 0b00000011, 0b11111100, 0b01010101};
  const uint64_t until = base::monotonic_ns() + 30'000'000'000;
  while ((version_ < 60 || pulls < 200) && base::monotonic_ns() < until) {
    ++version_;
    owned_[0] = kOwned[version_ % 4];
    owned_[1] = 0xFF & ~owned_[0];
    const size_t first = version_ % 2;
    servers_[first]->set_shard_map(map());
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 20));
    servers_[1 - first]->set_shard_map(map());
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 5));
  }
  done = true;
  one.join();
  two.join();
  EXPECT_GE(pulls.load(), 200u);
  EXPECT_GT(servers_[0]->server().stats().wrong_shard + servers_[1]->server().stats().wrong_shard,
            0u);
}

// The connection that received WRONG_SHARD is returned before the client reads the map.
TEST_F(ShardsTest, AChangedMapIsReadOverTheOnlyConnection) {
  add_server(0b00001111, 0xFF);
  add_server(0b11110000, 0xFF);
  publish();
  Options options = quiet();
  options.connections = 1;
  auto client = connect(options);
  EXPECT_EQ(pull(*client, keys_of(0xFF)).value().found, kKeys);
  ++version_;
  owned_ = {0b00000011, 0b11111100};
  for (const auto& server : servers_) server->set_shard_map(map());
  const auto report = pull(*client, keys_of(0xFF));
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().found, kKeys);
}

TEST_F(ShardsTest, ServersThatAreGivenAMapLaterAreFollowed) {
  add_server(0b00001111, 0xFF);
  add_server(0b11110000);
  auto client = connect();  // knows one server, without a map
  EXPECT_EQ(pull(*client, keys_of(0xFF)).value().found, kKeys);
  publish();
  EXPECT_EQ(pull(*client, keys_of(0xFF)).value().found, kKeys);
  EXPECT_GT(servers_[1]->server().stats().pulls, 0u);
}

TEST_F(ShardsTest, HotKeysGoToTheirOwner) {
  add_server(0b00001111);
  add_server(0b11110000);
  publish();
  Options options = quiet();
  options.hot_sample_every = 1;
  options.hot_set_ms = 3'600'000;
  auto client = connect(options);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(pull(*client, keys_of(0b00000001)).ok());
  ASSERT_TRUE(client->send_hot_sets().ok());
  EXPECT_EQ(servers_[0]->server().stats().hot_sets, 1u);
  EXPECT_EQ(servers_[1]->server().stats().hot_sets, 0u);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(pull(*client, keys_of(0b00010001)).ok());
  ASSERT_TRUE(client->send_hot_sets().ok());
  EXPECT_EQ(servers_[0]->server().stats().hot_sets, 2u);
  EXPECT_EQ(servers_[1]->server().stats().hot_sets, 1u);
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
        const auto made =
            pool.create_instance("ranking", "ranking@" + std::to_string(version), kPartitions);
        EXPECT_TRUE(made.ok()) << made.status().to_string();
        instances_[i].push_back(made.value().id);
        table::Table& table = servers_[i]->add_table("rows", Dtype::kF32, kDim, 4 * kKeys, 0, {},
                                                     pool::Feed::kPush, made.value().id);
        RealServer::fill(table, keys_of(owned_[i]), version);
      }
      EXPECT_TRUE(pool.set_alias("live", instances_[i][0]).ok());
    }
    publish();
  }
  std::unique_ptr<Client> connect_to_live(const Options& options) {
    auto client = Client::connect("petps://" + servers_[0]->address() + "/live", options);
    EXPECT_TRUE(client.ok()) << client.status().to_string();
    return std::move(client).value();
  }
  // Pull every key. Return the version that all rows have.
  uint64_t pulled_version(Client& client) {
    const std::vector<uint64_t> keys = keys_of(0xFF);
    std::vector<float> rows(keys.size() * kDim);
    const auto report = client.pull("rows", keys, rows);
    EXPECT_TRUE(report.ok()) << report.status().to_string();
    if (!report.ok()) return 0;
    EXPECT_EQ(report.value().found, keys.size());
    const bool older =
        std::equal(rows.begin(), rows.begin() + kDim, row_of(keys[0], kDim, 5).begin());
    const uint64_t version = older ? 5 : 6;
    for (size_t k = 0; k < keys.size(); ++k) {
      const std::vector<float> want = row_of(keys[k], kDim, version);
      EXPECT_TRUE(
          std::equal(want.begin(), want.end(), rows.begin() + static_cast<ptrdiff_t>(k * kDim)))
          << keys[k];
    }
    return version;
  }

  std::vector<uint32_t> instances_[2];  // by server
};

// After each switch of the alias on one of two servers, once the client has read both catalogues,
// every answer is of one instance.
TEST_F(ShardVersionsTest, NoAnswerMixesTwoInstances) {
  Options options = quiet();
  options.catalogue_ms = 10;
  auto client = connect_to_live(options);
  const auto catalogues_read = [&](size_t server) {
    const auto tables = static_cast<size_t>(wire::Opcode::kTables);
    return servers_[server]->server().stats().latency[tables].count;
  };
  std::map<uint64_t, size_t> seen;
  for (size_t turn = 0; turn < 4; ++turn) {
    for (size_t i = 0; i < 2; ++i) {
      ASSERT_TRUE(servers_[i]->tables().pool().set_alias("live", instances_[i][turn % 2]).ok());
      for (size_t server = 0; server < 2; ++server) {
        const uint64_t before = catalogues_read(server);
        while (catalogues_read(server) < before + 2)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      for (int pulls = 0; pulls < 5; ++pulls) seen[pulled_version(*client)] += 1;
    }
  }
  EXPECT_EQ(seen.size(), 2u) << "the switch was never seen";
}

// One server has switched. The other has not yet loaded its part of the new instance.
TEST_F(ShardVersionsTest, TheOldInstanceIsAskedForUntilTheLastServerHasSwitched) {
  for (const size_t first : {size_t{0}, size_t{1}}) {
    const size_t last = 1 - first;
    const auto part = servers_[last]->tables().find("ranking@6", "rows");
    const std::vector<uint64_t> keys = keys_of(owned_[last]);
    const std::vector<uint8_t> all(keys.size(), 1);
    table::Batch erase;
    erase.keys = keys;
    erase.deleted = all;
    ASSERT_TRUE(part->apply(erase).ok());
    ASSERT_TRUE(servers_[first]->tables().pool().set_alias("live", instances_[first][1]).ok());
    Options options = quiet();
    options.catalogue_ms = 5;
    auto client = connect_to_live(options);
    for (int i = 0; i < 20; ++i) {
      EXPECT_EQ(pulled_version(*client), 5u);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    RealServer::fill(*part, keys, 6);
    ASSERT_TRUE(servers_[last]->tables().pool().set_alias("live", instances_[last][1]).ok());
    for (int i = 0; i < 10'000 && pulled_version(*client) != 6; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(pulled_version(*client), 6u);
    for (const size_t i : {first, last})
      ASSERT_TRUE(servers_[i]->tables().pool().set_alias("live", instances_[i][0]).ok());
  }
}

// The new instance has longer rows. The length of the caller's array is checked against the
// instance that is requested.
TEST_F(ShardVersionsTest, UntilTheLastServerHasSwitchedRowsHaveTheOldLength) {
  for (size_t i = 0; i < 2; ++i) {
    const auto made =
        servers_[i]->tables().pool().create_instance("ranking", "ranking@7", kPartitions);
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    instances_[i].push_back(made.value().id);
    servers_[i]->add_table("rows", Dtype::kF32, 2 * kDim, 10, 0, {}, pool::Feed::kPush,
                           made.value().id);
  }
  const auto switch_to = [&](size_t server, size_t instance) {
    ASSERT_TRUE(
        servers_[server]->tables().pool().set_alias("live", instances_[server][instance]).ok());
  };
  for (const size_t first : {size_t{0}, size_t{1}}) {
    switch_to(first, 2);
    auto client = connect_to_live(quiet());
    EXPECT_EQ(client->describe("rows").value().dim, kDim) << first;
    EXPECT_EQ(pulled_version(*client), 5u) << first;
    switch_to(1 - first, 2);
    EXPECT_EQ(connect_to_live(quiet())->describe("rows").value().dim, 2 * kDim);
    for (const size_t i : {size_t{0}, size_t{1}}) switch_to(i, 0);
  }
}

TEST_F(ShardVersionsTest, APushIsOfOneInstanceOnAllServers) {
  ASSERT_TRUE(servers_[0]->tables().pool().set_alias("live", instances_[0][1]).ok());
  auto client = connect_to_live(quiet());
  const std::vector<uint64_t> keys = keys_of(0xFF);
  const std::vector<float> rows(keys.size() * kDim, 1.125f);
  const auto report = client->push("rows", keys, rows, kDim);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  const auto all_of = [&](const std::string& instance) {
    auto pinned = Client::connect("petps://" + servers_[0]->address() + "/" + instance, quiet());
    EXPECT_TRUE(pinned.ok()) << pinned.status().to_string();
    std::vector<float> out(rows.size());
    EXPECT_TRUE(pinned.value()->pull("rows", keys, out).ok());
    return std::count(out.begin(), out.end(), 1.125f);
  };
  EXPECT_EQ(all_of("ranking@5"), static_cast<ptrdiff_t>(rows.size()));
  EXPECT_EQ(all_of("ranking@6"), 0);
}

TEST_F(ShardVersionsTest, ADroppedInstanceIsFollowedToItsSuccessor) {
  auto client = connect_to_live(quiet());
  EXPECT_EQ(pulled_version(*client), 5u);
  auto other = connect_to_live(quiet());
  ASSERT_TRUE(other->switch_alias("live", "ranking@6").ok());
  EXPECT_EQ(pulled_version(*client), 5u) << "until it reads the catalogue";
  const Status dropped = other->drop_instance("ranking@5");
  ASSERT_TRUE(dropped.ok()) << dropped.to_string();
  EXPECT_EQ(pulled_version(*client), 6u);
}

// Each of two servers replies to a pull only once the other has received its part.
TEST(Shards, AreAskedAtTheSameTime) {
  std::atomic<uint64_t> received{0};
  const auto wait_for_both = [&](wire::Opcode opcode, uint64_t, wire::Frame&) {
    if (opcode != wire::Opcode::kPull) return testing::Answer::kSend;
    received.fetch_add(1);
    while (received.load() < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return testing::Answer::kSend;
  };
  testing::FakeServer first(wait_for_both);
  testing::FakeServer second(wait_for_both);
  for (testing::FakeServer* server : {&first, &second}) {
    server->hello().features = wire::kFeatureShardMap;
    server->hello().shard.map_version = 1;
    server->shard_map() = {
        "ranking", 1, 2, {{first.address(), {0b01}}, {second.address(), {0b10}}}};
  }
  const auto client = Client::connect(first.url(), quiet());
  ASSERT_TRUE(client.ok()) << client.status().to_string();
  std::vector<uint64_t> keys(100);
  std::iota(keys.begin(), keys.end(), 0);
  std::vector<float> rows(keys.size() * testing::FakeServer::kDim);
  const auto report = client.value()->pull("users", keys, rows);
  received.store(2);  // if the client asked one after the other: let the servers return
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().found, 50u);
  EXPECT_EQ(first.count(wire::Opcode::kPull), 1u);
  EXPECT_EQ(second.count(wire::Opcode::kPull), 1u);
}

// Rows of one shard are received while another server is silent. Only the silent
// server's part is retried.
TEST(Shards, ASilentReplicaCostsItsOwnPartOnly) {
  testing::FakeServer alive(nullptr);
  testing::FakeServer silent([](wire::Opcode opcode, uint64_t, wire::Frame&) {
    return opcode == wire::Opcode::kPull ? testing::Answer::kSilent : testing::Answer::kSend;
  });
  testing::FakeServer replica(nullptr);
  for (testing::FakeServer* server : {&alive, &silent, &replica}) {
    server->hello().features = wire::kFeatureShardMap;
    server->hello().shard.map_version = 1;
    server->shard_map() = {
        "ranking",
        1,
        2,
        {{alive.address(), {0b01}}, {silent.address(), {0b10}}, {replica.address(), {0b10}}}};
  }
  const auto client = Client::connect(alive.url(), quiet());
  ASSERT_TRUE(client.ok()) << client.status().to_string();
  std::vector<uint64_t> keys(100);
  std::iota(keys.begin(), keys.end(), 0);
  std::vector<float> rows(keys.size() * testing::FakeServer::kDim);
  PullOptions options;
  options.deadline_ms = 2'000;
  for (int i = 0; i < 3; ++i) {
    const auto report = client.value()->pull("users", keys, rows, {}, options);
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    EXPECT_EQ(report.value().found, 50u);
  }
  EXPECT_GE(silent.count(wire::Opcode::kPull), 1u);
  EXPECT_EQ(alive.count(wire::Opcode::kPull), 3u);
}

TEST_F(ShardsTest, ManyThreadsShareTheConnections) {
  add_server(0b00001111);
  add_server(0b11110000);
  publish();
  Options options = quiet();
  options.connections = 2;
  auto client = connect(options);
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
