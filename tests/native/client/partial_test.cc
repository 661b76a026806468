// Pulls that leave out the keys of shards that do not answer: OnUnavailable::kDefault.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <random>
#include <thread>

#include "base/clock.h"
#include "fleet.h"

namespace petps::client {
namespace {

using base::Code;
using base::Status;
using codec::Dtype;
using testing::Answer;
using testing::connect_to;
using testing::expect_error;
using testing::FakeServer;
using testing::kDefaultRow;
using testing::kDim;
using testing::keys_of;
using testing::kKeys;
using testing::kPartitions;
using testing::pulled_row;
using testing::quiet;
using testing::RealServer;
using testing::row_of;
using wire::Opcode;

constexpr uint64_t kLow = 0b00001111;
constexpr uint64_t kHigh = 0b11110000;

Options partial() {
  Options options = quiet();
  options.on_unavailable = OnUnavailable::kDefault;
  return options;
}

bool is_of(uint64_t partitions, uint64_t key) {
  return ((partitions >> wire::partition_of(key, kPartitions)) & 1) != 0;
}

// The result of a pull from one table, as float32.
struct Pulled {
  Pulled(Client& client, const std::string& table, std::vector<uint64_t> wanted, uint32_t dim,
         const PullOptions& options = {})
      : keys(std::move(wanted)),
        rows(keys.size() * dim, -1),
        mask(keys.size(), 7),
        unavailable(keys.size(), 7) {
    const TablePull pull{table, keys,           std::as_writable_bytes(std::span(rows)),
                         mask,  Form::kFloat32, unavailable};
    const auto result = client.pull_many({&pull, 1}, options);
    status = result.status();
    if (result.ok()) report = result.value();
  }
  size_t unavailable_count() const {
    return static_cast<size_t>(std::count(unavailable.begin(), unavailable.end(), 1));
  }
  std::vector<uint64_t> keys;
  std::vector<float> rows;
  std::vector<uint8_t> mask;
  std::vector<uint8_t> unavailable;
  Status status;
  PullReport report;
};

// Wait until `is_true`, or fail the test.
template <typename Condition>
void wait_until(const char* what, const Condition& is_true) {
  const uint64_t until = base::monotonic_ns() + 60'000'000'000;
  while (!is_true()) {
    ASSERT_LT(base::monotonic_ns(), until) << what;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Return how often these servers have failed for the client, or nothing if one counts as dead.
std::optional<uint64_t> count_failures(const Client& client,
                                       const std::vector<std::string>& servers) {
  uint64_t failures = 0;
  for (const ServerCounts& counts : client.server_counts()) {
    if (std::find(servers.begin(), servers.end(), counts.server) == servers.end()) continue;
    if (!counts.is_live) return std::nullopt;
    failures += counts.failures;
  }
  return failures;
}

// Call until none of the servers that run has failed during a call, and return what that call
// returned. A call that may leave out keys waits 550 ms for a server, and a busy machine may stall
// for longer.
template <typename Call>
auto call_undisturbed(const Client& client, const std::vector<std::string>& running,
                      const Call& call) {
  const uint64_t until = base::monotonic_ns() + 40'000'000'000;
  for (;;) {
    const auto before = count_failures(client, running);
    auto result = call();
    if (before.has_value() && count_failures(client, running) == before) return result;
    if (base::monotonic_ns() > until) {
      ADD_FAILURE() << "a server that runs failed in every call";
      return result;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Options for a first pull, which waits for all servers until its deadline.
PullOptions complete() {
  PullOptions options;
  options.deadline_ms = 20'000;
  options.on_unavailable = OnUnavailable::kError;
  return options;
}

// Expect that no server answered. A connection that is refused may also be late on a busy machine.
void expect_unreachable(const Status& status, std::string_view part = {}) {
  const bool is_late = status.code() == Code::kDeadlineExceeded;
  expect_error(status, is_late ? status.code() : Code::kUnavailable, {part});
}

class PartialTest : public testing::Fleet {
 protected:
  // Pull from servers of which these run, by number.
  Pulled pull_from(Client& client, const std::vector<size_t>& running, const std::string& table,
                   const std::vector<uint64_t>& keys, const PullOptions& options = {}) {
    return call_undisturbed(client, addresses_of(running),
                            [&] { return Pulled(client, table, keys, kDim, options); });
  }
  std::vector<std::string> addresses_of(const std::vector<size_t>& servers) const {
    std::vector<std::string> addresses;
    for (const size_t server : servers) addresses.push_back(servers_[server]->address());
    return addresses;
  }
  // Check each key of a pull: found, missing, or of `dead` partitions and so unavailable.
  static void check(const Pulled& pulled, Dtype dtype, uint64_t dead) {
    ASSERT_TRUE(pulled.status.ok()) << pulled.status.to_string();
    uint64_t found = 0;
    uint64_t unavailable = 0;
    for (size_t i = 0; i < pulled.keys.size(); ++i) {
      const uint64_t key = pulled.keys[i];
      const bool is_dead = is_of(dead, key);
      const bool is_found = !is_dead && key < kKeys;
      found += is_found ? 1 : 0;
      unavailable += is_dead ? 1 : 0;
      ASSERT_EQ(pulled.unavailable[i], is_dead ? 1 : 0) << key;
      ASSERT_EQ(pulled.mask[i], is_found ? 1 : 0) << key;
      std::vector<float> row = kDefaultRow;
      std::vector<std::byte> stored(codec::row_bytes(dtype, kDim));
      codec::encode(dtype, row.data(), 1, kDim, stored.data());
      codec::decode(dtype, stored.data(), 1, kDim, row.data());
      if (is_found) row = pulled_row(dtype, key, kDim);
      ASSERT_TRUE(testing::has_row(pulled.rows, i, row)) << key << " at " << i;
    }
    EXPECT_EQ(pulled.report.found, found);
    EXPECT_EQ(pulled.report.unavailable, unavailable);
  }
};

TEST_F(PartialTest, TheKeysOfADeadShardHaveTheDefaultRowAndAreMarked) {
  add_server(kLow);
  add_server(0b00110000);
  add_server(0b11000000);
  publish();
  std::mt19937_64 random(testing::seed());
  const auto client = connect(partial());
  ASSERT_NO_FATAL_FAILURE(
      check(pull_from(*client, {0, 1, 2}, "f32", keys_of(0xFF)), Dtype::kF32, 0));
  const PullCounts before = client->pull_counts();
  servers_[1]->stop();
  for (int round = 0; round < 60; ++round) {
    const auto dtype = static_cast<Dtype>(random() % 4);
    const uint64_t range = round % 3 == 0 ? 40 : kKeys + kKeys / 4;
    std::vector<uint64_t> keys(random() % 3000);
    for (uint64_t& key : keys) key = random() % range;
    PullOptions options;
    options.dedup = static_cast<Dedup>(random() % 3);
    const Pulled pulled =
        pull_from(*client, {0, 2}, std::string(codec::dtype_name(dtype)), keys, options);
    ASSERT_NO_FATAL_FAILURE(check(pulled, dtype, 0b00110000));
  }
  const PullCounts counts = client->pull_counts();
  EXPECT_GE(counts.pulls, before.pulls + 60);
  EXPECT_GT(counts.partial_pulls, before.partial_pulls + 50);
  EXPECT_GT(counts.unavailable_keys, before.unavailable_keys + 1000);
  // Keys of the dead shard alone are no error either, and name the instance.
  const Pulled alone = pull_from(*client, {0, 2}, "f32", keys_of(0b00110000));
  ASSERT_NO_FATAL_FAILURE(check(alone, Dtype::kF32, 0b00110000));
  EXPECT_EQ(alone.report.applied_version, 0u);
  EXPECT_EQ(alone.report.instance, "ranking@1");
  // The background thread finds that the server is back.
  servers_[1]->start();
  wait_until("the shard is back", [&] {
    const Pulled pulled(*client, "f32", keys_of(0xFF), kDim);
    return pulled.status.ok() && pulled.report.unavailable == 0;
  });
  const Pulled again = pull_from(*client, {0, 1, 2}, "f32", keys_of(0xFF));
  ASSERT_NO_FATAL_FAILURE(check(again, Dtype::kF32, 0));
}

TEST_F(PartialTest, StoredRowsAndSeveralTablesAreLeftOutToo) {
  add_server(kLow);
  add_server(kHigh);
  publish();
  const auto client = connect(partial());
  ASSERT_TRUE(pull(*client, keys_of(0xFF), complete()).ok());
  servers_[1]->stop();
  const std::vector<uint64_t> keys = keys_of(0xFF);
  const size_t row_bytes = codec::row_bytes(Dtype::kInt8, kDim);
  std::vector<std::byte> stored(keys.size() * row_bytes, std::byte{0xEE});
  std::vector<float> floats(keys.size() * kDim, -1);
  std::vector<uint8_t> first(keys.size(), 7);
  std::vector<uint8_t> second(keys.size(), 7);
  const std::vector<TablePull> pulls = {
      {"int8", keys, stored, {}, Form::kStored, first},
      {"f32", keys, std::as_writable_bytes(std::span(floats)), {}, Form::kFloat32, second}};
  const auto report =
      call_undisturbed(*client, addresses_of({0}), [&] { return client->pull_many(pulls); });
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  std::vector<std::byte> missing(row_bytes);
  codec::encode(Dtype::kInt8, kDefaultRow.data(), 1, kDim, missing.data());
  for (size_t i = 0; i < keys.size(); ++i) {
    ASSERT_EQ(first[i], is_of(kHigh, keys[i]) ? 1 : 0);
    ASSERT_EQ(second[i], first[i]);
    std::vector<std::byte> row = missing;
    if (first[i] == 0)
      codec::encode(Dtype::kInt8, row_of(keys[i], kDim).data(), 1, kDim, row.data());
    ASSERT_EQ(0, std::memcmp(row.data(), stored.data() + i * row_bytes, row_bytes)) << keys[i];
  }
  EXPECT_EQ(report.value().unavailable, 2 * keys_of(kHigh).size());
}

TEST_F(PartialTest, IsAnErrorIfNoServerAnswers) {
  add_server(kLow);
  add_server(kHigh);
  publish();
  const auto client = connect(partial());
  ASSERT_TRUE(pull(*client, keys_of(0xFF), complete()).ok());
  servers_[0]->stop();
  servers_[1]->stop();
  for (int i = 0; i < 3; ++i) {
    expect_unreachable(pull(*client, keys_of(0xFF)).status(), "no server of the model answers");
    expect_unreachable(pull(*client, keys_of(kLow)).status(), "no server of the model answers");
  }
  // Without a shard map all servers are replicas, so a pull has all keys or none.
  servers_[0]->set_shard_map({});
  servers_[0]->start();
  const auto single = connect_to(servers_[0]->url(), partial());
  servers_[0]->stop();
  expect_unreachable(pull(*single, keys_of(kLow)).status(), "no server of the model answers");
}

TEST_F(PartialTest, TheCallTheUrlAndTheOptionsDecide) {
  add_server(kLow);
  add_server(kHigh);
  publish();
  const auto by_url = connect_to(servers_[0]->url() + "?on_unavailable=default", quiet());
  const auto by_options = connect(partial());
  Options error = quiet();
  error.on_unavailable = OnUnavailable::kError;
  const auto overruled = connect_to(servers_[0]->url() + "?on_unavailable=default", error);
  const auto neither = connect();
  for (Client* client : {by_url.get(), by_options.get(), overruled.get(), neither.get()})
    ASSERT_TRUE(pull(*client, keys_of(0xFF), complete()).ok());
  servers_[1]->stop();
  const auto expect_partial = [&](Client& client, const PullOptions& options) {
    const Pulled pulled = pull_from(client, {0}, "f32", keys_of(0xFF), options);
    ASSERT_NO_FATAL_FAILURE(check(pulled, Dtype::kF32, kHigh));
  };
  // The call retries until its deadline, which may also pass while the other server stalls.
  const auto expect_failure = [&](Client& client, PullOptions options) {
    options.deadline_ms = 500;
    const Status status = pull(client, keys_of(0xFF), options).status();
    expect_unreachable(status);
    EXPECT_EQ(status.message().find("no server of the model"), std::string::npos)
        << status.to_string();
  };
  PullOptions options;
  ASSERT_NO_FATAL_FAILURE(expect_partial(*by_url, options));
  ASSERT_NO_FATAL_FAILURE(expect_partial(*by_options, options));
  expect_failure(*overruled, options);
  expect_failure(*neither, options);
  options.on_unavailable = OnUnavailable::kDefault;
  ASSERT_NO_FATAL_FAILURE(expect_partial(*neither, options));
  options.on_unavailable = OnUnavailable::kError;
  expect_failure(*by_url, options);
}

TEST_F(PartialTest, AMaskNeedsTheMaskOfUnavailableKeys) {
  add_server(0xFF);
  const auto client = connect_to(servers_[0]->url(), partial());
  std::vector<float> rows(kDim);
  std::vector<uint8_t> mask(1);
  const std::vector<uint64_t> keys = {1};
  expect_error(client->pull("f32", keys, rows, mask).status(), Code::kInvalidArgument,
               {"pull from 'f32'", "must come with a mask of the keys that are unavailable"});
  std::vector<uint8_t> longer(2);
  const TablePull wrong{"f32", keys,           std::as_writable_bytes(std::span(rows)),
                        mask,  Form::kFloat32, longer};
  expect_error(client->pull_many({&wrong, 1}).status(), Code::kInvalidArgument,
               {"unavailable keys has 2 bytes for 1 keys"});
  // Also without kDefault the mask is filled.
  Options plain = quiet();
  const auto other = connect_to(servers_[0]->url(), plain);
  EXPECT_EQ(Pulled(*other, "f32", {1, 2}, kDim).unavailable, (std::vector<uint8_t>{0, 0}));
}

TEST_F(PartialTest, AVersionHoldsForTheKeysThatHaveAnAnswer) {
  RealServer& low = add_server(kLow);
  RealServer& high = add_server(kHigh);
  publish();
  record(low, kLow, 9);
  record(high, kHigh, 4);
  const auto client = connect(partial());
  EXPECT_EQ(pull_from(*client, {0, 1}, "f32", keys_of(0xFF)).report.applied_version, 4u);
  PullOptions options;
  options.min_version = 9;
  // The server answers, so its keys are not unavailable.
  expect_error(pull_from(*client, {0, 1}, "f32", keys_of(0xFF), options).status, Code::kStale,
               {"version 9 was requested"});
  high.stop();
  const Pulled pulled = pull_from(*client, {0}, "f32", keys_of(0xFF), options);
  ASSERT_NO_FATAL_FAILURE(check(pulled, Dtype::kF32, kHigh));
  EXPECT_EQ(pulled.report.applied_version, 9u);
}

TEST_F(PartialTest, AnotherOwnerAnswersForTheKeysOfADeadServer) {
  add_server(kLow);
  add_server(kHigh, 0xFF);
  publish();
  const auto client = connect(partial());
  ASSERT_TRUE(pull(*client, keys_of(0xFF), complete()).ok());
  servers_[0]->stop();
  const Pulled pulled = pull_from(*client, {1}, "f32", keys_of(0xFF));
  ASSERT_NO_FATAL_FAILURE(check(pulled, Dtype::kF32, kLow));
  // The calls ask no dead server, so the background thread must find the new map.
  split_between_two(0);
  servers_[1]->set_shard_map(map());
  wait_until("the new map", [&] {
    const Pulled found(*client, "f32", keys_of(0xFF), kDim);
    return found.status.ok() && found.report.unavailable == 0;
  });
}

// ---- Servers that are silent, or answer with errors

// Two shards of table "users". The second one behaves as `behaviour` says.
enum class Behaviour { kAnswers, kIsSilent, kSendsError };

class FakeShards {
 public:
  FakeShards()
      : second_([this](Opcode opcode, uint64_t, wire::Frame& reply) {
          if (behaviour == Behaviour::kIsSilent) return Answer::kSilent;
          if (behaviour == Behaviour::kSendsError && opcode == Opcode::kPull)
            testing::replace_by_error(reply, error, "an error of the server");
          return Answer::kSend;
        }) {
    const wire::ShardMap map{
        "ranking", 1, kPartitions, {{first_.address(), {kLow}}, {second_.address(), {kHigh}}}};
    first_.set_shard_map(map);
    second_.set_shard_map(map);
  }
  std::string url() const { return first_.url(); }
  FakeServer& first() { return first_; }
  FakeServer& second() { return second_; }
  std::atomic<Behaviour> behaviour{Behaviour::kAnswers};
  std::atomic<Code> error{Code::kOk};

 private:
  FakeServer first_;
  FakeServer second_;
};

Pulled pull_users(Client& client, const PullOptions& options = {}) {
  return {client, "users", testing::first_keys(100), FakeServer::kDim, options};
}

// Pull until no server that runs has failed during a pull.
Pulled pull_undisturbed(Client& client, const std::vector<std::string>& running,
                        const PullOptions& options = {}) {
  return call_undisturbed(client, running, [&] { return pull_users(client, options); });
}

size_t high_keys() {
  const auto keys = testing::first_keys(100);
  return static_cast<size_t>(
      std::count_if(keys.begin(), keys.end(), [](uint64_t key) { return is_of(kHigh, key); }));
}

TEST(PartialPulls, ASilentServerIsAskedOnceAndThenOnlyProbed) {
  FakeShards shards;
  const auto client = connect_to(shards.url(), partial());
  ASSERT_TRUE(pull_users(*client, complete()).status.ok());
  shards.behaviour = Behaviour::kIsSilent;
  const std::vector<std::string> running = {shards.first().address()};
  const Pulled first = pull_undisturbed(*client, running);
  ASSERT_TRUE(first.status.ok()) << first.status.to_string();
  EXPECT_EQ(first.unavailable_count(), high_keys());
  // The server may count a request after the client has given up.
  const uint64_t asked = 2;
  wait_until("the one request", [&] { return shards.second().count(Opcode::kPull) == asked; });
  for (int i = 0; i < 50; ++i)
    EXPECT_EQ(pull_undisturbed(*client, running).unavailable_count(), high_keys());
  EXPECT_EQ(shards.second().count(Opcode::kPull), asked);
  const uint64_t probed = shards.second().count(Opcode::kHello);
  wait_until("a probe beside the pulls", [&] {
    (void)pull_users(*client);
    return shards.second().count(Opcode::kHello) > probed;
  });
  EXPECT_EQ(shards.second().count(Opcode::kPull), asked);
  shards.behaviour = Behaviour::kAnswers;
  wait_until("the server is back", [&] {
    const Pulled pulled = pull_users(*client);
    return pulled.status.ok() && pulled.report.unavailable == 0;
  });
}

TEST(PartialPulls, AShortDeadlineLeavesOutASilentServerAndAProbeFindsThatItIsDead) {
  FakeShards shards;
  const auto client = connect_to(shards.url(), partial());
  ASSERT_TRUE(pull_users(*client, complete()).status.ok());
  shards.behaviour = Behaviour::kIsSilent;
  // Not every pull of 20 ms is in time for the first server, on a busy machine.
  PullOptions options;
  options.deadline_ms = 20;
  const auto pull_shortly = [&] {
    const Pulled pulled = pull_users(*client, options);
    if (!pulled.status.ok()) return;
    EXPECT_GE(pulled.unavailable_count(), high_keys());
  };
  uint64_t asked = 0;
  wait_until("the pulls no longer ask the server", [&] {
    asked = shards.second().count(Opcode::kPull);
    for (int i = 0; i < 100; ++i) pull_shortly();
    return shards.second().count(Opcode::kPull) == asked;
  });
}

TEST(PartialPulls, OnlyAServerThatDoesNotAnswerIsUnavailable) {
  FakeShards shards;
  const auto client = connect_to(shards.url(), partial());
  ASSERT_TRUE(pull_users(*client, complete()).status.ok());
  shards.behaviour = Behaviour::kSendsError;
  const std::string first = shards.first().address();
  for (const Code code : {Code::kInvalidArgument, Code::kNotFound, Code::kResourceExhausted,
                          Code::kFailedPrecondition, Code::kDataLoss, Code::kPermissionDenied,
                          Code::kStale, Code::kWrongShard, Code::kUnimplemented, Code::kInternal,
                          Code::kIoError, Code::kInUse, Code::kUnauthenticated}) {
    shards.error = code;
    // WRONG_SHARD is asked again until the deadline, the others end the call.
    PullOptions options;
    options.deadline_ms = code == Code::kWrongShard ? 1'000 : 20'000;
    const Pulled pulled = pull_undisturbed(*client, {first, shards.second().address()}, options);
    EXPECT_EQ(pulled.status.code(), code) << pulled.status.to_string();
  }
  shards.error = Code::kUnavailable;  // as from a server that stops
  const Pulled pulled = pull_undisturbed(*client, {first});
  ASSERT_TRUE(pulled.status.ok()) << pulled.status.to_string();
  EXPECT_EQ(pulled.unavailable_count(), high_keys());
}

// More calls than connections wait for a silent server. None of them fails for want of one.
TEST(PartialPulls, CallsThatWaitForAConnectionOfASilentServerLeaveItOut) {
  FakeShards shards;
  Options options = partial();
  options.connections = 1;
  const auto client = connect_to(shards.url(), options);
  ASSERT_TRUE(pull_users(*client, complete()).status.ok());
  shards.behaviour = Behaviour::kIsSilent;
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&] {
      const Pulled pulled = pull_undisturbed(*client, {shards.first().address()});
      EXPECT_TRUE(pulled.status.ok()) << pulled.status.to_string();
      EXPECT_EQ(pulled.unavailable_count(), high_keys());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Servers stop, start, are silent, in any order, while threads pull: each key has its row, or is
// marked.
TEST_F(PartialTest, NoMixOfFailuresGivesAWrongRow) {
  for (const uint64_t owned : {0b00000011, 0b00001100, 0b00110000, 0b11000000, 0b11000000})
    add_server(static_cast<uint64_t>(owned));
  publish();
  Options options = partial();
  options.deadline_ms = 2'000;
  const auto client = connect(options);
  ASSERT_TRUE(pull(*client, keys_of(0xFF), complete()).ok());
  std::atomic<bool> is_done{false};
  std::atomic<uint64_t> pulls{0};
  std::atomic<uint64_t> partial_pulls{0};
  const auto pull_repeatedly = [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    while (!is_done.load()) {
      std::vector<uint64_t> keys(random() % 700);
      for (uint64_t& key : keys) key = random() % (kKeys + kKeys / 4);
      const Pulled pulled(*client, "f32", keys, kDim);
      if (!pulled.status.ok()) {
        ASSERT_TRUE(pulled.status.code() == Code::kUnavailable ||
                    pulled.status.code() == Code::kDeadlineExceeded)
            << pulled.status.to_string();
        continue;
      }
      for (size_t i = 0; i < keys.size(); ++i) {
        const bool is_found = pulled.unavailable[i] == 0 && keys[i] < kKeys;
        ASSERT_EQ(pulled.mask[i], is_found ? 1 : 0) << keys[i];
        ASSERT_TRUE(testing::has_row(
            pulled.rows, i, is_found ? pulled_row(Dtype::kF32, keys[i], kDim) : kDefaultRow));
      }
      ASSERT_EQ(pulled.report.unavailable, pulled.unavailable_count());
      pulls.fetch_add(1);
      partial_pulls.fetch_add(pulled.report.unavailable > 0 ? 1 : 0);
    }
  };
  std::mt19937_64 random(testing::seed());
  std::thread one(pull_repeatedly, random());
  std::thread two(pull_repeatedly, random());
  std::vector<bool> is_running(servers_.size(), true);
  const uint64_t until = base::monotonic_ns() + 60'000'000'000;
  for (int change = 0; (change < 30 || partial_pulls < 50) && base::monotonic_ns() < until;
       ++change) {
    const size_t server = random() % servers_.size();
    is_running[server] ? servers_[server]->stop() : servers_[server]->start();
    is_running[server] = !is_running[server];
    const uint64_t pulls_before = pulls;
    while (pulls < pulls_before + 10 && base::monotonic_ns() < until &&
           std::find(is_running.begin(), is_running.end(), true) != is_running.end()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  is_done = true;
  one.join();
  two.join();
  EXPECT_GE(partial_pulls.load(), 50u);
  for (size_t i = 0; i < servers_.size(); ++i) {
    if (!is_running[i]) servers_[i]->start();
  }
  wait_until("all servers are back", [&] {
    const Pulled pulled(*client, "f32", keys_of(0xFF), kDim);
    return pulled.status.ok() && pulled.report.unavailable == 0;
  });
}

}  // namespace
}  // namespace petps::client
