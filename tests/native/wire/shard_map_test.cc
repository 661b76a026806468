// Which shard maps are valid, and which server owns which partitions.
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "frames.h"
#include "tests/seed.h"

namespace petps::wire {
namespace {

using base::Code;
using base::Status;

PartitionSet set_of(std::initializer_list<uint32_t> partitions) {
  PartitionSet set{};
  for (const uint32_t p : partitions) set[p / 64] |= uint64_t{1} << (p % 64);
  return set;
}

ShardMap good_map() {
  return {"ranking", 3, 4, {{"h1:1", set_of({0, 1})}, {"h2:1", set_of({2, 3})}}};
}

TEST(ShardMap, AcceptsOwnersAndReplicas) {
  ShardMap map = good_map();
  EXPECT_TRUE(check_shard_map(map).ok());
  map.servers.push_back({"h3:1", set_of({2, 3})});
  EXPECT_TRUE(check_shard_map(map).ok());
  const Shard shard = shard_of(map, "h3:1");
  EXPECT_EQ(shard.shard, 2u);
  EXPECT_EQ(shard.shards, 3u);
  EXPECT_EQ(shard.map_version, 3u);
  EXPECT_FALSE(shard.owns(1));
  EXPECT_TRUE(shard.owns(3));
  EXPECT_FALSE(shard.owns_all());
}

TEST(ShardMap, OwnersOfOnePartitionNeedNotShareOthers) {
  ShardMap map = good_map();
  map.servers.push_back({"h3:1", set_of({1, 2})});
  EXPECT_TRUE(check_shard_map(map).ok());
  EXPECT_EQ(owners_of(map, 0), std::vector<std::string>({"h1:1"}));
  EXPECT_EQ(owners_of(map, 1), std::vector<std::string>({"h1:1", "h3:1"}));
  EXPECT_EQ(shared_partitions(map, "h1:1"), set_of({1}));
  EXPECT_EQ(shared_partitions(map, "h3:1"), set_of({1, 2}));
  EXPECT_EQ(shared_partitions(map, "h9:1"), PartitionSet{});
}

// The release before refuses bytes after the servers, so a map without zones must have none.
TEST(ShardMap, AMapWithoutZonesHasTheBytesOfTheReleaseBefore) {
  ShardMap map = good_map();
  Frame frame;
  encode_shard_map_reply(1, map, frame);
  EXPECT_EQ(frame.size(), kHeaderBytes + 16 + (2 + 7) + 2 * (2 + 4 + 8));
  map.servers[1].zone = "b";
  encode_shard_map_reply(1, map, frame);
  EXPECT_EQ(frame.size(), kHeaderBytes + 16 + (2 + 7) + 2 * (2 + 4 + 8) + 2 + (2 + 1));
  ShardMap decoded;
  ASSERT_TRUE(decode_frame(decode_shard_map_reply, frame, decoded).ok());
  EXPECT_EQ(decoded, map);
}

TEST(ShardMap, AServerThatTheMapDoesNotNameOwnsNothing) {
  const Shard shard = shard_of(good_map(), "h9:1");
  EXPECT_EQ(shard.owned, PartitionSet{});
  EXPECT_FALSE(shard.owns_all());
}

TEST(ShardMap, WithoutAMapAServerOwnsEverything) {
  const ShardMap none{"", 0, 70, {}};
  EXPECT_TRUE(check_shard_map(none).ok());
  EXPECT_TRUE(shard_of(none, "h1:1").owns_all());
  EXPECT_TRUE(shard_of({}, "").owns_all());
}

TEST(ShardMap, RefusesAnInvalidMapAndNamesTheFault) {
  const std::pair<std::function<void(ShardMap&)>, const char*> faults[] = {
      {[](ShardMap& map) { map.servers[1].partitions = set_of({2}); },
       "partition 3 is owned by no server"},
      {[](ShardMap& map) {
         map.servers[1].partitions = set_of({2, 3, 4});
       },
       "h2:1 owns partition 4, but the partitions are 0 to 3"},
      {[](ShardMap& map) { map.servers[1].address = "h1:1"; }, "h1:1 appears twice"},
      {[](ShardMap& map) {
         map.servers.push_back({"h3:1", {}});
       },
       "h3:1 owns no partition"},
      {[](ShardMap& map) { map.servers[1].zone.assign(256, 'z'); },
       "the zone of h2:1 must have at most 255 bytes, got 256"},
      {[](ShardMap& map) { map.servers[0].address = ""; },
       "the address of a server must have 1 to 255 bytes, got 0"},
      {[](ShardMap& map) { map.model = ""; }, "the model's name must have 1 to 255 bytes, got 0"},
      {[](ShardMap& map) { map.version = 0; }, "version 0 means no map"},
      {[](ShardMap& map) { map.partitions = kMaxPartitions + 1; }, "expected 1 to 1024"},
      {[](ShardMap& map) { map.servers.clear(); }, "partition 0 is owned by no server"},
      {[](ShardMap& map) { map.servers.resize(kMaxShardServers + 1, map.servers[0]); },
       "1025 servers are too many: at most 1024"},
  };
  for (const auto& [damage, message] : faults) {
    ShardMap map = good_map();
    damage(map);
    expect_refused(check_shard_map(map), Code::kInvalidArgument, message);
  }
}

TEST(ShardMap, ShowsPartitionsAsRanges) {
  EXPECT_EQ(partitions_text({}), "none");
  EXPECT_EQ(partitions_text(set_of({0, 1, 2, 7, 1022, 1023})), "0-2, 7, 1022-1023");
}

// Any sets of partitions with any zones survive the wire unchanged, and every key has an owner.
TEST(ShardMap, EveryValidMapIsDecodedUnchanged) {
  const uint64_t seed = tests::seed();
  std::mt19937_64 random(seed);
  for (int round = 0; round < 200; ++round) {
    ShardMap map{"m", 1 + random(), static_cast<uint32_t>(1 + random() % kMaxPartitions), {}};
    const uint64_t owners = 1 + random() % std::min<uint64_t>(map.partitions, 9);
    std::vector<PartitionSet> sets(owners);
    for (uint32_t p = 0; p < map.partitions; ++p) {
      sets[p < owners ? p : random() % owners][p / 64] |= uint64_t{1} << (p % 64);
    }
    for (const PartitionSet& set : sets) {
      for (uint64_t replica = 0; replica <= random() % 3; ++replica) {
        map.servers.push_back({"h" + std::to_string(map.servers.size()) + ":1", set});
        ShardServer& server = map.servers.back();
        for (uint32_t p = 0; p < map.partitions; p += 1 + static_cast<uint32_t>(random() % 50))
          server.partitions[p / 64] |= uint64_t{1} << (p % 64);
        if (random() % 2 == 0) server.zone = "zone" + std::to_string(random() % 3);
      }
    }
    ASSERT_TRUE(check_shard_map(map).ok()) << check_shard_map(map).to_string();
    Frame frame;
    encode_shard_map_reply(1, map, frame);
    ShardMap decoded;
    const Status status = decode_frame(decode_shard_map_reply, frame, decoded);
    ASSERT_TRUE(status.ok()) << status.to_string();
    ASSERT_EQ(decoded, map);
    for (int i = 0; i < 20; ++i) {
      const uint32_t partition = partition_of(random(), map.partitions);
      size_t owned = 0;
      for (const ShardServer& server : map.servers)
        owned += shard_of(map, server.address).owns(partition) ? 1 : 0;
      EXPECT_GE(owned, 1u);
    }
  }
}

}  // namespace
}  // namespace petps::wire
