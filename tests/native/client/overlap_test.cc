// Servers that share some partitions and not others: which servers are asked, and what happens
// when one fails, lags or is slow.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>
#include <random>
#include <thread>

#include "base/clock.h"
#include "fleet.h"

namespace petps::client {
namespace {

using base::Code;
using base::Status;
using testing::Answer;
using testing::connect_to;
using testing::expect_error;
using testing::FakeServer;
using testing::has_row;
using testing::kDefaultRow;
using testing::kDim;
using testing::keys_of;
using testing::kKeys;
using testing::kPartitions;
using testing::quiet;
using testing::RealServer;
using testing::row_of;
using wire::Opcode;

class OverlapTest : public testing::Fleet {
 protected:
  // Each partition has two owners, and no two servers the same partitions.
  void start_four() {
    for (const uint64_t owned : {0b00001111, 0b00111100, 0b11110000, 0b11000011}) add_server(owned);
    publish();
  }
  // Pull these keys, and check every row.
  static Status check_pull(Client& client, const std::vector<uint64_t>& keys) {
    std::vector<float> rows(keys.size() * kDim, -1);
    std::vector<uint8_t> mask(keys.size(), 7);
    const auto report = client.pull("f32", keys, rows, mask);
    if (!report.ok()) return report.status();
    for (size_t i = 0; i < keys.size(); ++i) {
      const bool is_present = keys[i] < kKeys;
      EXPECT_EQ(mask[i], is_present ? 1 : 0) << keys[i];
      EXPECT_TRUE(has_row(rows, i, is_present ? row_of(keys[i], kDim) : kDefaultRow)) << keys[i];
    }
    return {};
  }
  uint64_t pulls() {
    uint64_t count = 0;
    for (const auto& server : servers_) count += server->server().stats().pulls;
    return count;
  }
  // Return how often the first servers have failed for the client; nothing if one counts as dead.
  static std::optional<uint64_t> failures_of(const Client& client, size_t servers) {
    uint64_t failures = 0;
    const auto counts = client.server_counts();  // in the order of the map
    for (size_t i = 0; i < servers; ++i) {
      if (!counts.at(i).is_live) return std::nullopt;
      failures += counts[i].failures;
    }
    return failures;
  }
};

TEST_F(OverlapTest, AllKeysThatOneServerCanAnswerTravelInOneRequest) {
  start_four();
  const auto client = connect();
  ASSERT_TRUE(check_pull(*client, keys_of(0xFF)).ok());
  std::vector<uint64_t> keys = keys_of(0b00001111);
  keys.resize(400);
  for (int round = 0; round < 20; ++round) {
    const uint64_t before = pulls();
    ASSERT_TRUE(check_pull(*client, keys).ok());
    EXPECT_LE(pulls() - before, 2u);  // the first server has all of them, and two others half each
  }
  keys = keys_of(0xFF);
  const uint64_t before = pulls();
  ASSERT_TRUE(check_pull(*client, keys).ok());
  EXPECT_LE(pulls() - before, 4u + 4u);  // 2,000 keys: no server has many more than 500
  EXPECT_EQ(wrong_shards(), 0u);
}

// Random maps, and servers that stop and start. A pull succeeds whenever each key has an owner that
// runs, and sends few requests.
TEST_F(OverlapTest, EveryKeyIsAnsweredWhileAnOwnerRuns) {
  std::mt19937_64 random(testing::seed());
  constexpr size_t kServers = 5;
  for (size_t i = 0; i < kServers; ++i) add_server(0xFF);
  Options options = quiet();
  options.keys_per_request = 10'000;
  publish();
  const auto client = connect(options);
  for (int round = 0; round < 12; ++round) {
    for (uint64_t& owned : owned_) owned = 1 + random() % 0xFF;
    for (uint32_t p = 0; p < kPartitions; ++p) {  // at least two owners
      owned_[random() % kServers] |= uint64_t{1} << p;
      owned_[random() % kServers] |= uint64_t{1} << p;
    }
    publish();
    const size_t stopped = random() % kServers;
    servers_[stopped]->stop();
    uint64_t covered = 0;
    for (size_t i = 0; i < kServers; ++i) covered |= i == stopped ? 0 : owned_[i];
    for (int pull = 0; pull < 12; ++pull) {
      std::vector<uint64_t> keys = keys_of(covered & (pull % 2 == 0 ? 0xFF : random()));
      std::shuffle(keys.begin(), keys.end(), random);
      keys.resize(random() % (keys.size() + 1));
      const Status status = check_pull(*client, keys);
      ASSERT_TRUE(status.ok()) << status.to_string();
    }
    servers_[stopped]->start();
  }
}

TEST_F(OverlapTest, TheKeysOfAServerThatDiesAreSplitAmongTheOtherOwners) {
  start_four();
  const auto client = connect();
  ASSERT_TRUE(check_pull(*client, keys_of(0xFF)).ok());
  servers_[2]->stop();
  for (int round = 0; round < 20; ++round) ASSERT_TRUE(check_pull(*client, keys_of(0xFF)).ok());
}

TEST_F(OverlapTest, StaleKeysGoToAnotherOwner) {
  start_four();
  for (size_t i = 0; i < servers_.size(); ++i) record(*servers_[i], owned_[i], i == 1 ? 3 : 5);
  const auto client = connect();
  PullOptions options{.min_version = 5};
  for (int round = 0; round < 20; ++round) {
    const auto report = pull(*client, keys_of(0xFF), options);
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    EXPECT_EQ(report.value().applied_version, 5u);
  }
  const uint64_t before = servers_[1]->server().stats().errors_of(Code::kStale);
  std::vector<uint64_t> few = keys_of(0xFF);
  few.resize(400);  // so that a server gets one request
  for (int round = 0; round < 20; ++round) ASSERT_TRUE(pull(*client, few, options).ok());
  EXPECT_LE(servers_[1]->server().stats().errors_of(Code::kStale), before + 20) << "once in a pull";
  options.min_version = 6;
  expect_error(pull(*client, keys_of(0xFF), options).status(), Code::kStale,
               {"version 6 was requested"});
}

// The dead owner comes first in the map. The call waits for the other one, which lags.
TEST_F(OverlapTest, APullWaitsForAnOwnerThatLagsWhileAnotherIsDead) {
  start_four();
  for (size_t i = 0; i < servers_.size(); ++i) record(*servers_[i], owned_[i], i == 2 ? 3 : 5);
  const auto client = connect();
  ASSERT_TRUE(pull(*client, keys_of(0xFF)).ok());
  servers_[1]->stop();
  std::atomic<bool> is_over{false};
  std::thread later([&] {
    while (servers_[2]->server().stats().waits_for_version == 0 && !is_over)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    record(*servers_[2], owned_[2], 5);
  });
  const PullOptions options{.min_version = 5, .wait_ms = 20'000};
  const auto report = pull(*client, keys_of(0b00110000), options);
  is_over = true;
  later.join();
  EXPECT_TRUE(report.ok()) << report.status().to_string();
}

TEST_F(OverlapTest, APushNeedsOneOwnerOfEachKey) {
  add_server(0b00001111);
  add_server(0b11111000);
  publish();
  const auto client = connect();
  const std::vector<uint64_t> alone = keys_of(0b11110111);
  const std::vector<uint64_t> shared = keys_of(0b00001000);
  const auto push = [&](std::vector<uint64_t> keys) {
    return client->push("f32", keys, std::vector<float>(keys.size() * kDim, 2), kDim).status();
  };
  EXPECT_TRUE(push(alone).ok());
  expect_error(push(shared), Code::kFailedPrecondition,
               {servers_[0]->address(), servers_[1]->address(), "are replicas"});
  expect_error(push({alone[0], shared[0]}), Code::kFailedPrecondition, {"are replicas"});
}

TEST_F(OverlapTest, ServersOfTheClientsZoneArePreferredWhileTheyLive) {
  add_server(0b00001111);
  add_server(0b11111111);
  add_server(0b11110000);
  ++version_;
  wire::ShardMap zoned = map();
  zoned.servers[0].zone = zoned.servers[2].zone = "a";
  zoned.servers[1].zone = "b";
  for (const auto& server : servers_) server->set_shard_map(zoned);
  Options options = quiet();
  options.zone = "a";
  std::unique_ptr<Client> client;
  uint64_t before_far = 0;
  do {  // a stall of the machine is a failure of a near server, and then the far one is asked
    before_far = servers_[1]->server().stats().pulls;
    client = connect(options);
    for (int round = 0; round < 10; ++round) ASSERT_TRUE(check_pull(*client, keys_of(0xFF)).ok());
  } while (failures_of(*client, 3) != 0u);
  EXPECT_EQ(servers_[1]->server().stats().pulls, before_far);
  servers_[0]->stop();
  const uint64_t before = servers_[2]->server().stats().pulls;
  for (int round = 0; round < 10; ++round) ASSERT_TRUE(check_pull(*client, keys_of(0xFF)).ok());
  EXPECT_GT(servers_[1]->server().stats().pulls, before_far);
  EXPECT_GT(servers_[2]->server().stats().pulls, before);
}

TEST_F(OverlapTest, OneDeadOwnerOfTwoMakesNoKeyUnavailable) {
  add_server(0b00001111);
  add_server(0b00111111);
  add_server(0b11110000);
  publish();
  Options options = quiet();
  options.on_unavailable = OnUnavailable::kDefault;
  const auto client = connect(options);
  ASSERT_TRUE(pull(*client, keys_of(0xFF), {.on_unavailable = OnUnavailable::kError}).ok());
  servers_[2]->stop();
  for (int round = 0; round < 20;) {
    const auto before = failures_of(*client, 2);
    const auto report = pull(*client, keys_of(0xFF));
    // A pull that may leave out keys waits 550 ms for a server, and the machine may stall longer.
    if (!before.has_value() || failures_of(*client, 2) != before) continue;
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    EXPECT_EQ(report.value().unavailable, keys_of(0b11000000).size());
    ++round;
  }
}

// Maps change while pulls run. No pull fails, and none has a wrong row.
TEST_F(OverlapTest, MapsChangeUnderPulls) {
  for (int i = 0; i < 3; ++i) add_server(0xFF);
  publish();
  std::atomic<bool> is_over{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      const auto client = connect();
      while (!is_over) {
        const Status status = check_pull(*client, keys_of(0xFF));
        EXPECT_TRUE(status.ok()) << status.to_string();
      }
    });
  }
  std::mt19937_64 random(testing::seed());
  for (int change = 0; change < 40; ++change) {
    for (uint64_t& owned : owned_) owned = 1 + random() % 0xFF;
    owned_[random() % 3] |= 0xFF & ~(owned_[0] | owned_[1] | owned_[2]);
    publish();
    std::this_thread::yield();
  }
  is_over = true;
  for (std::thread& thread : threads) thread.join();
}

// ---- Hedges

class HedgeTest : public ::testing::Test {
 protected:
  static constexpr size_t kHedgedKeys = 100;
  static constexpr uint32_t kAnHourMs = 3'600'000;  // the runner ends a test earlier
  inline static const std::vector<float> kNoRow = std::vector<float>(FakeServer::kDim);

