// Servers that die and restart, and replicas that take over.
#include <gtest/gtest.h>

#include <atomic>

#include "base/clock.h"
#include "fixtures.h"
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
using testing::keys_of;
using testing::RealServer;
using wire::Opcode;

constexpr uint32_t kDim = 8;
constexpr uint32_t kLongMs = 20'000;  // for calls that must succeed on a busy machine too

Options patient_options() {
  Options options;
  options.deadline_ms = kLongMs;
  return options;
}

Status pull_users(Client& client, uint32_t deadline_ms = 0, uint64_t min_version = 0) {
  const std::vector<uint64_t> keys = {2, 4, 6};
  std::vector<float> rows(3 * FakeServer::kDim);
  PullOptions options;
  options.deadline_ms = deadline_ms;
  options.min_version = min_version;
  return client.pull("users", keys, rows, {}, options).status();
}

TEST(Retry, TheErrorNamesAllServersWhenNoneIsReachable) {
  const std::string first = "127.0.0.1:" + std::to_string(testing::stable_port());
  const std::string second = "127.0.0.1:" + std::to_string(testing::stable_port());
  const std::string url = "petps://" + first + "," + second + "/m";
  expect_error(Client::connect(url, patient_options()).status(), Code::kUnavailable,
               {first, second, "Connection refused"});
}

TEST(Retry, TheErrorNamesAnUnknownHost) {
  expect_error(Client::connect("petps://no-such-host.invalid/m", patient_options()).status(),
               Code::kUnavailable, {"no-such-host.invalid:7070"});
}

TEST(Retry, APullFailsOverToAnotherReplica) {
  const std::string dead = "127.0.0.1:" + std::to_string(testing::stable_port());
  FakeServer alive;
  const auto client =
      connect_to("petps://" + dead + "," + alive.address() + "/ranking", patient_options());
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(pull_users(*client).ok());
}

