// Behaviour that only the rdma transport has: work requests and completions, credits, registered
// memory, a device that fails. The device is a fake; the lab runs on a real one.
#include "transport/rdma/rdma.h"

#include <gtest/gtest.h>

#include "rdma_peer.h"
#include "tests/seed.h"
#include "transport/rdma/peer.h"
#include "transport_echo.h"

namespace petps::transport {
namespace {

using base::Code;
using base::Status;

constexpr FakeLimits kOrdinary{30, 0, 4096, 1u << 16};

std::unique_ptr<RdmaPeer> open_peer(Verbs& verbs) {
  auto peer = RdmaPeer::open(verbs, {});
  EXPECT_TRUE(peer.ok()) << peer.status().to_string();
  return std::move(peer.value());
}

// The part of a reason that does not come from libibverbs, which the machine may not have.
std::string status_text(ibv_wc_status status) { return "(status " + std::to_string(status) + ","; }

void connect_to(RdmaTransport& transport, RdmaPeer& peer, const RdmaHello& hello) {
  auto welcome = transport.accept({"peer"}, hello);
  ASSERT_TRUE(welcome.ok()) << welcome.status().to_string();
  ASSERT_TRUE(peer.connect(welcome.value()).ok());
}

// A test holds completions for as long as a busy machine takes.
Limits patient() {
  Limits limits;
  limits.pin_ms = 600'000;
  return limits;
}

class Rdma : public testing::Test {
 protected:
  void make(const FakeLimits& device = kOrdinary, Limits limits = patient(),
            Registered registered = Registered::kEverything) {
    rdma_ = std::make_unique<FakeRdma>(device, registered, limits, 1, Admit());
    ASSERT_TRUE(rdma_->start().ok());
    echo_ = std::make_unique<Echo>(*rdma_, 0, domain_);
  }
  // Return a peer that the server has accepted; `change` may change the hello before that.
  std::unique_ptr<RdmaPeer> connect_peer(const std::function<void(RdmaHello&)>& change = {}) {
    std::unique_ptr<RdmaPeer> peer = open_peer(rdma_->clients());
    RdmaHello hello = peer->hello();
    if (change) change(hello);
    connect_to(rdma_->rdma(), *peer, hello);
    return peer;
  }
  void request(Client& client, uint32_t number) { ASSERT_TRUE(client.send(test_frame(number, 8))); }
  void run_until(const std::function<bool()>& condition) {
    ASSERT_TRUE(echo_->wait_until([&] {
      if (condition()) return true;
      echo_->step(1);
      return condition();
    }));
  }
  void run_until_held(size_t n) {
    run_until([&] { return rdma_->device().held() == n; });
  }
  // Return the client's next frame; this thread steps the endpoint.
  std::vector<std::byte> reply(Client& client) {
    std::vector<std::byte> frame;
    const bool has_replied = echo_->wait_until([&] {
      echo_->step(0);
      frame = client.receive_frame(5);
      return !frame.empty();
    });
    EXPECT_TRUE(has_replied);
    if (has_replied) return frame;
    for (const std::string& reason : echo_->reasons()) ADD_FAILURE() << "closed: " << reason;
    return {};
  }

