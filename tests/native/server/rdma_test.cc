// RDMA beside TCP, over fake devices: the offer, pulls, pushes, and the end of either connection.
// Does not cover: a real device (tests/lab).
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <poll.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "rdma_client.h"
#include "server_fixture.h"
#include "tests/contract/fake_verbs.h"
#include "tests/seed.h"

namespace petps::server {
namespace {

using base::Code;
using base::Status;
using transport::FakeFabric;
using transport::FakeLimits;
using transport::FakeVerbs;
using transport::Work;

class RdmaServer : public ServerFixture {
 protected:
  RdmaServer() {
    fill(users_, 100, 1);
    fill(rows_, 2000, 1);
    options_.rdma = device_;
    options_.transport.pin_ms = 600'000;  // however long a test holds a reply
  }
  ~RdmaServer() override {  // the server and its device use the fabric of this class
    server_.reset();
    options_.rdma.reset();
  }
  std::unique_ptr<RdmaClient> connect() {
    return std::make_unique<RdmaClient>(server_->port(), clients_);
  }
  // Start a server of a new pool in this folder, and destroy both.
  Status start_in(const std::string& folder) {
    const std::string path =
        folder + "/rdma_test_" + std::to_string(base::monotonic_ns()) + ".pool";
    table::TablesOptions options;
    options.pool.unit_bytes = pool::kTestUnitBytes;
    options.pool.media.path = path;
    auto tables = table::Tables::create(options);
    if (!tables.ok()) return tables.status();
    const Status status = Server::start(*tables.value(), options_).status();
    ::unlink(path.c_str());
    ::unlink((path + ".readers").c_str());
    return status;
  }
  // Send a pull whose reply the device holds.
  void send_held_pull(RdmaClient& client) {
    ASSERT_TRUE(client.send(pull_frame(7, {{rows_.id(), {1, 2, 3}}})));
    EXPECT_TRUE(waits_until([&] { return device_->held() == 1; }));
  }
  bool is_any_pin_live() {
    epoch::Domain& epochs = pool_.tables->epochs();
    return epochs.oldest() != epochs.current() + 1;
  }

