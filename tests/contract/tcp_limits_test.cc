// Limits over tcp that need many connections, or idle ones: idleness, places, memory of all
// connections. Does not cover: the clock's accuracy.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "tls_client.h"
#include "transport/limits.h"
#include "transport/tcp/tcp.h"
#include "transport_echo.h"

namespace petps::transport {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

// The parameter: whether connections use TLS.
class TcpLimits : public testing::TestWithParam<bool> {
 protected:
  void make() {
    TcpOptions options;
    options.gather = std::make_shared<const GatherChoice>(GatherMode::kCopy);
    options.limits = limits_;
    options.rules = test_rules();
    options.memory = memory_;
    options.busy_poll_us = busy_poll_us_;
    if (GetParam()) options.tls = test_tls().server;
    options.handshakes.handshake_ms = 600'000;
    auto tcp = make_tcp(options);
    ASSERT_TRUE(tcp.ok()) << tcp.status().to_string();
    transport_ = std::move(tcp.value());
    ASSERT_TRUE(transport_->start().ok());
    echo_ = std::make_unique<Echo>(*transport_, 0, domain_, kRowBytes);
    echo_->rows_of = [](uint32_t number) { return number == kLarge ? 1000 : 3; };
  }
  void serve() {
    make();
    echo_->start();
  }
  std::unique_ptr<Client> connect() {
    return backend_named(GetParam() ? "tcp_tls" : "tcp_copy").connect(*transport_);
  }
  const Counters& counters() { return echo_->endpoint().counters(); }
  bool is_served(Client& client) { return echo_->answers(client, kSmall); }
  std::unique_ptr<Client> connect_by_steps() {
    const int before = echo_->opened;
    auto client = connect();
    while (echo_->opened == before) echo_->step(50);
    return client;
  }
  // Connect until a frame is answered: on a busy machine a connection may count as idle before its
  // first frame arrives.
  std::unique_ptr<Client> connect_and_be_served() {
    std::unique_ptr<Client> client;
    EXPECT_TRUE(echo_->wait_until([&] {
      client = connect();
      return is_served(*client);
    }));
    return client;
  }
  // Return a frame's first bytes.
  static std::vector<std::byte> part_of_frame(size_t content, size_t bytes) {
    std::vector<std::byte> frame = test_frame(kSmall, content);
    frame.resize(bytes);
    return frame;
  }
  // Connect until a place is free, while `busy` keeps working.
  std::unique_ptr<Client> connect_until_served(Client& busy) {
    std::unique_ptr<Client> client;
    EXPECT_TRUE(echo_->wait_until([&] {
      EXPECT_TRUE(is_served(busy));
      client = connect();
      return is_served(*client);
    }));
    return client;
  }

