// Pulls while rows change, and the pins that protect the rows of replies.
// Does not cover: crashes (tests/crash) and kills of a real process (tests/system).
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "server_fixture.h"
#include "tests/seed.h"

namespace petps::server {
namespace {

using base::Code;
using base::Status;

constexpr size_t kRowBytes = 256;

// A server over the loopback transport, which reads the rows of a list when the list completes.
class LoopbackServer : public ServerFixture {
 protected:
  LoopbackServer() { options_.gather = transport::GatherMode::kSendmsg; }
  void start_with(transport::Completions completions) {
    transport::LoopbackOptions loopback;
    loopback.endpoints = options_.workers;
    loopback.limits = options_.transport;
    loopback.rules = Server::frame_rules(options_.limits);
    auto transport = std::make_unique<transport::LoopbackTransport>(loopback);
    loopback_ = transport.get();
    start(std::move(transport));
    loopback_->set_completions(completions, 1);
  }

  table::Table& rows_ = pool_.add_table("rows", 64, kRowBytes, 2000);
  transport::LoopbackTransport* loopback_ = nullptr;
};

class HeldCompletions : public LoopbackServer {
 protected:
  HeldCompletions() {
    fill(rows_, 1000, 1);
    options_.transport.pin_ms = 60'000;
  }
  void start_held() { start_with(transport::Completions::kHeld); }
};

TEST_F(HeldCompletions, AFullEpochListStopsReadingUntilCompletions) {
  start_held();
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
  start_held();
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
  options_.transport.pin_ms = 50;
  start_held();
  RawClient client(loopback_->connect());
  ASSERT_TRUE(client.send(pull_frame(1, {{rows_.id(), {1}}})));
  ASSERT_TRUE(waits_until([&] { return server_->stats().connections_closed_for_cause == 1; }));
  EXPECT_TRUE(waits_until([&] {
    return status_contains("connection loopback:1 has held rows longer than 50 ms");
  })) << server_->status_json();
  EXPECT_EQ(client.last_error().code(), Code::kDeadlineExceeded);
  loopback_->complete_all();
}

TEST_F(HeldCompletions, StopReportsWhatCouldNotBeDrained) {
  options_.drain_ms = 50;
  start_held();
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
  options_.drain_ms = 50;
  start_held();
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
  fill(table, Storm::kKeys, 1);
  Storm storm(table, tests::seed());
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

using ServerStorm = LoopbackServer;

TEST_F(ServerStorm, OverTcpWithTwoWorkers) {
  for (const transport::GatherMode mode :
       {transport::GatherMode::kCopy, transport::GatherMode::kSendmsg,
        transport::GatherMode::kZerocopy}) {
    options_.workers = 2;
    options_.gather = mode;
    start();
    run_storm(pool_, rows_, [this] { return connect(); });
  }
}

TEST_F(ServerStorm, OverLoopbackWithShuffledCompletions) {
  options_.workers = 2;
  options_.transport.pin_ms = options_.transport.output_stall_ms = 600'000;
  start_with(transport::Completions::kShuffled);
  run_storm(pool_, rows_, [this] { return std::make_unique<RawClient>(loopback_->connect()); });
}

}  // namespace
}  // namespace petps::server