  FakeFabric fabric_;
  std::shared_ptr<FakeVerbs> device_ = std::make_shared<FakeVerbs>(fabric_, FakeLimits{});
  FakeVerbs clients_{fabric_, FakeLimits{}};
  table::Table& users_ = pool_.add_table("users", 16, 64, 1000);
  table::Table& rows_ = pool_.add_table("rows", 128, 512, 4000);
};

TEST_F(RdmaServer, PullsAndPushesHaveTheResultsOfTcp) {
  start();
  auto client = connect();
  std::vector<uint64_t> keys(500);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i * 37 % 2100;  // some keys are missing
  const wire::Frame pull = pull_frame(7, {{rows_.id(), keys}, {users_.id(), {1, 5000}}});
  const Reply over_rdma = client->call(pull);
  const Reply over_tcp = client->door.call(pull);
  ASSERT_TRUE(over_rdma.error().ok()) << over_rdma.error().to_string();
  EXPECT_EQ(over_rdma.body, over_tcp.body);
  const Pulled pulled = decode_pulled(over_rdma);
  for (size_t i = 0; i < keys.size(); ++i) {
    EXPECT_EQ(pulled.rows[i], keys[i] < 2000 ? row_of(keys[i], 1, 512) : std::vector<std::byte>());
  }
  EXPECT_TRUE(client->call(push_frame(8, rows_, {3, 2500}, 2)).error().ok());
  const Pulled after = decode_pulled(client->call(pull_frame(9, {{rows_.id(), {3, 2500, 4}}})));
  ASSERT_TRUE(after.status.ok());
  EXPECT_EQ(after.rows[0], row_of(3, 2, 512));
  EXPECT_EQ(after.rows[1], row_of(2500, 2, 512));
  EXPECT_EQ(after.rows[2], row_of(4, 1, 512));
  const StatsSnapshot stats = server_->stats();
  EXPECT_EQ(stats.connections, 2u);
  EXPECT_EQ(stats.lists_zerocopy, 2u) << "the device reads the rows from the pool";
  EXPECT_TRUE(status_contains("\"rdma\":\"fake\"")) << server_->status_json();
  EXPECT_TRUE(server_->stop().ok());
  EXPECT_EQ(fabric_.not_ready(), 0u);
}

// Nothing arrives over the TCP connection while requests use the rdma connection.
TEST_F(RdmaServer, TheTcpConnectionOfABusyRdmaConnectionIsNotIdle) {
  constexpr uint64_t kIdleMs = 3'000;
  options_.transport.idle_ms = kIdleMs;
  start();
  const wire::Frame pull = pull_frame(7, {{users_.id(), {1}}});
  std::unique_ptr<RdmaClient> client;
  std::unique_ptr<RawClient> idle;
  uint64_t closed = 0;
  bool is_answered = false;
  bool has_stalled = true;
  while (!is_answered && has_stalled) {  // if the machine stalls, the calls leave the client idle
    client.reset();
    idle.reset();
    ASSERT_TRUE(waits_until([&] { return server_->stats().connections == 0; }));
    closed = server_->stats().connections_closed_idle;
    client = connect();
    idle = std::make_unique<RawClient>(server_->port());
    uint64_t longest_ns = 0;  // between two calls
    uint64_t called_ns = base::monotonic_ns();
    const auto note = [&](bool has_reply) {
      is_answered = has_reply;
      const uint64_t before_ns = std::exchange(called_ns, base::monotonic_ns());
      longest_ns = std::max(longest_ns, called_ns - before_ns);
      return has_reply;
    };
    while (note(client->send(pull) && client->receive().error().ok()) &&
           server_->stats().connections_closed_idle == closed)
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // far below the limit
    if (is_answered) note(client->door.call(pull).error().ok());
    has_stalled = longest_ns > kIdleMs * 500'000;  // half of the limit
  }
  EXPECT_TRUE(is_answered);
  // Without further requests both connections are closed, the TCP one together with the rdma one.
  EXPECT_TRUE(waits_until([&] { return server_->stats().connections == 0; }));
  EXPECT_EQ(server_->stats().connections_closed_idle, closed + 2);
}

TEST_F(RdmaServer, HelloOffersRdmaOnlyIfTheServerHasADevice) {
  const auto features = [&](RawClient& client) {
    wire::Frame frame;
    wire::encode_hello(1, {1, 1, "test"}, frame);
    const Reply reply = client.call(frame);
    wire::HelloReply hello;
    EXPECT_TRUE(wire::decode_hello_reply(reply.header, reply.body, hello).ok());
    return hello.features;
  };
  start();
  {
    RawClient client(server_->port());
    EXPECT_NE(features(client) & wire::kFeatureRdma, 0u);
  }
  server_.reset();
  options_.rdma = nullptr;
  start();
  RawClient client(server_->port());
  EXPECT_EQ(features(client) & wire::kFeatureRdma, 0u);
  wire::Frame frame;
  wire::encode_rdma(1, {{1, 1, 1, 1, 0, {}}, 1, 1, 65536, 4}, frame);
  EXPECT_EQ(client.call(frame).error().code(), Code::kUnimplemented);
}

TEST_F(RdmaServer, AnInvalidOfferAndASecondOfferAreRefused) {
  start();
  auto client = connect();
  const Status second = client->offer().error();
  EXPECT_EQ(second.code(), Code::kFailedPrecondition) << second.to_string();
  wire::Frame frame;
  wire::encode_rdma(1, offer_of(client->peer->hello()), frame);
  EXPECT_EQ(client->call(frame).error().code(), Code::kFailedPrecondition)
      << "over the rdma connection";
  RawClient other(server_->port());
  wire::encode_rdma(1, {{1, 1, 1, 1, 0, {}}, 1, 1, 64, 4}, frame);
  expect_error(other.call(frame).error(), Code::kInvalidArgument, "a reply ring of 64 bytes");
  EXPECT_TRUE(decode_pulled(other.call(pull_frame(7, {{users_.id(), {1}}}))).status.ok());
}

TEST_F(RdmaServer, TheRdmaConnectionOfADeadClientEndsWithItsTcpConnection) {
  start();
  device_->set_work(Work::kHeld);
  auto client = connect();
  send_held_pull(*client);
  client.reset();  // the process and both connections are gone
  EXPECT_TRUE(waits_until([&] { return server_->stats().connections == 0; }));
  EXPECT_TRUE(waits_until([&] { return device_->held() == 0; }));
  EXPECT_TRUE(waits_until([&] { return !is_any_pin_live(); }));
}

TEST_F(RdmaServer, ABrokenQueuePairClosesItsTcpConnection) {
  start();
  device_->set_work(Work::kHeld);
  auto client = connect();
  auto neighbour = connect();
  send_held_pull(*client);
  device_->fail(0, IBV_WC_RETRY_EXC_ERR);
  EXPECT_TRUE(client->door.receive(20'000).closed);
  EXPECT_TRUE(waits_until([&] { return server_->stats().connections == 2; }));
  device_->set_work(Work::kAtOnce);
  const Pulled pulled = decode_pulled(neighbour->call(pull_frame(7, {{rows_.id(), {1}}})));
  ASSERT_TRUE(pulled.status.ok());
  EXPECT_EQ(pulled.rows[0], row_of(1, 1, 512));
  const std::string incident = "(status " + std::to_string(IBV_WC_RETRY_EXC_ERR);
  EXPECT_TRUE(waits_until([&] { return status_contains(incident); }));
}

TEST_F(RdmaServer, StopEndsTheReadsOfTheDevice) {
  options_.drain_ms = 100;
  start();
  device_->set_work(Work::kHeld);
  auto client = connect();
  send_held_pull(*client);
  EXPECT_EQ(server_->stop().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(device_->held(), 0u);
  EXPECT_FALSE(is_any_pin_live());
}

TEST_F(RdmaServer, APoolInAFileOnADiskIsRefused) {
  // The build folder is on a disk even if the machine's temporary folder is not.
  struct statfs system {};
  ASSERT_EQ(statfs("build", &system), 0);
  if (system.f_type == TMPFS_MAGIC) GTEST_SKIP() << "build/ is in memory here";
  const Status refused = start_in("build");
  expect_error(refused, Code::kFailedPrecondition, "device-DAX");
}

TEST_F(RdmaServer, APoolInAFileInMemoryIsServed) {
  if (::access("/dev/shm", W_OK) != 0) GTEST_SKIP() << "this machine has no /dev/shm";
  const Status started = start_in("/dev/shm");
  EXPECT_TRUE(started.ok()) << started.to_string();
}

class RdmaUnderUpdates : public RdmaServer {
 protected:
  // Pull rows that show their key and version over a device that reads late and in any order, while
  // a writer replaces them and reuses their slots. Return the number of torn, foreign or missing
  // rows.
  uint64_t run(double seconds) {
    const uint64_t seed = tests::seed();
    start();
    std::vector<std::unique_ptr<RdmaClient>> clients;
    for (int i = 0; i < 3; ++i) clients.push_back(connect());
    device_->set_work(Work::kShuffled, seed);
    std::atomic<bool> is_over{false};
    std::thread writer([&] {
      for (uint64_t version = 2; !is_over; ++version) {
        fill(rows_, 2000, version);
        pool_.tables->reclaim();
      }
    });
    std::mt19937_64 random(seed);
    std::vector<uint64_t> keys(100);
    uint64_t wrong = 0;
    const uint64_t until = base::monotonic_ns() + static_cast<uint64_t>(seconds * 1e9);
    do {
      for (uint64_t& key : keys) key = random() % 2000;
      const wire::Frame frame = pull_frame(7, {{rows_.id(), keys}});
      for (auto& client : clients) {
        for (int i = 0; i < 3; ++i) EXPECT_TRUE(client->send(frame));
      }
      for (auto& client : clients) {
        for (int i = 0; i < 3; ++i) {
          const Pulled pulled = decode_pulled(client->receive());
          if (!pulled.status.ok()) ++wrong;
          for (size_t k = 0; k < pulled.rows.size(); ++k) {
            if (pulled.rows[k].empty() || !is_whole(keys[k], pulled.rows[k])) ++wrong;
          }
        }
      }
    } while (base::monotonic_ns() < until && wrong == 0);
    is_over = true;
    writer.join();
    return wrong;
  }
};

TEST_F(RdmaUnderUpdates, NoRowIsTornWrongOrMissing) {
  EXPECT_EQ(run(2.0), 0u);
  EXPECT_GT(server_->stats().lists_zerocopy, 0u);
  EXPECT_TRUE(pool_.tables->verify().clean());
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_F(RdmaUnderUpdates, WithoutPinsTheSameRunFindsWrongRows) {
  pool_.tables->epochs().disable_pins_for_test();
  EXPECT_GT(run(50.0), 0u);
}
#endif

}  // namespace
}  // namespace petps::server