  static constexpr uint32_t kSmall = 1;
  static constexpr uint32_t kLarge = 2;
  static constexpr size_t kRowBytes = 4000;
  Limits limits_;
  uint32_t busy_poll_us_ = 0;
  std::shared_ptr<MemoryBudget> memory_ = std::make_shared<MemoryBudget>();
  epoch::Domain domain_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Echo> echo_;
};

TEST_P(TcpLimits, ClosesAnIdleConnectionWithoutAnErrorFrame) {
  limits_.idle_ms = 50;
  serve();
  auto idle = connect_and_be_served();
  auto silent = connect();  // sends no byte at all
  EXPECT_EQ(idle->read_to_end(), "");
  EXPECT_EQ(silent->read_to_end(), "");
  // Of the connections that connect_and_be_served() gave up, all were idle too.
  EXPECT_GE(echo_->opened, 2);
  EXPECT_TRUE(echo_->wait_until([&] { return counters().closed_idle == counters().opened; }));
  EXPECT_EQ(counters().closed_for_cause, 0u);
  connect_and_be_served();
}

TEST_P(TcpLimits, AKeptConnectionAndASlowReaderAreNotIdle) {
  limits_.idle_ms = 50;
  limits_.output_stall_ms = 600'000;
  make();
  std::atomic<int> frames{0};
  echo_->on_frame = [&](ConnectionId connection) {
    if (frames++ == 0) echo_->endpoint().keep(connection);
  };
  echo_->start();
  auto kept = connect_and_be_served();
  std::unique_ptr<Client> reader;  // has more output waiting than any socket takes
  int closed = 0;
  do {  // see connect_and_be_served()
    closed = echo_->closed;
    reader = connect();
    for (int i = 0; i < 8; ++i) reader->send(test_frame(kLarge, 8));
    ASSERT_TRUE(echo_->wait_until([&] { return echo_->pending > 0 || echo_->closed > closed; }));
  } while (echo_->pending == 0);
  auto idle = connect();  // later than both
  EXPECT_EQ(idle->read_to_end(), "");
  EXPECT_TRUE(echo_->wait_until([&] { return echo_->opened - echo_->closed == 2; }));
  for (int i = 0; i < 8; ++i) EXPECT_EQ(reader->receive_frame(), echo_->expected_reply(kLarge));
  EXPECT_TRUE(is_served(*kept));
}

TEST_P(TcpLimits, AnIdleLimitOfZeroClosesNothing) {
  limits_.idle_ms = 0;
  limits_.frame_ms = 50;
  serve();
  auto idle = connect_and_be_served();
  auto slow = connect_and_be_served();
  const uint64_t closed = counters().closed_idle;  // before their first byte
  ASSERT_TRUE(slow->send(part_of_frame(64, 20)));
  EXPECT_NE(slow->read_to_end().find("was not complete"), std::string::npos);
  EXPECT_TRUE(is_served(*idle));
  EXPECT_EQ(counters().closed_idle, closed);
}

TEST_P(TcpLimits, AConnectionThatNeverSendsIsClosedBeforeAnIdleOne) {
  limits_.frame_ms = 50;
  serve();
  auto idle = connect_and_be_served();
  const uint64_t closed = counters().closed_idle;
  EXPECT_EQ(connect()->read_to_end(), "");
  EXPECT_TRUE(echo_->wait_until([&] { return counters().closed_idle == closed + 1; }));
  EXPECT_TRUE(is_served(*idle)) << "it was silent for longer";
}

TEST_P(TcpLimits, BoundsTheConnectionsOfOnePeer) {
  limits_.connections_per_peer = 2;
  serve();
  const auto connect_from = [&](uint32_t host) -> std::unique_ptr<Client> {
    auto raw = connect_plain(transport_->port(), 0x7f000000 + host);
    if (!GetParam()) return raw;
    return connect_tls(std::move(raw));
  };
  auto first = connect_from(1);
  auto second = connect_from(1);
  ASSERT_TRUE(is_served(*first));
  ASSERT_TRUE(is_served(*second));
  const std::string text = connect_from(1)->read_to_end();
  EXPECT_NE(text.find("127.0.0.1 has its 2 connections already"), std::string::npos) << text;
  EXPECT_EQ(transport_->refused(), 1u);
  auto neighbour = connect_from(2);
  EXPECT_TRUE(is_served(*neighbour));
  EXPECT_TRUE(is_served(*first));
  second->close();
  ASSERT_TRUE(echo_->wait_until([&] {
    second = connect_from(1);
    return is_served(*second);
  })) << "its place is free again";
  const std::vector<std::string> lines = transport_->refusals();
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("limits.connections_per_peer"), std::string::npos);
  EXPECT_EQ(lines[0].substr(lines[0].size() - 9), "127.0.0.1");
}

// A poll that sleeps returns at the next sweep, after 250 ms.
class BusyPoll : public TcpLimits {
 protected:
  std::unique_ptr<Client> serve_one_request(uint32_t busy_poll_us) {
    busy_poll_us_ = busy_poll_us;
    limits_.idle_ms = 0;
    make();
    auto client = connect_by_steps();
    EXPECT_TRUE(client->send(test_frame(kSmall, 8)));
    while (echo_->frames == 0) echo_->step(50);
    return client;
  }
  std::chrono::steady_clock::duration time_of(int polls) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < polls; ++i) echo_->step(10'000);
    return std::chrono::steady_clock::now() - start;
  }
};

