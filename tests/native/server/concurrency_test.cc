// Pulls during pushes and deletions, and the pins that protect them.
// Does not cover: crashes (tests/crash) and kills of a real process (tests/system).
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "raw_client.h"
#include "server/server.h"
#include "tests/seed.h"

namespace petps::server {
namespace {

using base::Code;
using base::Status;

constexpr size_t kRowBytes = 256;

class HeldCompletions : public testing::Test {
 protected:
  HeldCompletions() : rows_(pool_.add_table("rows", 64, kRowBytes, 2000)) { fill(rows_, 1000, 1); }
  void start(uint64_t pin_ms, uint64_t drain_ms) {
    transport::LoopbackOptions loopback;
    ServerOptions options;
    options.drain_ms = drain_ms;
    options.gather = transport::GatherMode::kSendmsg;  // pieces: read when a list completes
    options.transport.pin_ms = pin_ms;
    loopback.limits = options.transport;
    loopback.rules = Server::frame_rules(options.limits);
    auto transport = std::make_unique<transport::LoopbackTransport>(loopback);
    loopback_ = transport.get();
    auto started = Server::start(*pool_.tables, options, std::move(transport));
    ASSERT_TRUE(started.ok()) << started.status().to_string();
    server_ = std::move(started.value());
  }
  bool waits_until(const std::function<bool()>& condition) {
    for (int i = 0; i < 60'000; ++i) {
      if (condition()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }

  TestPool pool_;
  table::Table& rows_;
  std::unique_ptr<Server> server_;
  transport::LoopbackTransport* loopback_ = nullptr;
};

TEST_F(HeldCompletions, AFullEpochListStopsReadingUntilCompletions) {
  start(60'000, 5000);
  loopback_->set_completions(transport::Completions::kHeld);
  RawClient client(loopback_->connect());
  constexpr uint64_t kMore = 40;
  const uint64_t all = epoch::kPinsPerReader + kMore;
  for (uint64_t id = 0; id < all; ++id)
    ASSERT_TRUE(client.send(pull_frame(id, {{rows_.id(), {id}}})));
  ASSERT_TRUE(waits_until([&] { return server_->stats().waits_for_pin > 0; }));
  EXPECT_EQ(loopback_->held(), epoch::kPinsPerReader);
  loopback_->set_completions(transport::Completions::kAtOnce);
  loopback_->complete_all();
  for (uint64_t id = 0; id < all; ++id) {
    const Reply reply = client.receive();
    ASSERT_EQ(reply.header.request_id, id);
    const Pulled pulled = decode_pulled(reply);
    ASSERT_TRUE(pulled.status.ok());
    ASSERT_EQ(pulled.rows[0], row_of(id, 1, kRowBytes));
  }
}

TEST_F(HeldCompletions, RowsOfAHeldReplyOutliveTheirReplacement) {
  start(60'000, 5000);
  loopback_->set_completions(transport::Completions::kHeld);
  RawClient client(loopback_->connect());
  ASSERT_TRUE(client.send(pull_frame(1, {{rows_.id(), {1, 2, 3}}})));
  ASSERT_TRUE(waits_until([&] { return loopback_->held() == 1; }));
  for (uint64_t version = 2; version < 30; ++version) {  // enough writes to reuse every free slot
    fill(rows_, 1000, version);
    pool_.tables->reclaim();
  }
  loopback_->complete_all();
  const Pulled pulled = decode_pulled(client.receive());
  ASSERT_TRUE(pulled.status.ok());
  for (uint64_t key = 1; key <= 3; ++key)
    EXPECT_EQ(pulled.rows[key - 1], row_of(key, 1, kRowBytes));
}

TEST_F(HeldCompletions, AnOverduePinIsReportedWithItsConnectionAndClosed) {
  start(50, 5000);
  loopback_->set_completions(transport::Completions::kHeld);
  RawClient client(loopback_->connect());
  ASSERT_TRUE(client.send(pull_frame(1, {{rows_.id(), {1}}})));
  ASSERT_TRUE(waits_until([&] { return server_->stats().connections_closed_for_cause == 1; }));
  EXPECT_TRUE(waits_until([&] {
    return server_->status_json().find("connection loopback:1 has held rows longer than 50 ms") !=
           std::string::npos;
  })) << server_->status_json();
  EXPECT_EQ(client.last_error().code(), Code::kDeadlineExceeded);
  loopback_->complete_all();
}

TEST_F(HeldCompletions, StopReportsWhatCouldNotBeDrained) {
  start(60'000, 50);
  loopback_->set_completions(transport::Completions::kHeld);
  RawClient client(loopback_->connect());
  ASSERT_TRUE(client.send(pull_frame(1, {{rows_.id(), {1}}})));
  ASSERT_TRUE(waits_until([&] { return loopback_->held() == 1; }));
  const Status stopped = server_->stop();
  EXPECT_EQ(stopped.code(), Code::kDeadlineExceeded) << stopped.to_string();
  EXPECT_EQ(client.last_error().code(), Code::kUnavailable);
  loopback_->complete_all();
}

// A server may outlive the pool that it served, and the pool's epochs. A pin that is dropped
// after that would write to freed memory.
TEST_F(HeldCompletions, NoPinOutlivesStop) {
  start(60'000, 50);
  loopback_->set_completions(transport::Completions::kHeld);
  auto client = std::make_unique<RawClient>(loopback_->connect());
  for (uint64_t id = 0; id < 8; ++id)
    ASSERT_TRUE(client->send(pull_frame(id, {{rows_.id(), {id}}})));
  ASSERT_TRUE(waits_until([&] { return loopback_->held() == 8; }));
  fill(rows_, 1000, 2);
  EXPECT_EQ(server_->stop().code(), Code::kDeadlineExceeded);
  epoch::Domain& epochs = pool_.tables->epochs();
  EXPECT_EQ(epochs.oldest(), epochs.current() + 1) << "a pin is live";
  EXPECT_TRUE(pool_.tables->close().ok());
  pool_.tables.reset();
  client.reset();  // the client's peer belongs to the server
  server_.reset();
}

// Each reader checks that every row is whole, has its key, and is never older than the version
// that was acknowledged before the pull.
class Storm {
 public:
  Storm(table::Table& table, uint64_t seed) : table_(table), seed_(seed) {}

  void read(RawClient& client, uint64_t salt) {
    std::mt19937_64 random(seed_ + salt);
    while (!done_) {
      std::vector<uint64_t> keys(20);
      for (uint64_t& key : keys) key = random() % kKeys;
      const uint64_t acknowledged = acknowledged_.load();
      const Pulled pulled = decode_pulled(client.call(pull_frame(salt, {{table_.id(), keys}})));
      if (!pulled.status.ok()) {
        ++failed;
        return;
      }
      for (size_t i = 0; i < keys.size(); ++i) check(keys[i], pulled.rows[i], acknowledged);
      ++pulls;
    }
  }

  void write(RawClient& client) {
    std::vector<uint64_t> keys(kKeys);
    for (uint64_t key = 0; key < kKeys; ++key) keys[key] = key;
    for (uint64_t version = 2; version < 60; ++version) {
      if (!client.call(push_frame(version, table_, keys, version)).error().ok()) ++failed;
      acknowledged_ = version;
    }
    while (pulls <= kPullsLeast && failed == 0) std::this_thread::yield();
    done_ = true;
  }

  static constexpr uint64_t kKeys = 200;
  static constexpr int kPullsLeast = 10;
  std::atomic<int> torn{0};
  std::atomic<int> missing{0};
  std::atomic<int> old{0};
  std::atomic<int> failed{0};
  std::atomic<int> pulls{0};

 private:
  void check(uint64_t key, const std::vector<std::byte>& row, uint64_t acknowledged) {
    uint64_t version = 0;
    if (row.empty()) {
      ++missing;  // a false miss: no key is ever deleted here
    } else if (!is_whole(key, row, &version)) {
      ++torn;
    } else if (version < acknowledged) {
      ++old;
    }
  }

  table::Table& table_;
  const uint64_t seed_;
  std::atomic<uint64_t> acknowledged_{1};
  std::atomic<bool> done_{false};
};

void run_storm(TestPool& pool, table::Table& table,
               const std::function<std::unique_ptr<RawClient>()>& connect) {
  const uint64_t seed = tests::seed();
  fill(table, Storm::kKeys, 1);
  Storm storm(table, seed);
  std::vector<std::thread> threads;
  for (uint64_t salt = 1; salt <= 3; ++salt) {
    threads.emplace_back([&, salt] { storm.read(*connect(), salt); });
  }
  threads.emplace_back([&] { storm.write(*connect()); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(storm.torn, 0);
  EXPECT_EQ(storm.missing, 0);
  EXPECT_EQ(storm.old, 0);
  EXPECT_EQ(storm.failed, 0);
  EXPECT_GT(storm.pulls, Storm::kPullsLeast);
  const table::VerifyReport report = pool.tables->verify();
  EXPECT_TRUE(report.clean()) << report.problems.front();
}

TEST(ServerStorm, OverTcpWithTwoWorkers) {
  for (const transport::GatherMode mode :
       {transport::GatherMode::kCopy, transport::GatherMode::kSendmsg,
        transport::GatherMode::kZerocopy}) {
    TestPool pool;
    table::Table& table = pool.add_table("rows", 64, kRowBytes, 1000);
    ServerOptions options;
    options.port = 0;
    options.workers = 2;
    options.gather = mode;
    auto server = Server::start(*pool.tables, options);
    ASSERT_TRUE(server.ok()) << server.status().to_string();
    const uint16_t port = server.value()->port();
    run_storm(pool, table, [port] { return std::make_unique<RawClient>(port); });
  }
}

TEST(ServerStorm, OverLoopbackWithShuffledCompletions) {
  TestPool pool;
  table::Table& table = pool.add_table("rows", 64, kRowBytes, 1000);
  transport::LoopbackOptions loopback;
  ServerOptions options;
  loopback.rules = Server::frame_rules(options.limits);
  loopback.endpoints = options.workers = 2;
  options.gather = transport::GatherMode::kSendmsg;  // pieces: read when a list completes
  auto transport = std::make_unique<transport::LoopbackTransport>(loopback);
  transport::LoopbackTransport* peers = transport.get();
  auto server = Server::start(*pool.tables, options, std::move(transport));
  ASSERT_TRUE(server.ok()) << server.status().to_string();
  peers->set_completions(transport::Completions::kShuffled, 1);
  run_storm(pool, table, [peers] { return std::make_unique<RawClient>(peers->connect()); });
}

}  // namespace
}  // namespace petps::server