  // The first server answers pulls, and what `holds` names, once `is_slow` is false. The second one
  // answers pulls once `is_fast_slow` is false, but refuses `refusals` of them.
  HedgeTest()
      : slow_([this](Opcode opcode, uint64_t, wire::Frame&) {
          if (opcode == Opcode::kPull && is_slow_) refusals_ += hedge_refusals_.exchange(0);
          if (opcode == Opcode::kPull || opcode == holds_) is_slow_.wait(true);
          return Answer::kSend;
        }),
        fast_([this](Opcode opcode, uint64_t, wire::Frame& reply) {
          if (opcode == Opcode::kPull) is_fast_slow_.wait(true);
          if (opcode == Opcode::kPull && refusals_ > 0) {
            --refusals_;
            testing::replace_by_error(reply, Code::kUnavailable, "it stops");
          }
          return Answer::kSend;
        }) {}
  ~HedgeTest() override { set_slow(false); }
  std::unique_ptr<Client> connect(const Options& options = quiet()) {
    return connect_to("petps://" + slow_.address() + "," + fast_.address() + "/ranking", options);
  }
  static Status pull(Client& client, const PullOptions& options = {}) {
    std::vector<float> rows(kHedgedKeys * FakeServer::kDim, -1);
    std::vector<uint8_t> mask(kHedgedKeys, 7);
    const auto report = client.pull("users", testing::first_keys(kHedgedKeys), rows, mask, options);
    if (!report.ok()) return report.status();
    for (size_t i = 0; i < kHedgedKeys; ++i) {
      EXPECT_EQ(mask[i], 1 - i % 2) << i;
      EXPECT_TRUE(has_row(rows, i, i % 2 == 0 ? row_of(i, FakeServer::kDim) : kNoRow)) << i;
    }
    return {};
  }
  void set_slow(bool is_slow) {
    is_slow_ = is_slow;
    is_slow_.notify_all();
  }

