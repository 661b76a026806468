// Pushes to several servers by a shard map.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <thread>

#include "fleet.h"

namespace petps::client {
namespace {

using base::Code;
using codec::Dtype;
using testing::expect_error;
using testing::has_row;
using testing::kDim;
using testing::keys_of;
using testing::kKeys;
using testing::RealServer;
using testing::row_of;
using testing::rows_of;

class ShardsPushTest : public testing::Fleet {
 protected:
  // The table "tight" has few rows at the first of two servers.
  void start_with_a_small_one() {
    add_server(0b00001111).add_table("tight", Dtype::kF32, kDim, 32, 0);
    add_server(0b11110000).add_table("tight", Dtype::kF32, kDim, 4 * kKeys, 0);
    publish();
  }
  // Push keys of which some do not fit: each is inserted or refused.
  static PushReport push_too_much(Client& client, const std::vector<uint64_t>& keys) {
    const std::vector<float> rows(keys.size() * kDim, 1.0f);
    PushReport report;
    PushOptions options;
    options.report = &report;
    expect_error(client.push("tight", keys, rows, kDim, options).status(), Code::kResourceExhausted,
                 {"rows were refused"});
    EXPECT_EQ(report.inserted + report.refused, keys.size());
    return report;
  }
};

TEST_F(ShardsPushTest, APushGoesToTheServersThatOwnItsKeys) {
  add_server(0b00001111);
  add_server(0b11110000);
  publish();
  const auto client = connect();
  std::vector<uint64_t> keys = testing::first_keys(kKeys + 100);
  std::vector<float> rows = rows_of(keys, kDim, 1);
  keys.push_back(7);  // the later row wins
  const std::vector<float> later_row = row_of(7, kDim, 2);
  rows.insert(rows.end(), later_row.begin(), later_row.end());
  const auto pushed = client->push("f32", keys, rows, kDim);
  ASSERT_TRUE(pushed.ok()) << pushed.status().to_string();
  EXPECT_EQ(pushed.value().inserted, 100u);
  EXPECT_EQ(pushed.value().updated, kKeys + 1);
  std::vector<float> back(rows.size());
  std::vector<uint8_t> mask(keys.size());
  ASSERT_TRUE(client->pull("f32", keys, back, mask).ok());
  EXPECT_EQ(std::count(mask.begin(), mask.end(), 1), static_cast<ptrdiff_t>(keys.size()));
  for (size_t i = 0; i < keys.size(); ++i) {
    ASSERT_TRUE(has_row(back, i, row_of(keys[i], kDim, keys[i] == 7 ? 2 : 1))) << keys[i];
  }
  const auto erased = client->erase("f32", keys);
  ASSERT_TRUE(erased.ok()) << erased.status().to_string();
  EXPECT_EQ(erased.value().deleted, kKeys + 100);
  EXPECT_EQ(pull(*client, keys).value().found, 0u);
}

// The client refuses the whole push if one group has replicas. Keys of other groups can be pushed.
TEST_F(ShardsPushTest, APushWithKeysOfReplicasIsRefusedBeforeAnythingIsSent) {
  add_server(0b00001111);
  add_server(0b11110000);
  add_server(0b11110000);
  publish();
  const auto client = connect();
  const std::vector<uint64_t> all = keys_of(0xFF);
  const std::vector<float> rows(all.size() * kDim, 1.0f);
  const base::Status refused = client->push("f32", all, rows, kDim).status();
  expect_error(refused, Code::kFailedPrecondition,
               {servers_[1]->address() + ", " + servers_[2]->address() + " are replicas"});
  expect_error(client->erase("f32", keys_of(0b10000000)).status(), Code::kFailedPrecondition,
               {"are replicas"});
  for (const auto& server : servers_) EXPECT_EQ(server->server().stats().pushes, 0u);
  const std::vector<uint64_t> owned = keys_of(0b00001111);
  const auto pushed = client->push("f32", owned, std::span(rows).first(owned.size() * kDim), kDim);
  ASSERT_TRUE(pushed.ok()) << pushed.status().to_string();
  EXPECT_EQ(pushed.value().updated, owned.size());
}

TEST_F(ShardsPushTest, APushIsRefusedIfServersStoreTheTableWithDifferentDtypes) {
  add_server(0b00001111).add_table("mixed", Dtype::kF16, kDim, 4 * kKeys, 0);
  add_server(0b11110000).add_table("mixed", Dtype::kBf16, kDim, 4 * kKeys, 0);
  publish();
  const auto client = connect();
  const std::vector<uint64_t> keys = keys_of(0xFF);
  const std::vector<float> rows(keys.size() * kDim, 1.0f);
  const base::Status status = client->push("mixed", keys, rows, kDim).status();
  expect_error(status, Code::kFailedPrecondition, {" f16 of dim 8", " bf16 of dim 8"});
  uint64_t stored = 0;
  for (const auto& server : servers_)
    stored += server->tables().find("ranking@1", "mixed")->status().rows;
  EXPECT_LE(stored, std::max(keys_of(0b00001111).size(), keys_of(0b11110000).size()));
}

TEST_F(ShardsPushTest, AWrongPushIsRefusedBeforeAnythingIsSent) {
  add_server(0b00001111);
  add_server(0b11110000);
  publish();
  const auto client = connect();
  const std::vector<uint64_t> keys = keys_of(0xFF);
  std::vector<float> rows(keys.size() * kDim, 1.0f);
  rows.back() = std::numeric_limits<float>::quiet_NaN();
  expect_error(client->push("f32", keys, rows, kDim).status(), Code::kInvalidArgument,
               {"row " + std::to_string(keys.size() - 1) + " (key " + std::to_string(keys.back())});
  expect_error(client->push("f32", keys, std::span(rows).first(rows.size() - 1), kDim).status(),
               Code::kInvalidArgument, {"values, not"});
  expect_error(client->push("f32", keys, rows, kDim - 1).status(), Code::kInvalidArgument,
               {"rows have dim 7, the table has 8"});
  const auto bytes = std::as_bytes(std::span(rows));
  expect_error(client->push_stored("f32", keys, bytes.first(bytes.size() - 1)).status(),
               Code::kInvalidArgument, {"bytes as stored, not"});
  for (const auto& server : servers_) EXPECT_EQ(server->server().stats().pushes, 0u);
}

TEST_F(ShardsPushTest, IfAShardIsFullTheOthersStoreTheirRows) {
  start_with_a_small_one();
  const auto client = connect();
  const std::vector<uint64_t> keys = keys_of(0xFF);
  const PushReport report = push_too_much(*client, keys);
  std::vector<float> out(keys.size() * kDim);
  EXPECT_EQ(client->pull("tight", keys, out).value().found, report.inserted);
  EXPECT_GE(report.inserted, keys_of(0b11110000).size());
}

// One server's table is full, and the other one refuses the push by a newer map, which the first
// one gets later. The rows of the second one are sent again.
TEST_F(ShardsPushTest, AFullShardLosesNoRowsOfOneThatHasANewerMap) {
  start_with_a_small_one();
  const auto client = connect();
  std::vector<float> out(kKeys * kDim);
  ASSERT_TRUE(client->pull("tight", testing::first_keys(kKeys), out).ok());
  split_between_two(0b00011111);
  servers_[1]->set_shard_map(map());
  std::thread later([&] {
    while (wrong_shards() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    servers_[0]->set_shard_map(map());
  });
  const std::vector<uint64_t> keys = keys_of(0xFF);
  const PushReport report = push_too_much(*client, keys);
  later.join();
  EXPECT_GE(report.inserted, keys_of(0b11100000).size());
}

TEST_F(ShardsPushTest, PushesContinueWhileTheMapChanges) {
  add_server(0b00001111);
  add_server(0b11110000);
  publish();
  const auto client = connect();
  const std::vector<uint64_t> keys = keys_of(0xFF);
  std::atomic<bool> done{false};
  std::thread mover([&] {
    while (!done.load()) {
      split_between_two(version_ % 2 == 0 ? 0b00111100 : 0b00001111);
      for (const auto& server : servers_) {
        server->set_shard_map(map());
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    }
  });
  for (uint64_t version = 1; version <= 60 || (wrong_shards() == 0 && version <= 2000); ++version) {
    const auto pushed = client->push("f32", keys, rows_of(keys, kDim, version), kDim);
    EXPECT_TRUE(pushed.ok()) << pushed.status().to_string();
    EXPECT_EQ(pushed.ok() ? pushed.value().inserted + pushed.value().updated : 0, keys.size());
  }
  done = true;
  mover.join();
  EXPECT_GT(wrong_shards(), 0u);
}

}  // namespace
}  // namespace petps::client
