// The client over rdma (fake devices): when it uses rdma, and what happens when rdma fails.
// Does not cover: the rows of pulls, which pull_test.cc checks over TCP and rdma.
#include <gtest/gtest.h>

#include <thread>

#include "base/clock.h"
#include "fixtures.h"
#include "tests/contract/fake_verbs.h"

namespace petps::client {
namespace {

using base::Code;
using codec::Dtype;
using transport::FakeFabric;
using transport::FakeLimits;
using transport::FakeVerbs;
using transport::Work;

constexpr uint32_t kDim = 128;
constexpr uint64_t kRows = 1000;

server::ServerOptions options_with(std::shared_ptr<transport::Verbs> rdma,
                                   uint32_t connections = 64) {
  server::ServerOptions options;
  options.rdma = std::move(rdma);
  options.limits.connections = connections;
  return options;
}

class RdmaClientTest : public ::testing::Test {
 protected:
  void start(uint32_t connections = 64) {
    server_ = std::make_unique<testing::RealServer>(options_with(server_device_, connections));
    server_->add_table("rows", Dtype::kF32, kDim, 2 * kRows, kRows);
    server_->start();
  }
  std::unique_ptr<Client> connect() {
    Options options;
    options.deadline_ms = 60'000;
    options.catalogue_ms = 0;  // only the test's calls send requests
    options.hot_sample_every = 0;
    options.rdma = client_device_;
    return testing::connect_to(server_->url(), options);
  }
  base::Status pull(Client& client, uint32_t deadline_ms = 0) {
    std::vector<uint64_t> keys(700);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = i * 13 % kRows;
    std::vector<float> rows(keys.size() * kDim);
    PullOptions options;
    options.deadline_ms = deadline_ms;
    const auto report = client.pull("rows", keys, rows, {}, options);
    if (!report.ok()) return report.status();
    for (size_t i = 0; i < keys.size(); ++i) {
      EXPECT_TRUE(testing::has_row(rows, i, testing::pulled_row(Dtype::kF32, keys[i], kDim)))
          << keys[i];
    }
    return {};
  }
  uint64_t replies_over_rdma() { return server_->server().stats().lists_zerocopy; }

  FakeFabric fabric_;
  std::shared_ptr<FakeVerbs> server_device_ = std::make_shared<FakeVerbs>(fabric_, FakeLimits{});
  std::shared_ptr<FakeVerbs> client_device_ = std::make_shared<FakeVerbs>(fabric_, FakeLimits{});
  std::unique_ptr<testing::RealServer> server_;
};

TEST_F(RdmaClientTest, PullsGoOverRdma) {
  start();
  const auto client = connect();
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(pull(*client).ok());
  EXPECT_EQ(replies_over_rdma(), 40u) << "two requests each";
  EXPECT_EQ(fabric_.not_ready(), 0u);
}

TEST_F(RdmaClientTest, TcpIsUsedWhenEitherSideRefusesRdma) {
  start();
  client_device_->refuse_registration(ENOMEM);
  EXPECT_TRUE(pull(*connect()).ok());
  EXPECT_EQ(replies_over_rdma(), 0u);
  server_device_->refuse_registration(ENOMEM);
  client_device_->refuse_registration(0);
  EXPECT_TRUE(pull(*connect()).ok());
  EXPECT_EQ(replies_over_rdma(), 0u);
}

TEST_F(RdmaClientTest, ACallReplacesABrokenQueuePair) {
  start();
  const auto client = connect();
  ASSERT_TRUE(pull(*client).ok());
  server_device_->set_work(Work::kHeld);
  std::thread breaker([&] {
    while (server_device_->held() == 0) std::this_thread::yield();
    for (size_t pair = 0; pair < 4; ++pair) {
      if (server_device_->has_pair(pair)) server_device_->fail(pair, IBV_WC_RETRY_EXC_ERR);
    }
    server_device_->set_work(Work::kAtOnce);
  });
  const base::Status status = pull(*client);
  breaker.join();
  EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_TRUE(pull(*client).ok());
}

TEST_F(RdmaClientTest, RdmaIsUsedAgainAfterARestartOfTheServer) {
  start();
  const auto client = connect();
  ASSERT_TRUE(pull(*client).ok());
  server_->stop();
  const Code gone = pull(*client, 200).code();
  EXPECT_TRUE(gone == Code::kUnavailable || gone == Code::kDeadlineExceeded)
      << base::code_name(gone);
  server_->start();
  EXPECT_TRUE(pull(*client).ok());
  EXPECT_GT(replies_over_rdma(), 0u);
}

TEST_F(RdmaClientTest, ACallFailsAtTheDeadlineIfTheDeviceNeverCompletes) {
  start();
  const auto client = connect();
  ASSERT_TRUE(pull(*client).ok());
  server_device_->set_work(Work::kHeld);
  EXPECT_FALSE(pull(*client, 100).ok());
  server_device_->set_work(Work::kAtOnce);
  server_device_->run_all();
  EXPECT_TRUE(pull(*client).ok());
}

TEST_F(RdmaClientTest, ManyThreadsPullAtOnce) {
  start();
  const auto client = connect();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) EXPECT_TRUE(pull(*client).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(replies_over_rdma(), 160u);
}

TEST(RdmaDevice, AnUnknownDeviceIsAnError) {
  EXPECT_EQ(open_rdma("no_such_device").status().code(), Code::kFailedPrecondition);
}

}  // namespace
}  // namespace petps::client