TEST(Retry, ASilentReplicaLeavesTimeForTheOther) {
  // Silent for good once it has received a pull, so that no probe finds it alive.
  std::atomic<bool> is_silent{false};
  FakeServer silent([&](Opcode opcode, uint64_t, wire::Frame&) {
    if (opcode == Opcode::kPull) is_silent = true;
    return is_silent ? Answer::kSilent : Answer::kSend;
  });
  FakeServer good;
  const auto client = connect_to("petps://" + silent.address() + "," + good.address() + "/ranking",
                                 patient_options());
  for (int i = 0; i < 6; ++i) {
    const Status status = pull_users(*client);
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  EXPECT_LT(silent.count(Opcode::kPull), 5u) << "it is in backoff after a failure";
}

// Return a tamper that answers every pull with an error.
FakeServer::Tamper fail_pulls(Code code, const std::string& message) {
  return [code, message](Opcode opcode, uint64_t, wire::Frame& reply) {
    if (opcode == Opcode::kPull) testing::replace_by_error(reply, code, message);
    return Answer::kSend;
  };
}

TEST(Retry, APullSkipsAStaleReplica) {
  FakeServer old(fail_pulls(Code::kStale, "too old"));
  FakeServer fresh;
  const auto client = connect_to("petps://" + old.address() + "," + fresh.address() + "/ranking",
                                 patient_options());
  // The client chooses one of the two at random.
  for (int i = 0; i < 10 || (old.count(Opcode::kPull) == 0 && i < 200); ++i)
    EXPECT_TRUE(pull_users(*client, kLongMs, 5).ok());
  EXPECT_GT(old.count(Opcode::kPull), 0u);
}

TEST(Retry, APullFailsAtTheDeadlineAndNamesTheDeadServer) {
  auto server = std::make_unique<RealServer>();
  server->add_table("users", Dtype::kF32, FakeServer::kDim, 100, 50);
  server->start();
  const auto client = connect_to(server->url(), patient_options());
  ASSERT_TRUE(pull_users(*client).ok());
  server->stop();
  const uint64_t before = base::monotonic_ns();
  const Status status = pull_users(*client, 300);
  // On a busy machine the deadline may cut the last attempt short.
  const bool is_cut = status.code() == Code::kDeadlineExceeded;
  expect_error(status, is_cut ? status.code() : Code::kUnavailable,
               {"gave up after 300 ms", server->address()});
  EXPECT_LT(base::monotonic_ns() - before, 30'000'000'000u);
  server->start();  // the same port
  EXPECT_TRUE(pull_users(*client).ok());
}

// The server closes the connection when it receives the second request. For the client that is the
// same as the close of an idle connection while its request is in flight.
TEST(Retry, AStatusRequestIsRepeatedAfterItsIdleConnectionWasClosed) {
  FakeServer server([](Opcode opcode, uint64_t count, wire::Frame&) {
    return opcode == Opcode::kStatus && count == 1 ? Answer::kClose : Answer::kSend;
  });
  Options options = patient_options();
  options.catalogue_ms = 0;
  options.hot_sample_every = 0;
  const auto client = connect_to(server.url(), options);
  ASSERT_TRUE(client->status(0).ok());
  const auto status = client->status(0);
  EXPECT_TRUE(status.ok()) << status.status().to_string();
  EXPECT_EQ(server.count(Opcode::kStatus), 3u);
}

TEST(Retry, APullWaitsForARestart) {
  RealServer server;
  server.add_table("users", Dtype::kF32, FakeServer::kDim, 100, 50);
  server.start();
  Options options = patient_options();
  options.catalogue_ms = 0;  // only the pull contacts the server
  options.hot_sample_every = 0;
  const auto client = connect_to(server.url(), options);
  server.stop();
  std::atomic<bool> is_over{false};
  std::thread later([&] {
    while (client->server_counts().at(0).failures == 0 && !is_over)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    server.start();
  });
  const Status status = pull_users(*client);
  is_over = true;
  later.join();
  EXPECT_TRUE(status.ok()) << status.to_string();
}

TEST(Retry, APullFindsTheTableOfAnotherPoolAtTheSameAddress) {
  FakeServer server;
  Options options = patient_options();
  options.catalogue_ms = 0;
  const auto client = connect_to(server.url(), options);
  ASSERT_TRUE(pull_users(*client).ok());
  server.move_to_pool(9, 99);
  EXPECT_TRUE(pull_users(*client).ok());  // the server refuses the old id
  EXPECT_GE(server.count(Opcode::kTables), 2u);
}

TEST(Retry, APullFromADroppedTableIsRetriedOnce) {
  FakeServer server(fail_pulls(Code::kNotFound, "no table 7; there are: 8"));
  const auto client = connect_to(server.url(), patient_options());
  const uint64_t before = server.count(Opcode::kTables);
  const Status status = pull_users(*client);
  EXPECT_EQ(Code::kNotFound, status.code()) << status.to_string();
  EXPECT_EQ(2u, server.count(Opcode::kPull));
  EXPECT_GE(server.count(Opcode::kTables), before + 1);
}

TEST(Retry, AStalePullIsRepeatedWhenTheBackgroundThreadHasReadASwitch) {
  std::atomic<Client*> pulling{nullptr};
  FakeServer server([&](Opcode opcode, uint64_t count, wire::Frame& reply) {
    if (opcode == Opcode::kTables && server.count(Opcode::kPull) > 0) {
      wire::TablesReply switched = server.tables();
      switched.aliases[0].instance = 2;
      const uint64_t id = testing::header_of(reply).request_id;
      EXPECT_TRUE(wire::encode_tables_reply(id, switched, reply).ok());
    }
    if (opcode == Opcode::kPull && count == 0) {
      // This asks no server while the client knows the table.
      const auto has_switched = [&] {
        const auto table = pulling.load()->describe("users");
        return table.ok() && table.value().instance == "ranking@2";
      };
      const uint64_t until = base::monotonic_ns() + kLongMs * uint64_t{1'000'000};
      while (!has_switched() && base::monotonic_ns() < until) std::this_thread::yield();
      testing::replace_by_error(reply, Code::kStale, "ranking@1 is at 4");
    }
    return Answer::kSend;
  });
  wire::TablesReply& tables = server.tables();
  tables.instances.push_back({2, "ranking", "ranking@2", 1, 5});
  tables.tables.push_back(tables.tables[0]);
  tables.tables[1].instance = 2;
  tables.aliases.push_back({"ranking", 1});
  Options options = patient_options();
  options.catalogue_ms = 1;
  const auto client = connect_to(server.url(), options);
  pulling = client.get();
  const std::vector<uint64_t> keys = {2};
  std::vector<float> rows(FakeServer::kDim);
  PullOptions fresh;
  fresh.min_version = FakeServer::kVersion;
  fresh.deadline_ms = 2 * kLongMs;
  const auto report = client->pull("users", keys, rows, {}, fresh);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().instance, "ranking@2");
  EXPECT_EQ(2u, server.count(Opcode::kPull));
}

TEST(Retry, AWaitForAFreeConnectionIsNoFailureOfTheServer) {
  std::atomic<bool> is_held{true};
  std::atomic<bool> has_begun{false};
  FakeServer server([&](Opcode opcode, uint64_t, wire::Frame&) {
    if (opcode != Opcode::kPull) return Answer::kSend;
    has_begun = true;
    while (is_held) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return Answer::kSend;
  });
  Options options = patient_options();
  options.catalogue_ms = 0;
  options.hot_sample_every = 0;
  options.connections = 1;
  const auto client = connect_to(server.url(), options);
  std::thread holds_the_connection([&] { EXPECT_TRUE(pull_users(*client, 2 * kLongMs).ok()); });
  while (!has_begun) std::this_thread::yield();
  expect_error(pull_users(*client, 100), Code::kResourceExhausted,
               {"all 1 connections were in use"});
  EXPECT_EQ(client->server_counts().at(0).failures, 0u);
  is_held = false;
  holds_the_connection.join();
  EXPECT_TRUE(pull_users(*client).ok());
}

TEST(Retry, APushIsNotRetried) {
  FakeServer server([](Opcode opcode, uint64_t, wire::Frame&) {
    return opcode == Opcode::kPush ? Answer::kClose : Answer::kSend;
  });
  const auto client = connect_to(server.url(), patient_options());
  const std::vector<uint64_t> keys = {1};
  const std::vector<float> rows(FakeServer::kDim);
  expect_error(client->push("users", keys, rows, FakeServer::kDim).status(), Code::kUnavailable,
               {"the server acknowledged 0 of 1 rows, and may have applied the next 1"});
  EXPECT_EQ(1u, server.count(Opcode::kPush));
}

TEST(Retry, APushToReplicasIsRefusedBeforeAnythingIsSent) {
  FakeServer first;
  FakeServer second;
  const auto client = connect_to("petps://" + first.address() + "," + second.address() + "/ranking",
                                 patient_options());
  const std::vector<uint64_t> keys = {42};
  const std::vector<float> rows(FakeServer::kDim);
  PushReport report;
  PushOptions options;
  options.report = &report;
  for (const Status& status :
       {client->push("users", keys, rows, FakeServer::kDim, options).status(),
        client->push_stored("users", keys, std::as_bytes(std::span(rows)), options).status(),
        client->erase("users", keys, options).status()}) {
    const std::vector<std::string> names = {first.address(), second.address()};
    EXPECT_EQ(status.message(), wire::refuse_replicated_push("users", names).message());
    expect_error(status, Code::kFailedPrecondition, {"petps publish"});
  }
  EXPECT_EQ(0u, first.count(Opcode::kPush) + second.count(Opcode::kPush));
  EXPECT_TRUE(pull_users(*client).ok());
}

TEST(Retry, ThreadsPullThroughRestarts) {
  RealServer server;
  server.add_table("users", Dtype::kF16, kDim, 3000, 2000);
  server.start();
  const auto client = connect_to(server.url(), patient_options());
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> pulls{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(testing::seed() + static_cast<uint64_t>(t));
      PullOptions options;
      options.deadline_ms = 60'000;  // not the subject: a start takes seconds on a busy machine
      while (!stop) {
        std::vector<uint64_t> keys(900);
        for (uint64_t& key : keys) key = random() % 2000;
        std::vector<float> rows(keys.size() * kDim);
        const auto report = client->pull("users", keys, rows, {}, options);
        ASSERT_TRUE(report.ok()) << report.status().to_string();
        ASSERT_EQ(keys.size(), report.value().found);
        for (size_t i = 0; i < keys.size(); ++i) {
          ASSERT_TRUE(testing::has_row(rows, i, testing::row_of(keys[i], kDim)));
        }
        ++pulls;
      }
    });
  }
  for (int i = 0; i < 6; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    server.stop();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    server.start();
  }
  const uint64_t before = pulls;
  while (pulls < before + 10 && !::testing::Test::HasFailure()) std::this_thread::yield();
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

