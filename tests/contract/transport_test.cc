// The contract of room transport, over every implementation.
// Does not cover: several hosts, and what a server does with the frames (tests/native/server).
#include "transport/transport.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "rdma_peer.h"
#include "tests/seed.h"
#include "transport_echo.h"

namespace petps::transport {
namespace {

using base::Code;
using base::Status;

class TransportContract : public testing::TestWithParam<Backend> {
 protected:
  void make(const Limits& limits = {}, size_t endpoints = 1, const Admit& admit = {}) {
    transport_ = GetParam().make(limits, endpoints, admit);
    ASSERT_TRUE(transport_->start().ok());
  }
  // Make a transport with one endpoint, and an Echo that serves it on a thread.
  Echo& serve(const Limits& limits = {}, std::function<size_t(uint32_t)> rows_of = {},
              size_t row_bytes = 512) {
    make(limits);
    echo_ = std::make_unique<Echo>(*transport_, 0, domain_, row_bytes);
    if (rows_of) echo_->rows_of = std::move(rows_of);
    echo_->start();
    return *echo_;
  }
  // Make a transport and a client whose first frame was answered. This thread steps the Echo, which
  // counts in seen_ whose frames it answered.
  std::unique_ptr<Client> connect_by_steps() {
    make();
    echo_ = std::make_unique<Echo>(*transport_, 0, domain_);
    echo_->on_frame = [this](ConnectionId id) { seen_.push_back(id); };
    auto client = connect();
    EXPECT_TRUE(client->send(test_frame(1, 8)));
    while (seen_.empty()) echo_->step(50);
    return client;
  }
  std::unique_ptr<Client> connect() { return GetParam().connect(*transport_); }

