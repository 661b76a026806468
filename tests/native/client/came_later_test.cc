// A partition comes to a server that has switched its model's name to a newer instance. The server
// loads it into the newer one only, so it must not answer for the older one any more.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "drip.h"
#include "fleet.h"

namespace petps::client {
namespace {

using base::Code;
using base::Status;
using testing::expect_error;
using testing::has_row;
using testing::kDim;
using testing::keys_of;
using testing::kKeys;
using testing::kPartitions;
using testing::quiet;
using testing::RealServer;
using testing::row_of;

constexpr uint64_t kOld = 5;
constexpr uint64_t kNew = 6;

class CameLaterTest : public testing::Fleet {
 protected:
  // Start a server for each set of partitions. The model's name refers to the old instance.
  void start_all(std::initializer_list<uint64_t> sets) {
    for (const uint64_t owned : sets) add(owned);
    publish();
    for (const auto& server : servers_)
      ASSERT_TRUE(server->tables().switch_alias("ranking", server->instance()).ok());
  }
  void add(uint64_t owned, const server::ServerOptions& options = {}) {
    RealServer& server = add_server(owned, 0, options);
    table::Tables& tables = server.tables();
    RealServer::fill(add_table(server, server.instance()), keys_of(owned), kOld);
    record(server, server.instance(), owned, kOld);
    const auto next = tables.pool().create_instance("ranking", "ranking@2", kPartitions);
    ASSERT_TRUE(next.ok());
    add_table(server, next.value().id);
    load(servers_.size() - 1, owned);
  }
  static table::Table& add_table(RealServer& server, uint32_t instance) {
    return server.add_table("fed", codec::Dtype::kF32, kDim, 4 * kKeys, 0, {}, pool::Feed::kDelta,
                            instance);
  }
  static void record(RealServer& server, uint32_t instance, uint64_t partitions, uint64_t version) {
    for (uint32_t p = 0; p < kPartitions; ++p) {
      if (((partitions >> p) & 1) == 0) continue;
      pool::Progress progress;
      progress.instance = instance;
      progress.partition = p;
      progress.run = progress.seq = progress.version = version;
      ASSERT_TRUE(server.tables().record_progress(progress).ok());
    }
  }
  // Load partitions into the new instance of a server.
  void load(size_t server, uint64_t partitions) {
    table::Tables& tables = servers_[server]->tables();
    RealServer::fill(*tables.find("ranking@2", "fed"), keys_of(partitions), kNew);
    record(*servers_[server], tables.resolve("ranking@2").value().id, partitions, kNew);
  }
  void switch_to_new(size_t server) {
    table::Tables& tables = servers_[server]->tables();
    ASSERT_TRUE(tables.switch_alias("ranking", tables.resolve("ranking@2").value().id).ok());
  }
  // Partition 4 comes from server 1 to server 0, which has switched.
  void move_partition() {
    load(0, 0b00010000);
    owned_[0] |= 0b00010000;
    owned_[1] &= ~uint64_t{0b00010000};
    publish();
  }
  // Pull all keys of these partitions. Set `version` to the one that all rows have.
  static Status pull_all(Client& client, uint64_t& version, uint64_t partitions = 0xFF,
                         const PullOptions& options = {}) {
    const std::vector<uint64_t> keys = keys_of(partitions);
    std::vector<float> rows(keys.size() * kDim);
    const auto report = client.pull("fed", keys, rows, {}, options);
    if (!report.ok()) return report.status();
    EXPECT_EQ(report.value().found, keys.size()) << report.value().instance;
    version = has_row(rows, 0, row_of(keys[0], kDim, kOld)) ? kOld : kNew;
    for (size_t i = 0; i < keys.size(); ++i)
      EXPECT_TRUE(has_row(rows, i, row_of(keys[i], kDim, version))) << keys[i];
    return {};
  }
  uint64_t refusals() { return servers_[0]->server().stats().errors_of(Code::kNotFound); }
};

// An owner has switched since the client read its names. The only one that the client knows to have
// the instance is silent then, and must not get all of the time.
TEST_F(CameLaterTest, AnOwnerWhoseSwitchIsNotKnownIsAskedWhileThereIsTime) {
  testing::Drip drip;
  server::ServerOptions behind_drip;
  behind_drip.address = drip.address();
  add(0xFF, behind_drip);
  add(0xFF);
  drip.lead_to(servers_[0]->address());
  for (const auto& server : servers_) {
    server->set_shard_map(
        {"ranking", 1, kPartitions, {{drip.address(), {0xFF}}, {servers_[1]->address(), {0xFF}}}});
    ASSERT_TRUE(server->tables().switch_alias("ranking", server->instance()).ok());
  }
  Options options = quiet();
  options.deadline_ms = 8000;
  const auto client = testing::connect_to(servers_[1]->url(), options);
  uint64_t version = 0;
  ASSERT_TRUE(pull_all(*client, version).ok());
  ASSERT_EQ(version, kOld);
  switch_to_new(0);
  const PullOptions newest{.min_version = kNew};
  ASSERT_TRUE(pull_all(*client, version, 0xFF, newest).ok());
  ASSERT_EQ(version, kNew);
  switch_to_new(1);
  drip.hold(true);
  const Status status = pull_all(*client, version, 0xFF, newest);
  EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(version, kNew);
}

// The client's names of the server are from before.
TEST_F(CameLaterTest, PullsGoToServersThatHadThePartitionBefore) {
  start_all({0b00001111, 0b11111111, 0b11110000});  // server 0 can be done without
  switch_to_new(0);
  const auto client = connect();
  uint64_t version = 0;
  ASSERT_TRUE(pull_all(*client, version).ok());
  ASSERT_EQ(version, kOld);
  move_partition();
  for (int round = 0; round < 30; ++round) {
    const PullOptions options{.min_version = round % 2 == 0 ? 0 : kOld};
    const Status status = pull_all(*client, version, 0xFF, options);
    ASSERT_TRUE(status.ok()) << status.to_string();
    ASSERT_EQ(version, kOld);
  }
  EXPECT_GE(refusals(), 1u);
  const PullOptions by_name{.instance = "ranking@1"};
  for (int round = 0; round < 10; ++round) {
    ASSERT_TRUE(pull_all(*client, version, 0xFF, by_name).ok());
    ASSERT_EQ(version, kOld);
  }
  for (const size_t server : {1, 2}) switch_to_new(server);
  const auto fresh = connect();
  ASSERT_TRUE(pull_all(*fresh, version).ok());
  EXPECT_EQ(version, kNew);
}

// No other server has the partition, and the others have not switched. There is no right answer for
// its keys, and one for all others.
TEST_F(CameLaterTest, NoKeyIsMissingWhereNoServerHasTheOldRows) {
  start_all({0b00001111, 0b11110000});
  switch_to_new(0);
  const auto client = connect();
  uint64_t version = 0;
  ASSERT_TRUE(pull_all(*client, version).ok());
  ASSERT_EQ(version, kOld);
  move_partition();
  for (const uint64_t partitions : {0xFF, 0b00010000, 0b00010001}) {
    expect_error(pull_all(*client, version, partitions), Code::kNotFound,
                 {"partition 4 of this instance is not at", "referred to a newer instance"});
  }
  ASSERT_TRUE(pull_all(*client, version, 0b11101111).ok());
  EXPECT_EQ(version, kOld);
  switch_to_new(1);
  const Status status = pull_all(*client, version);
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(version, kNew);
}

// Server 0 lacks partition 4, and alone has partition 0: it is asked again, for one group.
TEST_F(CameLaterTest, AServerThatLacksAPartitionAnswersForItsOthers) {
  start_all({0b00001111, 0b11111110, 0b11110000});
  switch_to_new(0);
  const auto client = connect();
  uint64_t version = 0;
  ASSERT_TRUE(pull_all(*client, version).ok());
  move_partition();
  for (int round = 0; round < 30; ++round) {
    const Status status = pull_all(*client, version);
    ASSERT_TRUE(status.ok()) << status.to_string();
    ASSERT_EQ(version, kOld);
  }
  EXPECT_GE(refusals(), 1u);
  // Also where it was asked for partition 4 only, and the other owner of its others is dead.
  servers_[1]->stop();
  for (int round = 0; round < 10; ++round) {
    const Status status = pull_all(*client, version, 0b00011111);
    ASSERT_TRUE(status.ok()) << status.to_string();
    ASSERT_EQ(version, kOld);
  }
}

// The other owner of partition 4 restarts during the call.
TEST_F(CameLaterTest, TheOwnerThatHasTheRowsIsWaitedFor) {
  start_all({0b00001111, 0b11111111, 0b11110000});
  switch_to_new(0);
  const auto client = connect();
  uint64_t version = 0;
  ASSERT_TRUE(pull_all(*client, version).ok());
  move_partition();
  servers_[2]->stop();
  std::thread restart([&] {
    while (refusals() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    servers_[2]->start();
  });
  const Status status = pull_all(*client, version);
  restart.join();
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(version, kOld);
}

// Both servers own all partitions, so there is one group. Server 0 lacks partition 4.
TEST_F(CameLaterTest, TheOnlyOtherReplicaIsWaitedFor) {
  start_all({0b11101111, 0b11111111});
  switch_to_new(0);
  const auto client = connect();
  uint64_t version = 0;
  ASSERT_TRUE(pull_all(*client, version).ok());
  ASSERT_EQ(version, kOld);
  load(0, 0b00010000);
  owned_[0] = 0xFF;
  publish();
  ASSERT_TRUE(pull_all(*client, version).ok());  // reads the map
  const uint64_t before = refusals();
  servers_[1]->stop();
  std::atomic<bool> is_done{false};
  std::thread restart([&] {
    while (refusals() == before && !is_done)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    servers_[1]->start();
  });
  const Status status = pull_all(*client, version);  // the new one if server 1 counts as gone
  is_done = true;
  restart.join();
  ASSERT_TRUE(status.ok()) << status.to_string();
}

TEST_F(CameLaterTest, KeysAreUnavailableIfTheOwnerThatHasTheRowsIsDead) {
  start_all({0b00001111, 0b11111111, 0b11110000});
  switch_to_new(0);
  Options options = quiet();
  options.on_unavailable = OnUnavailable::kDefault;
  const auto client = connect(options);
  uint64_t version = 0;
  ASSERT_TRUE(pull_all(*client, version).ok());
  move_partition();
  servers_[2]->stop();
  const std::vector<uint64_t> keys = keys_of(0xFF);
  std::vector<float> rows(keys.size() * kDim);
  for (int round = 0; round < 10; ++round) {
    const auto report = client->pull("fed", keys, rows);
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    EXPECT_EQ(report.value().unavailable, keys_of(0b00010000).size());
    EXPECT_EQ(report.value().found, keys_of(0b11101111).size());
  }
}

}  // namespace
}  // namespace petps::client