  epoch::Domain domain_;
  std::unique_ptr<FakeRdma> rdma_;
  std::unique_ptr<Echo> echo_;
};

TEST_F(Rdma, AReplyIsOneDoorbellOfFullWorkRequests) {
  make();
  echo_->rows_of = [](uint32_t) { return 100; };
  auto client = rdma_->connect();
  const uint64_t writes = rdma_->fabric().writes();
  const uint64_t doorbells = rdma_->fabric().doorbells();
  request(*client, 1);
  EXPECT_EQ(reply(*client), echo_->expected_reply(1));
  EXPECT_EQ(rdma_->fabric().writes() - writes, 4u) << "header and 100 rows, 30 pieces a request";
  EXPECT_EQ(rdma_->fabric().doorbells() - doorbells, 2u) << "the client's and ours";
}

TEST_F(Rdma, AReplyWithinTheInlineLimitHoldsNoPin) {
  make({30, 256, 4096, 1u << 16});
  echo_->rows_of = [](uint32_t) { return 0; };
  rdma_->device().set_work(Work::kHeld);
  auto client = rdma_->connect();
  request(*client, 1);
  run_until_held(1);
  EXPECT_EQ(echo_->reader().live(), 0u);
  rdma_->device().run_all();
  EXPECT_EQ(reply(*client), echo_->expected_reply(1));
}

// The part before the end of the ring and the part at its beginning are two work requests. Both are
// inline.
TEST_F(Rdma, AnInlineReplyGoesAroundTheEndOfTheRing) {
  make({30, 256, 4096, 1u << 16});
  echo_ = std::make_unique<Echo>(*rdma_, 0, domain_, 80);
  echo_->rows_of = [](uint32_t) { return 2; };
  auto client = rdma_->connect();
  const size_t reply_lines = (echo_->expected_reply(0).size() + kLineBytes - 1) / kLineBytes;
  const size_t ring_lines = kTestRingBytes / kLineBytes;
  ASSERT_NE(ring_lines % reply_lines, 0u);
  for (uint32_t number = 0; number * reply_lines <= ring_lines; ++number) {
    request(*client, number);
    ASSERT_EQ(reply(*client), echo_->expected_reply(number)) << number;
  }
}

TEST_F(Rdma, RowsAreReadByTheDeviceAndThePinLivesUntilItsCompletion) {
  make();
  rdma_->device().set_work(Work::kHeld);
  auto client = rdma_->connect();
  request(*client, 6);
  run_until_held(1);
  EXPECT_EQ(echo_->reader().live(), 1u);
  std::fill(echo_->rows().begin(), echo_->rows().end(), std::byte{0xEE});
  rdma_->device().run_all();
  const std::vector<std::byte> bytes = reply(*client);
  EXPECT_EQ(bytes, echo_->expected_reply(6));
  EXPECT_EQ(bytes.back(), std::byte{0xEE}) << "the rows were copied before the device read them";
  run_until([&] { return echo_->reader().live() == 0; });
}

TEST_F(Rdma, CompletionsOfConnectionsComeInAnyOrder) {
  make();
  rdma_->device().set_work(Work::kHeld);
  auto first = rdma_->connect();
  auto second = rdma_->connect();
  request(*first, 3);
  run_until_held(1);
  request(*second, 4);
  request(*second, 5);
  run_until_held(3);
  EXPECT_EQ(echo_->reader().live(), 3u);
  EXPECT_TRUE(rdma_->device().run_one(1));
  EXPECT_EQ(reply(*second), echo_->expected_reply(4));
  EXPECT_EQ(echo_->reader().live(), 2u);
  EXPECT_TRUE(first->receive_frame(20).empty());
  EXPECT_TRUE(rdma_->device().run_one(0));
  EXPECT_EQ(reply(*first), echo_->expected_reply(3));
  EXPECT_TRUE(rdma_->device().run_one(1));
  EXPECT_EQ(reply(*second), echo_->expected_reply(5));
  run_until([&] { return echo_->reader().live() == 0; });
  EXPECT_EQ(echo_->endpoint().pending_posts(), 0u);
}

TEST_F(Rdma, PinsOutliveTheQueuePair) {
  make();
  rdma_->device().set_work(Work::kHeld);
  size_t live_when_gone = 0;
  auto client = rdma_->connect();
  rdma_->device().on_pair_gone = [&] { live_when_gone = echo_->reader().live(); };
  request(*client, 1);
  request(*client, 2);
  run_until_held(2);
  client->close();
  run_until([&] { return echo_->closed == 1; });
  EXPECT_EQ(live_when_gone, 2u) << "while the device has the queue pair it may read the rows";
  EXPECT_EQ(echo_->reader().live(), 0u);
  EXPECT_EQ(echo_->endpoint().pending_posts(), 0u);
  rdma_->device().on_pair_gone = {};
}

TEST_F(Rdma, ClosingWaitsForRepliesInFlight) {
  make();
  rdma_->device().set_work(Work::kHeld);
  auto client = rdma_->connect();
  std::vector<ConnectionId> seen;
  echo_->on_frame = [&](ConnectionId id) { seen.push_back(id); };
  request(*client, 5);
  run_until_held(1);
  echo_->endpoint().close(seen[0], Status(Code::kUnavailable, "going away"));
  run_until([&] { return echo_->closed == 1; });
  EXPECT_EQ(echo_->reader().live(), 1u) << "closing drops no pin by itself";
  rdma_->device().run_all();
  EXPECT_EQ(reply(*client), echo_->expected_reply(5));
  run_until([&] { return echo_->reader().live() == 0; });
  EXPECT_EQ(client->read_to_end(), "UNAVAILABLE: going away");
}

// What the device has received was sent in time, so a late poll may not close the connection.
TEST_F(Rdma, ALatePollReceivesTheRestOfAFrame) {
  constexpr int kFrameMs = 40;
  Limits limits;
  limits.frame_ms = kFrameMs;
  make(kOrdinary, limits);
  const std::vector<std::byte> frame = test_frame(5, 800);
  std::unique_ptr<Client> client;
  int closed = 0;
  do {  // on a busy machine the first part may be overdue before the rest is sent
    client = rdma_->connect();
    closed = echo_->closed;
    ASSERT_TRUE(client->send(std::span(frame).first(100)));
    for (int i = 0; i < 3; ++i) echo_->step(kFrameMs / 4);  // one of them starts the frame's time
  } while (echo_->closed > closed);
  ASSERT_TRUE(client->send(std::span(frame).subspan(100)));
  std::this_thread::sleep_for(std::chrono::milliseconds(kFrameMs * 3 / 2));
  for (int i = 0; i < 3; ++i) echo_->step(0);
  EXPECT_EQ(echo_->frames, 1);
  EXPECT_EQ(echo_->closed, closed);
}

TEST_F(Rdma, AReplyThatNeverCompletesIsReportedAndItsConnectionClosed) {
  Limits limits;
  limits.pin_ms = 50;
  make(kOrdinary, limits);
  rdma_->device().set_work(Work::kHeld);
  auto client = rdma_->connect();
  request(*client, 1);
  run_until([&] { return echo_->closed == 1; });
  EXPECT_EQ(echo_->overdue, 1);
  run_until([&] { return echo_->reader().live() == 0; });  // with the queue pair, after the linger
  EXPECT_EQ(rdma_->device().held(), 0u);
}

class RdmaFault : public Rdma, public testing::WithParamInterface<ibv_wc_status> {};

TEST_P(RdmaFault, AFailedCompletionClosesOnlyItsConnection) {
  make();
  rdma_->device().set_work(Work::kHeld);
  auto bad = rdma_->connect();
  auto good = rdma_->connect();
  request(*bad, 1);
  request(*bad, 2);
  run_until_held(2);
  request(*good, 3);
  run_until_held(3);
  size_t live_when_gone = 0;
  rdma_->device().on_pair_gone = [&] { live_when_gone = echo_->reader().live(); };
  rdma_->device().fail(0, GetParam());
  run_until([&] { return echo_->closed == 1; });
  EXPECT_EQ(live_when_gone, 3u);
  EXPECT_EQ(echo_->reader().live(), 1u);
  EXPECT_NE(echo_->reasons()[0].find(ibv_wc_status_str(GetParam())), std::string::npos)
      << echo_->reasons()[0];
  rdma_->device().run_all();
  EXPECT_EQ(reply(*good), echo_->expected_reply(3));
  rdma_->device().set_work(Work::kAtOnce);
  request(*good, 4);
  EXPECT_EQ(reply(*good), echo_->expected_reply(4));
  run_until([&] { return echo_->reader().live() == 0; });
  EXPECT_EQ(echo_->closed, 1);
  rdma_->device().on_pair_gone = {};
}

INSTANTIATE_TEST_SUITE_P(All, RdmaFault,
                         testing::Values(IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR,
                                         IBV_WC_REM_ACCESS_ERR, IBV_WC_LOC_PROT_ERR,
                                         IBV_WC_WR_FLUSH_ERR, IBV_WC_FATAL_ERR));

TEST_F(Rdma, AWriteToALostPeerClosesItsConnection) {
  make();
  std::unique_ptr<RdmaPeer> peer = connect_peer();
  ASSERT_TRUE(peer->send(test_frame(5, 8)).ok());
  peer.reset();  // and nothing calls hang_up()
  run_until([&] { return echo_->closed == 1; });
  EXPECT_EQ(echo_->reader().live(), 0u);
  EXPECT_NE(echo_->reasons()[0].find(status_text(IBV_WC_RETRY_EXC_ERR)), std::string::npos)
      << echo_->reasons()[0];
}

TEST_F(Rdma, ShuffledCompletionsLoseNothing) {
  const uint64_t seed = tests::seed();
  make();
  rdma_->device().set_work(Work::kShuffled, seed);
  std::array<std::unique_ptr<Client>, 3> clients;
  for (auto& client : clients) client = rdma_->connect();
  for (uint32_t number = 0; number < 60; number += 3) {
    for (auto& client : clients) {
      for (uint32_t i = 0; i < 3; ++i) request(*client, number + i);
    }
    for (auto& client : clients) {
      for (uint32_t i = 0; i < 3; ++i) ASSERT_EQ(reply(*client), echo_->expected_reply(number + i));
    }
  }
  run_until([&] { return echo_->reader().live() == 0; });
}

TEST_F(Rdma, FramesWaitWhileAllPinsAreInUse) {
  make();
  rdma_->device().set_work(Work::kHeld);
  std::vector<std::unique_ptr<Client>> clients;
  const auto all = static_cast<uint32_t>(epoch::kPinsPerReader) + 20;
  for (uint32_t i = 0; i * 10 < all; ++i) clients.push_back(rdma_->connect());
  echo_->rows_of = [](uint32_t number) { return 1 + number % 7; };  // each reply holds its pin
  for (uint32_t i = 0; i < all; ++i) request(*clients[i / 10], i);
  run_until([&] { return echo_->no_pin > 0; });
  EXPECT_EQ(echo_->reader().live(), epoch::kPinsPerReader);
  rdma_->device().set_work(Work::kAtOnce);
  for (uint32_t i = 0; i < all; ++i) {
    rdma_->device().run_all();
    ASSERT_EQ(reply(*clients[i / 10]), echo_->expected_reply(i)) << i;
  }
}

// ---- Memory

class Growing : public testing::Test {
 protected:
  void SetUp() override {
    for (size_t i = 0; i < memory_.size(); ++i) memory_[i] = static_cast<std::byte>(i * 7);
    RdmaOptions options;
    options.rules = test_rules();
    options.limits.frame_ms = 600'000;  // the peer sends no frame
    options.memory = [this] { return RowMemory{memory_.data(), bytes_}; };
    auto rdma = make_rdma(server_, options);
    ASSERT_TRUE(rdma.ok());
    rdma_ = std::move(rdma.value());
    ASSERT_TRUE(rdma_->start().ok());
    peer_ = open_peer(clients_);
    connect_to(*rdma_, *peer_, peer_->hello());
    events_ = rdma_->endpoint(0).poll(100);
    ASSERT_EQ(events_.size(), 1u);
    connection_ = events_[0].connection;
    server_.set_work(Work::kHeld);
  }
  // Post one row. Return whether the device reads it in place, up to its last byte.
  bool reads_in_place(size_t offset) {
    gather::GatherList list;
    const std::span<std::byte> head = list.header(64);
    std::fill(head.begin(), head.end(), std::byte{1});
    list.add(memory_.data() + offset, 512);
    rdma_->endpoint(0).post(connection_, std::move(list), epoch::Pin());
    const auto before = memory_[offset + 511];
    memory_[offset + 511] ^= std::byte{0xff};
    server_.run_all();
    memory_[offset + 511] = before;
    EXPECT_TRUE(peer_->progress().ok());
    std::vector<std::byte> reply(64 + 512);
    EXPECT_EQ(peer_->receive(reply), reply.size());
    EXPECT_TRUE(std::equal(reply.begin() + 64, reply.end() - 1, memory_.begin() + offset));
    rdma_->endpoint(0).poll(0);
    return reply.back() != before;
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(1u << 20);
  std::atomic<size_t> bytes_{256u << 10};
  FakeFabric fabric_;
  FakeVerbs server_{fabric_, kOrdinary};
  FakeVerbs clients_{fabric_, FakeLimits{}};
  std::unique_ptr<RdmaTransport> rdma_;
  std::unique_ptr<RdmaPeer> peer_;
  std::span<const Event> events_;
  ConnectionId connection_ = 0;
};

TEST_F(Growing, RowsAreCopiedUntilTheyAreRegistered) {
  EXPECT_TRUE(reads_in_place(0));
  EXPECT_TRUE(reads_in_place((256u << 10) - 512));
  EXPECT_FALSE(reads_in_place(256u << 10));
  EXPECT_FALSE(reads_in_place((256u << 10) - 256)) << "half of it lies outside";
  bytes_ = 512u << 10;
  const uint64_t until = base::monotonic_ns() + 60'000 * kMs;
  while (!reads_in_place(256u << 10) && base::monotonic_ns() < until) {
  }
  EXPECT_TRUE(reads_in_place(256u << 10));
  EXPECT_TRUE(reads_in_place((256u << 10) - 256)) << "over the seam of two registrations";
  EXPECT_FALSE(reads_in_place(512u << 10));
}

TEST_F(Growing, RowsAreCopiedWhereRegistrationIsRefused) {
  EXPECT_TRUE(reads_in_place(0));
  server_.refuse_registration(EOPNOTSUPP);
  bytes_ = 512u << 10;
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(reads_in_place(256u << 10));
}

TEST(RdmaSetUp, RefusesMemoryThatTheDeviceCannotRegister) {
  FakeFabric fabric;
  FakeVerbs verbs(fabric, kOrdinary);
  verbs.refuse_registration(EOPNOTSUPP);
  std::vector<std::byte> rows(4096);
  RdmaOptions options;
  options.rules = test_rules();
  options.memory = [&] { return RowMemory{rows.data(), rows.size()}; };
  const auto rdma = make_rdma(verbs, options);
  EXPECT_EQ(rdma.status().code(), Code::kFailedPrecondition);
}

TEST(RdmaSetUp, RefusesADeviceThatIsTooSmall) {
  FakeFabric fabric;
  FakeVerbs verbs(fabric, {1, 0, 8, 16});
  RdmaOptions options;
  options.rules = test_rules();
  const auto rdma = make_rdma(verbs, options);
  EXPECT_EQ(rdma.status().code(), Code::kFailedPrecondition);
  EXPECT_NE(rdma.status().message().find("use another device"), std::string_view::npos);
}

TEST(RdmaSetUp, AMissingDeviceIsReportedWithARemedy) {
  const auto opened = open_verbs("no_such_device");
  EXPECT_EQ(opened.status().code(), Code::kFailedPrecondition);
  const std::string text(opened.status().message());
  EXPECT_TRUE(text.find("add soft-RoCE") != std::string::npos ||
              text.find("this machine has") != std::string::npos ||
              text.find("install rdma-core's libibverbs1") != std::string::npos)
      << text;
}

// ---- A peer that breaks the rules

TEST_F(Rdma, RefusesAnInvalidHello) {
  make();
  const auto peer = open_peer(rdma_->clients());
  const auto refuses = [&](const std::function<void(RdmaHello&)>& change) {
    RdmaHello hello = peer->hello();
    change(hello);
    return rdma_->rdma().accept({"peer"}, hello).status().code() == Code::kInvalidArgument;
  };
  EXPECT_TRUE(refuses([](RdmaHello& h) { h.ring_bytes = kRingBytesMin - kLineBytes; }));
  EXPECT_TRUE(refuses([](RdmaHello& h) { h.ring_bytes = kRingBytesMax + kLineBytes; }));
  EXPECT_TRUE(refuses([](RdmaHello& h) { h.ring_bytes = kRingBytesMin + 1; }));
  EXPECT_TRUE(refuses([](RdmaHello& h) { h.ring_messages = 0; }));
  EXPECT_TRUE(refuses([](RdmaHello& h) { h.ring_messages = kRingMessagesMax + 1; }));
  EXPECT_TRUE(refuses([](RdmaHello& h) { h.pair.number = 0; }));
  EXPECT_TRUE(refuses([](RdmaHello& h) { h.pair.number = 1u << 24; }));
  EXPECT_TRUE(refuses([](RdmaHello& h) { h.pair.mtu = IBV_MTU_4096 + 1; }));
  EXPECT_EQ(rdma_->refused(), 8u);
  EXPECT_TRUE(rdma_->rdma().accept({"peer"}, peer->hello()).ok());
}

// The peer's memory is not where the peer says: the writes fail and its connection is closed.
TEST_F(Rdma, ARingWithAWrongKeyClosesItsConnection) {
  make();
  const auto peer = connect_peer([](RdmaHello& hello) { hello.ring_key += 1000; });
  ASSERT_TRUE(peer->send(test_frame(5, 8)).ok());
  run_until([&] { return echo_->closed == 1; });
  EXPECT_NE(echo_->reasons()[0].find(status_text(IBV_WC_REM_ACCESS_ERR)), std::string::npos)
      << echo_->reasons()[0];
  EXPECT_EQ(echo_->reader().live(), 0u);
}

}  // namespace
}  // namespace petps::transport