  std::atomic<bool> is_slow_{false};
  std::atomic<Opcode> holds_{Opcode::kPull};
  std::atomic<int> refusals_{0};
  std::atomic<int> hedge_refusals_{0};  // refusals from the next pull on that the first one holds
  std::atomic<bool> is_fast_slow_{false};
  FakeServer slow_;
  FakeServer fast_;
};

TEST_F(HedgeTest, ASlowServersKeysAreAnsweredByAnother) {
  const auto client = connect();
  for (int round = 0; round < 300; ++round) ASSERT_TRUE(pull(*client).ok());
  // On a busy machine hedges have won before, and late requests may still arrive.
  const PullCounts before = client->pull_counts();
  set_slow(true);
  while (client->pull_counts().hedges_won == before.hedges_won) ASSERT_TRUE(pull(*client).ok());
  EXPECT_GT(client->pull_counts().hedges, before.hedges);
  set_slow(false);  // late replies go to connections that are closed
  for (int round = 0; round < 100; ++round) ASSERT_TRUE(pull(*client).ok());
}

TEST_F(HedgeTest, PullsOfAVersionAreHedgedToo) {
  const auto client = connect();
  const PullOptions options{.min_version = FakeServer::kVersion};
  for (int round = 0; round < 300; ++round) ASSERT_TRUE(pull(*client, options).ok());
  const uint64_t won = client->pull_counts().hedges_won;
  set_slow(true);
  while (client->pull_counts().hedges_won == won) ASSERT_TRUE(pull(*client, options).ok());
}

// A hedge leaves no connection, and the next pull would wait for a greeting, or for the names after
// it, until its deadline.
class GreetingTest : public HedgeTest, public ::testing::WithParamInterface<Opcode> {};

TEST_P(GreetingTest, OfAServerThatWasTooSlowHoldsNoPullBack) {
  Options options = quiet();
  options.deadline_ms = kAnHourMs;
  const auto client = connect(options);
  for (int round = 0; round < 300; ++round) ASSERT_TRUE(pull(*client).ok());
  holds_ = GetParam();
  const uint64_t before = slow_.count(GetParam());
  set_slow(true);
  while (slow_.count(GetParam()) == before) ASSERT_TRUE(pull(*client).ok());
  for (int round = 0; round < 300; ++round) ASSERT_TRUE(pull(*client).ok());
}

// The client has never heard of the first server.
TEST_P(GreetingTest, OfAServerThatIsNewHoldsNoPullBack) {
  holds_ = GetParam();
  set_slow(true);
  Options options = quiet();
  options.deadline_ms = kAnHourMs;
  const auto client =
      connect_to("petps://" + fast_.address() + "," + slow_.address() + "/ranking", options);
  for (int round = 0; round < 100; ++round) ASSERT_TRUE(pull(*client).ok());
}

INSTANTIATE_TEST_SUITE_P(Each, GreetingTest, ::testing::Values(Opcode::kHello, Opcode::kTables));

// Both servers are silent for longer than a new connection may take, and have no connection left.
TEST_F(HedgeTest, APullWaitsUntilItsDeadlineForAConnection) {
  Options options = quiet();
  options.connections = 1;
  options.hedge = false;
  options.deadline_ms = 60'000;
  const auto client = connect(options);
  for (int round = 0; round < 50; ++round) ASSERT_TRUE(pull(*client).ok());
  set_slow(true);
  is_fast_slow_ = true;
  std::array<Status, 4> results;
  std::vector<std::thread> threads;
  for (Status& result : results) threads.emplace_back([&] { result = pull(*client); });
  std::this_thread::sleep_for(std::chrono::milliseconds(1'300));  // twice the limit for opening
  is_fast_slow_ = false;
  is_fast_slow_.notify_all();
  set_slow(false);
  for (std::thread& thread : threads) thread.join();
  for (const Status& result : results) EXPECT_TRUE(result.ok()) << result.to_string();
}

// A hedge that arrives before the first server holds the pull is not refused: then pull again.
TEST_F(HedgeTest, AnotherHedgeFollowsOneThatFails) {
  const auto client = connect();
  for (int round = 0; round < 300; ++round) ASSERT_TRUE(pull(*client).ok());
  set_slow(true);
  PullCounts before;
  PullCounts after = client->pull_counts();
  do {
    before = after;
    refusals_ = 0;
    hedge_refusals_ = 1;
    ASSERT_TRUE(pull(*client).ok());
    after = client->pull_counts();
  } while (after.hedges_won == before.hedges_won || after.hedges < before.hedges + 2);
}

TEST_F(HedgeTest, HedgesCanBeSwitchedOff) {
  Options options = quiet();
  options.hedge = false;
  const auto client = connect(options);
  for (int round = 0; round < 300; ++round) ASSERT_TRUE(pull(*client).ok());
  const uint64_t before = slow_.count(Opcode::kPull);
  set_slow(true);
  std::thread later([&] {
    while (slow_.count(Opcode::kPull) == before)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(
        std::chrono::milliseconds(20));  // in this time a hedge would be sent
    set_slow(false);
  });
  while (slow_.count(Opcode::kPull) == before) ASSERT_TRUE(pull(*client).ok());
  later.join();
  EXPECT_EQ(client->pull_counts().hedges, 0u);
}

// Servers of random maps, one of which is silent, closes its connections, or answers late. No pull
// fails or has a wrong row, and none sends many requests.
TEST(Overlap, NoPullFailsWhileEachKeyHasAServerThatAnswers) {
  constexpr size_t kServers = 4;
  std::mt19937_64 random(testing::seed());
  struct Flaky {
    std::atomic<int> mode{0};  // 0: well, 1: silent, 2: closes, 3: late
    FakeServer server{[this](Opcode opcode, uint64_t, wire::Frame&) {
      const int now = opcode == Opcode::kPull ? mode.load() : 0;
      if (now == 3) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      return now == 1 ? Answer::kSilent : now == 2 ? Answer::kClose : Answer::kSend;
    }};
  };
  std::array<Flaky, kServers> servers;
  wire::ShardMap map{"ranking", 1, kPartitions, {}};
  for (const Flaky& flaky : servers) map.servers.push_back({flaky.server.address(), {0}});
  for (uint32_t p = 0; p < kPartitions; ++p) {
    const size_t first = random() % kServers;
    const size_t second = (first + 1 + random() % (kServers - 1)) % kServers;
    for (const size_t owner : {first, second}) map.servers[owner].partitions[0] |= uint64_t{1} << p;
  }
  std::erase_if(map.servers, [](const auto& server) { return server.partitions[0] == 0; });
  for (Flaky& flaky : servers) flaky.server.set_shard_map(map);
  const auto client = connect_to(servers[0].server.url(), quiet());
  // Return the number of requests without hedges, which have their own limit (hedge_test.cc).
  const auto sent = [&] {
    uint64_t count = 0;
    for (const Flaky& flaky : servers) count += flaky.server.count(Opcode::kPull);
    return count - client->pull_counts().hedges;
  };
  const auto are_all_live = [&] {
    const auto counts = client->server_counts();
    return std::all_of(counts.begin(), counts.end(), [](const auto& of) { return of.is_live; });
  };
  const auto pull_any = [&] {
    std::vector<float> rows(kKeys * FakeServer::kDim);
    return client->pull("users", testing::first_keys(kKeys), rows).status();
  };
  for (int round = 0; round < 400; ++round) {
    if (round >= 100 && round % 20 == 0) {
      for (Flaky& flaky : servers) flaky.mode = 0;
      while (!are_all_live()) ASSERT_TRUE(pull_any().ok());  // a dead one is no owner that answers
      servers[random() % kServers].mode = static_cast<int>(random() % 4);
    }
    std::vector<uint64_t> keys(1 + random() % 300);
    for (uint64_t& key : keys) key = random() % 1000;
    std::vector<float> rows(keys.size() * FakeServer::kDim, -1);
    const uint64_t before = sent();
    const auto report = client->pull("users", keys, rows);
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    ASSERT_LE(sent(), before + 3 * kServers);
    for (size_t i = 0; i < keys.size(); ++i) {
      const std::vector<float> none(FakeServer::kDim);
      ASSERT_TRUE(has_row(rows, i, keys[i] % 2 == 0 ? row_of(keys[i], FakeServer::kDim) : none))
          << keys[i];
    }
  }
}

// Two owners of all keys. The second one becomes silent, so that the client counts it as dead.
class DeadOwner : public ::testing::Test {
 protected:
  explicit DeadOwner(FakeServer::Tamper first = nullptr) : first_(std::move(first)) {
    wire::ShardMap map{"ranking", 1, 1, {}};
    for (const FakeServer* server : {&first_, &second_})
      map.servers.push_back({server->address(), {1}});
    first_.set_shard_map(map);
    second_.set_shard_map(map);
  }
  void TearDown() override { client_.reset(); }  // it asks the servers until then
  // Connect without hedges, and pull until the second server counts as dead.
  void connect() {
    Options options = quiet();
    options.deadline_ms = 60'000;
    options.hedge = false;
    is_silent_ = false;
    client_ = connect_to(first_.url(), options);
    is_silent_ = true;
    while (!is_dead()) ASSERT_TRUE(pull().ok());
  }
  Status pull(const PullOptions& options = {}) {
    std::vector<float> rows(FakeServer::kDim);
    return client_->pull("users", testing::first_keys(1), rows, {}, options).status();
  }
  bool is_dead() const { return !client_->server_counts().at(1).is_live; }

  std::atomic<bool> is_silent_{false};  // the second server
  FakeServer first_;
  FakeServer second_{[this](Opcode, uint64_t, wire::Frame&) {
    return is_silent_ ? Answer::kSilent : Answer::kSend;
  }};
  std::unique_ptr<Client> client_;
};

// The dead one is back, and the first one is silent now. There is time for both.
class OwnerThatIsBack : public DeadOwner {
 protected:
  OwnerThatIsBack()
      : DeadOwner([this](Opcode, uint64_t, wire::Frame&) {
          return is_first_silent_ ? Answer::kSilent : Answer::kSend;
        }) {}
  std::atomic<bool> is_first_silent_{false};
};

// A call leaves half a second for the dead one, and the machine may stall for longer.
TEST_F(OwnerThatIsBack, IsReachedWhileTheOtherIsSilent) {
  Status status(Code::kUnavailable, "not called");
  for (int call = 0; call < 5 && !status.ok(); ++call) {
    is_first_silent_ = false;
    connect();
    is_silent_ = false;
    is_first_silent_ = true;
    status = pull({.deadline_ms = 4'000});
  }
  EXPECT_TRUE(status.ok()) << status.to_string();
}

// The first one lags for a moment, whether or not the backoff of the dead one is over.
class DeadOwnerOfALaggingOne : public DeadOwner {
 protected:
  DeadOwnerOfALaggingOne()
      : DeadOwner([this](Opcode opcode, uint64_t, wire::Frame& reply) {
          if (opcode == Opcode::kPull && base::monotonic_ns() < lags_until_ns_)
            testing::replace_by_error(reply, Code::kStale, "not yet");
          return Answer::kSend;
        }) {}
  std::atomic<uint64_t> lags_until_ns_{0};
};

TEST_F(DeadOwnerOfALaggingOne, LeavesTimeForIt) {
  connect();
  const PullOptions newer{.min_version = FakeServer::kVersion, .wait_ms = 1'500};
  for (int round = 0; round < 5; ++round) {
    lags_until_ns_ = base::monotonic_ns() + 200'000'000;
    const Status status = pull(newer);
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
}

// The first one needs more than half of the time.
class DeadOwnerOfASlowOne : public DeadOwner {
 protected:
  DeadOwnerOfASlowOne()
      : DeadOwner([this](Opcode opcode, uint64_t, wire::Frame&) {
          if (opcode == Opcode::kPull && is_slow_)
            std::this_thread::sleep_for(std::chrono::milliseconds(14'000));
          return Answer::kSend;
        }) {}
  std::atomic<bool> is_slow_{false};
};

TEST_F(DeadOwnerOfASlowOne, TakesLittleTimeFromIt) {
  connect();
  is_slow_ = true;
  const Status status = pull({.deadline_ms = 27'000});
  EXPECT_TRUE(status.ok()) << status.to_string();
}

// Two types of equal row bytes: the rows of one would be read as the other's.
TEST(Overlap, ServersWithAnotherTypeAreRefused) {
  FakeServer one;
  FakeServer other;
  wire::ShardMap map{"ranking", 1, 2, {}};
  map.servers = {{one.address(), {0b01}}, {other.address(), {0b10}}};
  for (FakeServer* server : {&one, &other}) {
    server->set_shard_map(map);
    server->tables().tables[0].row_bytes = 2 * FakeServer::kDim;
    server->tables().tables[0].default_row.assign(2 * FakeServer::kDim, std::byte{0});
    server->tables().tables[0].dtype = static_cast<uint8_t>(codec::Dtype::kF16);
  }
  other.tables().tables[0].dtype = static_cast<uint8_t>(codec::Dtype::kBf16);
  const auto client = connect_to(one.url(), quiet());
  std::vector<std::byte> rows(100 * 2 * FakeServer::kDim);
  std::vector<uint64_t> keys = testing::first_keys(100);
  const TablePull pull{"users", keys, rows, {}, Form::kStored};
  expect_error(client->pull_many({&pull, 1}).status(), Code::kFailedPrecondition,
               {"f16", "bf16", "same dtype"});
}

}  // namespace
}  // namespace petps::client
