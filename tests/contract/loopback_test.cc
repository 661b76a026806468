// Behaviour that only the loopback transport can produce: completions that arrive late, in
// another order, or never.
#include "tests/support/loopback/loopback.h"

#include <gtest/gtest.h>

#include "tests/seed.h"
#include "transport_echo.h"

namespace petps::transport {
namespace {

class LoopbackCompletions : public testing::Test {
 protected:
  void SetUp() override {
    LoopbackOptions options;
    options.rules = test_rules();
    options.limits.pin_ms = pin_ms();
    transport_ = std::make_unique<LoopbackTransport>(options);
    ASSERT_TRUE(transport_->start().ok());
    transport_->set_completions(Completions::kHeld);
    echo_ = std::make_unique<Echo>(*transport_, 0, domain_);
    client_ = transport_->connect();
  }
  virtual uint64_t pin_ms() const { return 60'000; }  // only the test of this limit waits this long
  void request(uint32_t number) { ASSERT_TRUE(client_->send(test_frame(number, 8))); }
  void run_until_held(size_t n) {
    for (int i = 0; i < 1000 && transport_->held() < n; ++i) echo_->step(1);
    ASSERT_EQ(transport_->held(), n);
  }
  std::vector<std::byte> receive(size_t n) {
    std::vector<std::byte> out(n);
    size_t at = 0;
    while (at < n) {
      const size_t part = client_->receive(std::span(out).subspan(at), 100);
      if (part == 0) break;
      at += part;
    }
    out.resize(at);
    return out;
  }

  epoch::Domain domain_;
  std::unique_ptr<LoopbackTransport> transport_;
  std::unique_ptr<Echo> echo_;
  std::unique_ptr<LoopbackClient> client_;
};

TEST_F(LoopbackCompletions, PinsLiveUntilTheirCompletionInAnyOrder) {
  for (uint32_t number = 1; number <= 4; ++number) request(number);
  run_until_held(4);
  EXPECT_EQ(echo_->reader().live(), 4u);
  EXPECT_TRUE(transport_->complete_newest());
  EXPECT_EQ(echo_->reader().live(), 3u);
  EXPECT_TRUE(receive(1).empty()) << "a list may not overtake the one before it";
  EXPECT_TRUE(transport_->complete_oldest());
  EXPECT_EQ(receive(echo_->expected_reply(1).size()), echo_->expected_reply(1));
  transport_->complete_all();
  for (uint32_t number = 2; number <= 4; ++number) {
    EXPECT_EQ(receive(echo_->expected_reply(number).size()), echo_->expected_reply(number));
  }
  EXPECT_EQ(echo_->reader().live(), 0u);
  EXPECT_EQ(transport_->endpoint(0).pending_posts(), 0u);
}

TEST_F(LoopbackCompletions, RowsAreReadAtCompletion) {
  request(6);
  run_until_held(1);
  std::fill(echo_->rows().begin(), echo_->rows().end(), std::byte{0xEE});
  transport_->complete_all();
  const std::vector<std::byte> reply = receive(echo_->expected_reply(6).size());
  EXPECT_EQ(reply, echo_->expected_reply(6))
      << "a held list must show what the memory holds when it is read";
  EXPECT_EQ(reply.back(), std::byte{0xEE});
}

TEST_F(LoopbackCompletions, ClosingDropsNoPinByItself) {
  request(1);
  request(2);
  run_until_held(2);
  client_->close();
  for (int i = 0; i < 100 && echo_->closed == 0; ++i) echo_->step(1);
  EXPECT_EQ(echo_->closed, 1);
  EXPECT_EQ(echo_->reader().live(), 2u) << "the device may still read";
  EXPECT_EQ(transport_->endpoint(0).pending_posts(), 2u);
  transport_->complete_all();
  EXPECT_EQ(echo_->reader().live(), 0u);
}

TEST_F(LoopbackCompletions, ALostListDropsItsPinAndClosesItsConnection) {
  request(1);
  run_until_held(1);
  EXPECT_TRUE(transport_->drop_newest());
  EXPECT_EQ(echo_->reader().live(), 0u);
  for (int i = 0; i < 100 && echo_->closed == 0; ++i) echo_->step(1);
  EXPECT_EQ(echo_->closed, 1);
}

class LoopbackOverdue : public LoopbackCompletions {
 protected:
  uint64_t pin_ms() const override { return 50; }
};

TEST_F(LoopbackOverdue, AnOverduePinIsReportedAndItsConnectionClosed) {
  request(1);
  run_until_held(1);
  for (int i = 0; i < 300 && echo_->closed == 0; ++i) echo_->step(1);
  EXPECT_EQ(echo_->overdue, 1);
  EXPECT_EQ(echo_->closed, 1);
  EXPECT_EQ(echo_->reader().live(), 1u);
  transport_->complete_all();
  EXPECT_EQ(echo_->reader().live(), 0u);
}

TEST_F(LoopbackCompletions, FramesWaitWhileAllPinsAreInUse) {
  constexpr uint32_t kMore = 20;
  const auto all = static_cast<uint32_t>(epoch::kPinsPerReader) + kMore;
  for (uint32_t number = 0; number < all; ++number) request(number);
  run_until_held(epoch::kPinsPerReader);
  echo_->step(0);
  EXPECT_GT(echo_->no_pin, 0);
  for (uint32_t number = 0; number < all; ++number) {
    echo_->step(0);
    ASSERT_TRUE(transport_->complete_oldest());
    ASSERT_EQ(receive(echo_->expected_reply(number).size()), echo_->expected_reply(number));
  }
  EXPECT_EQ(echo_->reader().live(), 0u);
}

TEST_F(LoopbackCompletions, ShuffledCompletionsLoseNothing) {
  const uint64_t seed = tests::seed();
  transport_->set_completions(Completions::kShuffled, seed);
  echo_->start();
  for (uint32_t number = 0; number < 300; ++number) request(number);
  for (uint32_t number = 0; number < 300; ++number) {
    const std::vector<std::byte> expected = echo_->expected_reply(number);
    std::vector<std::byte> reply;
    for (int i = 0; i < 100 && reply.size() < expected.size(); ++i) {
      const std::vector<std::byte> part = receive(expected.size() - reply.size());
      reply.insert(reply.end(), part.begin(), part.end());
    }
    ASSERT_EQ(reply, expected) << number;
  }
}

}  // namespace
}  // namespace petps::transport