class OlderMapTest : public testing::Fleet {};

// The owners by the client's map lag, and do not know that they own nothing any more.
TEST_F(OlderMapTest, StaleOwnersMayBeThoseOfAnOlderMap) {
  for (const uint64_t owned : {0x0F, 0x0F, 0xF0}) add_server(owned, 0xFF);
  publish();
  for (size_t i = 0; i < servers_.size(); ++i) record(*servers_[i], 0xFF, i == 2 ? 5 : 3);
  for (const uint32_t wait_ms : {0u, 20u}) {
    const auto client = connect();
    ASSERT_TRUE(pull(*client, keys_of(0xFF)).ok());
    const PullOptions options{.min_version = 5, .wait_ms = wait_ms};
    expect_error(pull(*client, keys_of(0x0F), options).status(), Code::kStale,
                 {"version 5 was requested"});
    ++version_;
    owned_ = {0, 0, 0xFF};
    servers_[2]->set_shard_map(map());
    const auto report = pull(*client, keys_of(0xFF), options);
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    EXPECT_EQ(report.value().applied_version, 5u);
    owned_ = {0x0F, 0x0F, 0xF0};
    publish();
  }
}

// Two owners of one half of the keys and one of the other, with a second instance. Each server
// switches to it at a time of its own.
class SwitchedOwnerTest : public testing::Fleet {
 protected:
  SwitchedOwnerTest() {
    for (size_t i = 0; i < 3; ++i) {
      pool::Pool& pool = add_server(i < 2 ? 0x0F : 0xF0, 0xFF).tables().pool();
      const auto record = pool.create_instance("ranking", "ranking@2", testing::kPartitions);
      EXPECT_TRUE(record.ok()) << record.status().to_string();
      next_.push_back(record.value().id);
      table::Table& table = servers_[i]->add_table("f32", codec::Dtype::kF32, testing::kDim, 4000,
                                                   0, {}, pool::Feed::kPush, next_[i]);
      testing::RealServer::fill(table, testing::keys_of(0xFF), 2);
    }
    publish();
  }
  void switch_to_next(size_t server) {
    EXPECT_TRUE(servers_[server]->tables().pool().set_alias("ranking", next_[server]).ok());
  }
  std::vector<uint32_t> next_;
};

// The names of a server are read every few seconds. One that switched in between answers if it is
// the last owner that is left.
TEST_F(SwitchedOwnerTest, AnswersForADeadOneThatHadSwitchedBefore) {
  const std::vector<uint64_t> keys = testing::first_keys(100);
  std::vector<float> rows(keys.size() * testing::kDim);
  const auto client = connect();
  ASSERT_TRUE(client->pull("f32", keys, rows).ok());
  switch_to_next(0);
  switch_to_next(2);
  std::string instance;
  while (instance != "ranking@2") {  // until the client has read the names of these two
    ASSERT_TRUE(client->tables().ok());
    const auto report = client->pull("f32", keys, rows);
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    instance = report.value().instance;
  }
  servers_[0]->stop();
  switch_to_next(1);
  const auto report = client->pull("f32", keys, rows);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().instance, "ranking@2");
  EXPECT_EQ(rows, testing::rows_of(keys, testing::kDim, 2));
}

}  // namespace
}  // namespace petps::client