  epoch::Domain domain_;  // outlives every pin
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Echo> echo_;
  std::vector<ConnectionId> seen_;
};

TEST_P(TransportContract, RepliesArriveInTheOrderOfTheirRequests) {
  Echo& echo = serve();
  auto client = connect();
  for (uint32_t number = 0; number < 200; ++number) {
    ASSERT_TRUE(client->send(test_frame(number, number % 5 * 8)));
    if (number % 4 == 3) {  // four at a time
      for (uint32_t i = number - 3; i <= number; ++i)
        EXPECT_EQ(client->receive_frame(), echo.expected_reply(i));
    }
  }
  EXPECT_TRUE(echo.wait_until([&] { return echo.reader().live() == 0; }));
}

TEST_P(TransportContract, FramesArriveWholeHoweverTheyAreCut) {
  Echo& echo = serve();
  const uint64_t seed = tests::seed();
  std::mt19937_64 random(seed);
  auto client = connect();
  std::vector<std::byte> stream;
  constexpr uint32_t kFrames = 40;
  for (uint32_t number = 0; number < kFrames; ++number) {
    const std::vector<std::byte> frame = test_frame(number, random() % 60 * 8);
    stream.insert(stream.end(), frame.begin(), frame.end());
  }
  for (size_t at = 0; at < stream.size();) {
    const size_t n = std::min<size_t>(stream.size() - at, 1 + random() % 300);
    ASSERT_TRUE(client->send(std::span(stream).subspan(at, n)));
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    at += n;
  }
  for (uint32_t number = 0; number < kFrames; ++number) {
    EXPECT_EQ(client->receive_frame(), echo.expected_reply(number)) << number;
  }
}

TEST_P(TransportContract, CarriesBigFramesInBothDirections) {
  // 4 MiB: more than any socket buffer, more than IOV_MAX pieces
  Echo& echo = serve(
      {}, [](uint32_t) { return Echo::kRows - 1; }, 4096);
  auto client = connect();
  // Requests wait while replies are not read, so one thread sends and another reads.
  std::thread sending([&] {
    for (uint32_t number = 0; number < 3; ++number)
      EXPECT_TRUE(client->send(test_frame(number, kTestFrameBytesMax - sizeof(TestHeader))));
  });
  for (uint32_t number = 0; number < 3; ++number) {
    EXPECT_EQ(client->receive_frame(), echo.expected_reply(number));
  }
  sending.join();
}

TEST_P(TransportContract, ASlowReaderGetsEverything) {
  Limits limits;
  limits.output_stall_ms = 600'000;
  Echo& echo = serve(limits, [](uint32_t number) { return 200 + number % 800; });
  auto client = connect();
  constexpr uint32_t kFrames = 60;  // about 18 MB of replies
  for (uint32_t number = 0; number < kFrames; ++number)
    ASSERT_TRUE(client->send(test_frame(number, 8)));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_LT(echo.frames, static_cast<int>(kFrames))
      << "requests must wait while the replies are not read";
  for (uint32_t number = 0; number < kFrames; ++number) {
    ASSERT_EQ(client->receive_frame(), echo.expected_reply(number)) << number;
    if (number % 10 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_TRUE(echo.wait_until([&] { return echo.reader().live() == 0; }));
}

TEST_P(TransportContract, ManyConnectionsAreSpreadEvenly) {
  make({}, 2);
  Echo first(*transport_, 0, domain_);
  Echo second(*transport_, 1, domain_);
  first.start();
  second.start();
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 100; ++i) clients.push_back(connect());
  for (uint32_t round = 0; round < 3; ++round) {
    for (auto& client : clients) ASSERT_TRUE(client->send(test_frame(round, 16)));
    for (auto& client : clients) EXPECT_EQ(client->receive_frame(), first.expected_reply(round));
  }
  EXPECT_EQ(first.opened, 50);
  EXPECT_EQ(second.opened, 50);
  clients.clear();
  EXPECT_TRUE(first.wait_until([&] { return first.closed == 50 && second.closed == 50; }));
  // Their places are reused.
  EXPECT_TRUE(first.answers(*connect(), 5));
}

TEST_P(TransportContract, RefusesConnectionsAboveTheLimit) {
  Limits limits;
  limits.connections = 3;
  make(limits);
  Echo echo(*transport_, 0, domain_);
  // A connection that is idle for a second gives its place up, unless it is kept.
  echo.on_frame = [&](ConnectionId id) { echo.endpoint().keep(id); };
  echo.start();
  std::vector<std::unique_ptr<Client>> clients;
  for (uint32_t i = 0; i < 3; ++i) {
    clients.push_back(connect());
    EXPECT_TRUE(echo.answers(*clients.back(), i));
  }
  auto refused = connect();
  refused->send(test_frame(9, 4096));  // a client that sends first must still receive the reason
  EXPECT_NE(refused->read_to_end().find("RESOURCE_EXHAUSTED: the server has its 3 connections"),
            std::string::npos);
  EXPECT_EQ(transport_->refused(), 1u);
  clients.pop_back();
  EXPECT_TRUE(echo.wait_until([&] { return echo.closed == 1; }));
  refused.reset();
  EXPECT_TRUE(echo.wait_until([&] {  // until the refused connection's socket is closed
    return echo.answers(*connect(), 4);
  }));
}

TEST_P(TransportContract, AdmissionMayRefuseAPeer) {
  std::atomic<bool> open{false};
  make({}, 1, [&open](const Peer& peer) {
    EXPECT_FALSE(peer.address.empty());
    return open ? Status() : Status(Code::kPermissionDenied, "no token");
  });
  Echo echo(*transport_, 0, domain_);
  echo.start();
  EXPECT_EQ(connect()->read_to_end(), "PERMISSION_DENIED: no token");
  EXPECT_EQ(echo.opened, 0);
  open = true;
  auto client = connect();
  EXPECT_TRUE(echo.answers(*client, 3));
}

TEST_P(TransportContract, GarbageClosesItsConnectionAndTheReasonIsSent) {
  Echo& echo = serve();
  auto good = connect();
  auto bad = connect();
  ASSERT_TRUE(bad->send(test_frame(1, 8)));  // a good frame before the garbage is answered first
  std::vector<std::byte> garbage(100'000, std::byte{0x5a});
  const TestHeader header{kBadLength, 0};
  std::memcpy(garbage.data(), &header, sizeof(header));
  bad->send(garbage);
  EXPECT_EQ(bad->receive_frame(), echo.expected_reply(1));
  EXPECT_EQ(bad->read_to_end(), "INVALID_ARGUMENT: broken header");
  EXPECT_TRUE(echo.wait_until([&] { return echo.closed == 1; }));
  EXPECT_TRUE(echo.answers(*good, 2));
  EXPECT_EQ(echo.endpoint().counters().closed_for_cause, 1u);
}

TEST_P(TransportContract, RefusesAnOversizedFrameByItsHeader) {
  serve();
  auto client = connect();
  const TestHeader header{static_cast<uint32_t>(kTestFrameBytesMax + 8), 0};
  // The body never arrives, and the server does not wait for it.
  ASSERT_TRUE(client->send(std::as_bytes(std::span(&header, 1))));
  EXPECT_NE(client->read_to_end().find("RESOURCE_EXHAUSTED: frame of 4194312 bytes"),
            std::string::npos);
}

TEST_P(TransportContract, ReportsATruncatedFrameWhenThePeerStopsSending) {
  serve();
  auto client = connect();
  const std::vector<std::byte> frame = test_frame(1, 800);
  ASSERT_TRUE(client->send(std::span(frame).first(100)));
  client->end_sending();
  EXPECT_NE(client->read_to_end().find("truncated frame: the peer stopped sending after 100 bytes"),
            std::string::npos);
}

TEST_P(TransportContract, RepliesReachAPeerThatSendsNoMore) {
  Echo& echo = serve({}, [](uint32_t) { return 1000; });
  auto client = connect();
  for (uint32_t number = 0; number < 8; ++number) ASSERT_TRUE(client->send(test_frame(number, 8)));
  client->end_sending();
  for (uint32_t number = 0; number < 8; ++number) {
    ASSERT_EQ(client->receive_frame(), echo.expected_reply(number));
  }
  EXPECT_EQ(client->read_to_end(), "");
  EXPECT_TRUE(echo.wait_until([&] { return echo.closed == 1; }));
  EXPECT_EQ(echo.endpoint().counters().closed_for_cause, 0u);
}

TEST_P(TransportContract, ClosesAPeerWithASlowFrameButNotAnIdleOne) {
  Limits limits;
  limits.frame_ms = 100;
  Echo& echo = serve(limits);
  // Both have sent a frame: a connection that never has may be closed as well.
  std::unique_ptr<Client> idle, loris;
  ASSERT_TRUE(echo.wait_until([&] { return echo.answers(*(idle = connect()), 2); }));
  ASSERT_TRUE(echo.wait_until([&] { return echo.answers(*(loris = connect()), 2); }));
  const std::vector<std::byte> frame = test_frame(1, 4000);
  std::atomic<bool> is_closed{false};
  std::thread dribble([&] {  // a byte now and then does not help
    for (size_t at = 0; at < frame.size() && !is_closed; ++at) {
      if (!loris->send(std::span(frame).subspan(at, 1))) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  EXPECT_NE(loris->read_to_end().find("DEADLINE_EXCEEDED: a frame was not complete 100 ms"),
            std::string::npos);
  is_closed = true;
  dribble.join();
  EXPECT_TRUE(echo.answers(*idle, 2));  // idle for longer than the limit
}

TEST_P(TransportContract, NeverReadingPeerIsClosedAndHoldsNothing) {
  Limits limits;
  limits.output_stall_ms = 200;
  limits.output_pause_bytes = 256 << 10;
  // The reply to `good` is short, so that it never waits for room.
  Echo& echo = serve(limits, [](uint32_t number) { return number == 1 ? 1000 : 0; });
  auto mute = connect();
  auto good = connect();
  std::thread flood([&] {
    const std::vector<std::byte> frame = test_frame(1, 8);
    for (int i = 0; i < 5000 && mute->send(frame); ++i) {
    }
  });
  EXPECT_TRUE(echo.wait_until([&] { return echo.closed == 1; }));
  flood.join();
  const std::vector<std::string> reasons = echo.reasons();
  ASSERT_EQ(reasons.size(), 1u);
  EXPECT_NE(reasons[0].find("has read nothing for 200 ms"), std::string::npos) << reasons[0];
  EXPECT_TRUE(echo.wait_until([&] { return echo.reader().live() == 0; }));
  EXPECT_EQ(echo.closed, 1);
  EXPECT_TRUE(echo.wait_until([&] {
    if (echo.answers(*good, 2)) return true;
    good = connect();  // loopback closes a peer too that takes 200 ms to read a short reply
    return false;
  }));
}

TEST_P(TransportContract, APeerThatStopsReadingHoldsNoRows) {
  Limits limits;
  limits.pin_ms = 2'000;
  limits.output_pause_bytes = 256 << 10;
  Echo& echo = serve(limits, [](uint32_t) { return 1000; });
  auto mute = connect();
  auto good = connect();
  for (uint32_t i = 0; i < 8; ++i) mute->send(test_frame(i, 8));
  EXPECT_TRUE(echo.wait_until([&] { return echo.frames > 0; }));
  for (uint32_t i = 0; i < 10; ++i) {
    while (!echo.answers(*good, i)) good = connect();  // the limit of pins is this one's too
  }
  EXPECT_TRUE(echo.wait_until([&] { return echo.reader().live() == 0; }));
  EXPECT_EQ(echo.no_pin, 0);
}

TEST_P(TransportContract, APeerThatDiesHoldsNoRows) {
  Echo& echo = serve({}, [](uint32_t) { return 1000; });
  auto good = connect();
  for (int life = 0; life < 10; ++life) {
    auto dying = connect();
    for (uint32_t i = 0; i < 8; ++i) dying->send(test_frame(i, 8));
    EXPECT_FALSE(dying->receive_frame().empty());  // it is served and has read a part
    dying->close();
    EXPECT_TRUE(echo.wait_until([&] { return echo.closed == life + 1; }));
  }
  EXPECT_TRUE(echo.wait_until([&] { return echo.reader().live() == 0; }));
  EXPECT_TRUE(echo.answers(*good, 3));
}

TEST_P(TransportContract, OutputIsBoundedInBytes) {
  Limits limits;
  limits.output_close_bytes = 8 << 20;
  limits.output_pause_bytes = 64 << 20;  // so that only the byte limit applies
  limits.output_stall_ms = 600'000;
  Echo& echo = serve(
      limits, [](uint32_t) { return 1000; }, 4096);
  auto mute = connect();
  for (uint32_t i = 0; i < 12; ++i) mute->send(test_frame(i, 8));
  EXPECT_TRUE(echo.wait_until([&] { return echo.closed == 1; }));
  const std::vector<std::string> reasons = echo.reasons();
  ASSERT_EQ(reasons.size(), 1u);
  EXPECT_NE(reasons[0].find("8388608 bytes of replies unread"), std::string::npos) << reasons[0];
  EXPECT_TRUE(echo.wait_until([&] { return echo.reader().live() == 0; }));
}

TEST_P(TransportContract, APausedConnectionIsNotReported) {
  auto client = connect_by_steps();
  Echo& echo = *echo_;
  echo.endpoint().pause(seen_[0]);
  ASSERT_TRUE(client->send(test_frame(2, 8)));
  for (int i = 0; i < 5; ++i) echo.step(5);
  EXPECT_EQ(seen_.size(), 1u);
  echo.endpoint().resume(seen_[0]);
  ASSERT_TRUE(echo.wait_until([&] {
    echo.step(5);
    return seen_.size() == 2;
  }));
  EXPECT_EQ(client->receive_frame(), echo.expected_reply(1));
  EXPECT_EQ(client->receive_frame(), echo.expected_reply(2));
}

TEST_P(TransportContract, PostToAClosedConnectionDropsThePin) {
  auto client = connect_by_steps();
  Echo& echo = *echo_;
  client->close();
  while (echo.closed == 0) echo.step(50);
  auto next = connect();  // uses the same slot
  while (echo.opened < 2) echo.step(50);
  gather::GatherList list;
  list.assign(test_frame(77, 8));
  echo.endpoint().post(seen_[0], std::move(list), echo.reader().pin());
  echo.endpoint().flush();
  echo.step(5);
  EXPECT_EQ(echo.reader().live(), 0u);
  EXPECT_TRUE(next->receive_frame(100).empty())
      << "an old id must not reach the slot's new connection";
}

TEST_P(TransportContract, CloseSendsItsReason) {
  make();
  Echo echo(*transport_, 0, domain_);
  echo.on_frame = [&](ConnectionId id) {
    echo.endpoint().close(id, Status(Code::kUnavailable, "going away"));
  };
  echo.start();
  auto client = connect();
  ASSERT_TRUE(client->send(test_frame(1, 8)));
  EXPECT_EQ(client->read_to_end(), "UNAVAILABLE: going away");
  EXPECT_TRUE(echo.wait_until([&] { return echo.closed == 1; }));
  EXPECT_TRUE(echo.wait_until([&] { return echo.reader().live() == 0; }));
}

TEST_P(TransportContract, WakeInterruptsAPoll) {
  make();
  Endpoint& endpoint = transport_->endpoint(0);
  const uint64_t start = base::monotonic_ns();
  std::thread waker([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    endpoint.wake();
  });
  endpoint.poll(120'000);
  EXPECT_LT(base::monotonic_ns() - start, 60'000 * kMs);
  waker.join();
}

TEST_P(TransportContract, StopAcceptingKeepsConnections) {
  Echo& echo = serve();
  auto client = connect();
  EXPECT_TRUE(echo.answers(*client, 1));
  transport_->stop_accepting();
  EXPECT_TRUE(echo.answers(*client, 2));
}

TEST_P(TransportContract, ManyClientsGetTheirRepliesAtTheSameTime) {
  make({}, 2);
  Echo first(*transport_, 0, domain_);
  Echo second(*transport_, 1, domain_);
  first.start();
  second.start();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      auto client = connect();
      for (uint32_t number = t; number < 400; number += 4) {
        if (!client->send(test_frame(number, number % 100 * 8))) ++wrong;
        if (client->receive_frame() != first.expected_reply(number)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(RdmaDeviceOfThisMachine, TakesPartInTheContract) {
  if (rdma_device() == nullptr)
    GTEST_SKIP() << "this machine has no RDMA device: `make lab` runs the suite over soft-RoCE";
}

INSTANTIATE_TEST_SUITE_P(All, TransportContract, testing::ValuesIn(backends()),
                         [](const auto& backend) { return backend.param.name; });

}  // namespace
}  // namespace petps::transport