TEST_P(BusyPoll, DoesNotSleepAfterARequest) {
  const auto client = serve_one_request(3'600'000'000);
  EXPECT_LT(time_of(200), std::chrono::seconds(40)) << "50 s if each sleeps";
}

TEST_P(BusyPoll, SleepsWhenNoRequestComes) {
  const auto client = serve_one_request(1000);
  while (time_of(1) < std::chrono::milliseconds(100)) {  // it would spin for ever
  }
}

// The tests call step() themselves, and only after every limit has passed. What waits in the socket
// was sent in time, so no connection may be closed.
class PolledTooLate : public TcpLimits {
 protected:
  static constexpr uint64_t kLimitMs = 40;
  static void delay_poll() {
    std::this_thread::sleep_for(std::chrono::milliseconds(kLimitMs * 3 / 2));
  }
};

TEST_P(PolledTooLate, AnswersARequestThatArrivedInTime) {
  limits_.idle_ms = kLimitMs;
  make();
  auto client = connect_by_steps();
  ASSERT_TRUE(client->send(test_frame(kSmall, 8)));
  delay_poll();
  echo_->step(0);
  EXPECT_EQ(echo_->frames, 1);
  EXPECT_EQ(client->receive_frame(), echo_->expected_reply(kSmall));
  EXPECT_EQ(counters().closed, 0u);
  while (counters().closed_idle == 0) echo_->step(50);  // the limit still holds
}

TEST_P(PolledTooLate, ReceivesTheRestOfAFrameThatArrivedInTime) {
  limits_.frame_ms = kLimitMs;
  make();
  const std::vector<std::byte> frame = test_frame(kSmall, 2 * ReceiveBuffer::kFirstBytes);
  const std::span<const std::byte> bytes = frame;
  std::unique_ptr<Client> client;
  int closed = 0;
  do {  // on a busy machine the first part may be overdue before the rest is sent
    client = connect_by_steps();
    closed = echo_->closed;
    ASSERT_TRUE(client->send(bytes.first(20)));
    for (int i = 0; i < 3; ++i) echo_->step(kLimitMs / 4);  // one of them starts the frame's time
  } while (echo_->closed > closed);
  ASSERT_TRUE(client->send(bytes.subspan(20)));
  delay_poll();
  for (int i = 0; i < 3; ++i) echo_->step(0);
  EXPECT_EQ(echo_->frames, 1);
  EXPECT_EQ(echo_->closed, closed);
  EXPECT_EQ(client->receive_frame(), echo_->expected_reply(kSmall));
}

TEST_P(PolledTooLate, SendsOutputOnceTheSocketHasRoom) {
  limits_.output_stall_ms = kLimitMs;
  make();
  auto client = connect_by_steps();
  size_t expected = 0;
  for (int i = 0; i < 8; ++i) {  // more than any socket takes
    ASSERT_TRUE(client->send(test_frame(kLarge, 8)));
    expected += echo_->expected_reply(kLarge).size();
  }
  while (echo_->endpoint().pending_posts() == 0) echo_->step(0);
  std::vector<std::byte> bytes(kMiB);
  size_t received = 0;
  while (received < expected) {
    size_t n = client->receive(bytes, 60'000);  // some of what the last step sent
    ASSERT_GT(n, 0u) << "after " << received << " bytes";
    for (; n > 0; n = client->receive(bytes, 1)) received += n;
    delay_poll();
    echo_->step(0);
    ASSERT_EQ(echo_->closed, 0) << "after " << received << " bytes: " << echo_->reasons().back();
  }
}

TEST_P(TcpLimits, ANewPeerReplacesTheConnectionIdleTheLongest) {
  limits_.connections = 4;
  serve();
  auto idlest = connect();
  ASSERT_TRUE(is_served(*idlest));
  std::vector<std::unique_ptr<Client>> others;
  for (int i = 0; i < 2; ++i) {
    others.push_back(connect());
    ASSERT_TRUE(is_served(*others.back()));
  }
  auto busy = connect();
  auto fresh = connect_until_served(*busy);
  EXPECT_EQ(idlest->read_to_end(), "");
  EXPECT_EQ(counters().closed_for_room, 1u);
  EXPECT_EQ(counters().closed_for_cause, 0u);
  EXPECT_TRUE(is_served(*busy));
  EXPECT_TRUE(is_served(*fresh));
}

TEST_P(TcpLimits, ANewPeerReplacesAConnectionWithHalfARequest) {
  limits_.connections = 4;
  limits_.frame_ms = 600'000;
  serve();
  std::vector<std::unique_ptr<Client>> slow;
  for (int i = 0; i < 3; ++i) {
    slow.push_back(connect());
    ASSERT_TRUE(slow.back()->send(part_of_frame(64, 20)));
  }
  auto busy = connect();
  auto fresh = connect_until_served(*busy);
  EXPECT_TRUE(is_served(*fresh));
  EXPECT_TRUE(is_served(*busy));
}

// A refused peer waits until its error is read, but does not count as a connection.
TEST_P(TcpLimits, ARefusedPeerDoesNotCountAsAConnection) {
  limits_.connections = 2;
  make();
  echo_->on_frame = [&](ConnectionId connection) { echo_->endpoint().keep(connection); };
  echo_->start();
  auto first = connect();
  auto second = connect();
  ASSERT_TRUE(is_served(*first));
  ASSERT_TRUE(is_served(*second));
  std::vector<std::unique_ptr<Client>> refused;
  for (int i = 0; i < 3; ++i) {
    refused.push_back(connect());
    ASSERT_EQ(header_of(refused.back()->receive_frame()).number, kErrorNumber);
  }
  EXPECT_EQ(transport_->refused(), 3u);
  first->close();
  ASSERT_TRUE(echo_->wait_until([&] { return echo_->closed == 1; }));
  auto third = connect();
  EXPECT_TRUE(is_served(*third));
}

TEST_P(TcpLimits, LongRequestsTakeNoMoreThanTheBudget) {
  memory_ = std::make_shared<MemoryBudget>(4 * kMiB);
  serve();
  auto good = connect();
  ASSERT_TRUE(is_served(*good));
  std::vector<std::unique_ptr<Client>> hostile;
  for (int i = 0; i < 8; ++i) {  // each sends 3 MiB of a frame of 4 MiB
    hostile.push_back(connect());
    hostile.back()->send(part_of_frame(kTestFrameBytesMax - 64, 3 * kMiB));
    EXPECT_TRUE(is_served(*good));
  }
  EXPECT_TRUE(echo_->wait_until([&] { return memory_->refused() >= 7; }));
  EXPECT_LE(memory_->used(), 4 * kMiB + kTakeBytes + 9 * ReceiveBuffer::kFirstBytes);
  EXPECT_NE(hostile.back()->read_to_end().find(
                "RESOURCE_EXHAUSTED: the server's memory for requests and replies is used up"),
            std::string::npos);
  for (const auto& client : hostile) client->close();
  EXPECT_TRUE(echo_->wait_until([&] { return memory_->used() < kMiB; }));
  ASSERT_TRUE(good->send(test_frame(kSmall, 2 * kMiB)));
  EXPECT_EQ(good->receive_frame(), echo_->expected_reply(kSmall));
  good->close();
  EXPECT_TRUE(echo_->wait_until([&] { return memory_->used() == 0; }));
}

TEST_P(TcpLimits, RepliesThatNobodyReadsTakeNoMoreThanTheBudget) {
  memory_ = std::make_shared<MemoryBudget>(12 * kMiB);
  limits_.output_stall_ms = 600'000;
  serve();
  auto good = connect();
  ASSERT_TRUE(is_served(*good));
  std::vector<std::unique_ptr<Client>> mute;
  for (int i = 0; i < 12; ++i) {  // 4 MB per reply
    mute.push_back(connect());
    for (int k = 0; k < 4; ++k) mute.back()->send(test_frame(kLarge, 8));
    EXPECT_TRUE(is_served(*good));
  }
  // Whether one is refused, or all wait, depends on what the sockets take.
  EXPECT_TRUE(echo_->wait_until([&] { return memory_->refused() > 0 || memory_->is_tight(); }));
  EXPECT_LE(memory_->used(), 12 * kMiB + 2 * 13 * ReceiveBuffer::kFirstBytes);
  EXPECT_TRUE(is_served(*good));
  for (const auto& client : mute) client->close();
  EXPECT_TRUE(echo_->wait_until([&] { return memory_->used() < kMiB; }));
  EXPECT_TRUE(echo_->answers(*good, kLarge));
}

TEST_P(TcpLimits, EndReleasesMemoryPinsAndConnections) {
  make();
  auto client = connect();
  auto half = connect();
  ASSERT_TRUE(half->send(part_of_frame(kTestFrameBytesMax - 64, kMiB)));
  // More than any socket takes; otherwise nothing would be pending.
  for (int i = 0; i < 8; ++i) ASSERT_TRUE(client->send(test_frame(kLarge, 8)));
  ASSERT_TRUE(echo_->wait_until([&] {
    echo_->step(50);
    return echo_->endpoint().pending_posts() > 0 && echo_->opened == 2;
  }));
  transport_->stop_accepting();
  transport_->end();
  EXPECT_EQ(memory_->used(), 0u);
  EXPECT_EQ(echo_->reader().live(), 0u);
  EXPECT_TRUE(echo_->endpoint().connections().empty());
}

std::string name_of(const testing::TestParamInfo<bool>& tls) { return tls.param ? "tls" : "plain"; }
INSTANTIATE_TEST_SUITE_P(Tcp, TcpLimits, testing::Bool(), name_of);
INSTANTIATE_TEST_SUITE_P(Tcp, BusyPoll, testing::Bool(), name_of);
INSTANTIATE_TEST_SUITE_P(Tcp, PolledTooLate, testing::Bool(), name_of);

}  // namespace
}  // namespace petps::transport
