// What only the tcp transport with TLS does: handshakes and their limits, identity, damage and
// renewal. The contract suite and tcp_limits_test.cc run over TLS too. Does not cover: certificates
// and streams themselves (tests/native/tls).
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tls_client.h"
#include "transport/limits.h"
#include "transport/tcp/handshaker.h"
#include "transport_echo.h"

namespace petps::transport {
namespace {

constexpr uint32_t kLoopback = 0x7f000001;

// Passes bytes on until `left` are sent, then closes. The byte `flipped` of the stream is changed.
class DamagingClient final : public Client {
 public:
  DamagingClient(uint16_t port, size_t left, size_t flipped = SIZE_MAX)
      : raw_(connect_plain(port)), left_(left), flipped_(flipped) {}
  bool send(std::span<const std::byte> bytes) override {
    std::vector<std::byte> part(bytes.begin(), bytes.begin() + std::min(left_, bytes.size()));
    if (flipped_ >= sent_ && flipped_ < sent_ + part.size()) part[flipped_ - sent_] ^= std::byte{4};
    raw_->send(part);
    sent_ += part.size();
    left_ -= part.size();
    if (left_ == 0) raw_->close();
    return left_ > 0;
  }
  size_t receive(std::span<std::byte> out, int timeout_ms) override {
    return left_ == 0 ? 0 : raw_->receive(out, timeout_ms);
  }
  void end_sending() override { raw_->end_sending(); }
  void close() override { raw_->close(); }
  size_t sent() const { return sent_; }

 private:
  const std::unique_ptr<Client> raw_;
  size_t left_;
  const size_t flipped_;
  size_t sent_ = 0;
};

// Return whether this kernel can encrypt. If PETPS_TEST_KERNEL_TLS is set, it must.
bool kernel_has_tls() {
  const int listening = ::socket(AF_INET, SOCK_STREAM, 0);
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(kLoopback);
  socklen_t length = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  const bool is_connected =
      ::bind(listening, generic, length) == 0 && ::listen(listening, 1) == 0 &&
      ::getsockname(listening, generic, &length) == 0 && ::connect(fd, generic, length) == 0;
  EXPECT_TRUE(is_connected);
  const bool has_tls = ::setsockopt(fd, IPPROTO_TCP, TCP_ULP, "tls", 4) == 0;
  ::close(fd);
  ::close(listening);
  const bool is_promised = std::getenv("PETPS_TEST_KERNEL_TLS") != nullptr;
  EXPECT_TRUE(has_tls || !is_promised) << "modprobe tls";
  return has_tls;
}

class TlsDoor : public testing::Test {
 protected:
  TlsDoor() {
    options_.rules = test_rules();
    options_.memory = memory_;
    options_.tls = test_tls().server;
    options_.handshakes.handshake_ms = 600'000;  // however slow this machine is
  }
  void serve() {
    auto tcp = make_tcp(options_);
    ASSERT_TRUE(tcp.ok()) << tcp.status().to_string();
    transport_ = std::move(tcp.value());
    ASSERT_TRUE(transport_->start().ok());
    echo_ = std::make_unique<Echo>(*transport_, 0, domain_);
    echo_->on_frame = [this](ConnectionId id) {
      const std::lock_guard lock(mutex_);
      identity_ = echo_->endpoint().identity(id);
    };
    echo_->start();
  }
  std::unique_ptr<Client> plain(uint32_t from = 0) {
    return connect_plain(transport_->port(), from);
  }
  std::unique_ptr<TlsClient> connect() { return connect_tls(plain()); }
  void gather(GatherMode mode) { options_.gather = std::make_shared<const GatherChoice>(mode); }
  uint64_t by_kernel() const { return echo_->endpoint().counters().opened_kernel_tls; }
  bool is_served(Client& client) { return echo_->answers(client, 3); }
  bool wait_until(const std::function<bool()>& condition) { return echo_->wait_until(condition); }
  PeerIdentity identity() {
    const std::lock_guard lock(mutex_);
    return identity_;
  }

  TcpOptions options_;
  std::shared_ptr<MemoryBudget> memory_ = std::make_shared<MemoryBudget>();
  epoch::Domain domain_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Echo> echo_;
  std::mutex mutex_;  // guards identity_
  PeerIdentity identity_;
};

TEST_F(TlsDoor, APeerInPlainTextIsToldToUseTls) {
  serve();
  auto peer = plain();
  ASSERT_TRUE(peer->send(test_frame(1, 8)));
  EXPECT_EQ(peer->read_to_end(),
            "FAILED_PRECONDITION: this port speaks TLS: use petps+tls:// in the client's URL");
  EXPECT_EQ(transport_->handshakes().failed, 1u);
  EXPECT_EQ(echo_->opened, 0);
  EXPECT_TRUE(is_served(*connect()));
  EXPECT_EQ(transport_->handshakes().finished, 1u);
}

TEST_F(TlsDoor, KnowsTheNamesOfAClientCertificate) {
  const tests::Authority& authority = *test_tls().authority;
  const tests::KeyPair own = authority.issue_local("strict");
  options_.tls = std::move(tls::ServerContext::open({own.certificate, own.key, authority.ca(),
                                                     tls::ClientCertificates::kRequired}))
                     .value();
  serve();
  tests::CertificateSpec spec;
  spec.names = {"DNS:ranker.example", "URI:spiffe://x/ranker"};
  const tests::KeyPair theirs = authority.issue("ranker", spec);
  const auto context =
      std::move(tls::ClientContext::open({authority.ca(), theirs.certificate, theirs.key})).value();
  TlsClient named(plain(), *context);
  ASSERT_TRUE(named.shake());
  EXPECT_TRUE(is_served(named));
  EXPECT_TRUE(identity().encrypted);
  EXPECT_EQ(identity().certificate_names,
            (std::vector<std::string>{"ranker.example", "spiffe://x/ranker"}));
  TlsClient nameless(plain(), *test_tls().client);
  (void)nameless.shake();
  nameless.send(test_frame(1, 8));
  EXPECT_EQ(nameless.read_to_end(), "");
  EXPECT_TRUE(wait_until([&] { return transport_->handshakes().failed == 1; }));
  EXPECT_EQ(echo_->opened, 1);
}

TEST_F(TlsDoor, SurvivesACutAtEveryByte) {
  options_.handshakes.at_once = options_.handshakes.of_one_peer = 10'000;  // none is refused
  serve();
  auto good = connect();
  ASSERT_TRUE(is_served(*good));
  auto uncut = std::make_unique<DamagingClient>(transport_->port(), SIZE_MAX);
  const DamagingClient& sent = *uncut;
  auto whole = connect_tls(std::move(uncut));
  const size_t handshake = sent.sent();
  ASSERT_TRUE(is_served(*whole));
  const size_t bytes = sent.sent();
  for (size_t cut = 1; cut < bytes; ++cut) {
    const int opened = echo_->opened;
    const int closed = echo_->closed;
    auto peer = connect_tls(std::make_unique<DamagingClient>(transport_->port(), cut));
    peer->send(test_frame(3, 8));
    if (cut >= handshake) {  // it has become a connection
      ASSERT_TRUE(wait_until([&] { return echo_->closed == closed + 1; })) << cut;
      const bool is_truncated =
          echo_->reasons().back().find("truncated frame") != std::string::npos;
      EXPECT_EQ(is_truncated, cut > handshake) << cut << ": " << echo_->reasons().back();
      EXPECT_EQ(echo_->opened, opened + 1);
    }
    if (cut % 16 == 0) {
      EXPECT_TRUE(is_served(*good));
    }
  }
  EXPECT_TRUE(wait_until([&] { return transport_->handshakes().failed == handshake - 1; }));
  EXPECT_EQ(echo_->reader().live(), 0u);
  whole->close();
  good->close();
  EXPECT_TRUE(wait_until([&] { return memory_->used() == 0; }));
}

TEST_F(TlsDoor, AChangedByteClosesItsConnectionAndIsNotAnswered) {
  serve();
  auto good = connect();
  auto uncut = std::make_unique<DamagingClient>(transport_->port(), SIZE_MAX);
  const DamagingClient& sent = *uncut;
  auto whole = connect_tls(std::move(uncut));
  const size_t handshake = sent.sent();
  ASSERT_TRUE(is_served(*whole));
  const size_t bytes = sent.sent();
  const int frames = echo_->frames;
  int closed = 0;
  for (size_t at = handshake + 5; at < bytes; ++at) {  // behind the head of the record
    auto peer = connect_tls(std::make_unique<DamagingClient>(transport_->port(), SIZE_MAX, at));
    ASSERT_TRUE(peer->send(test_frame(3, 8)));
    EXPECT_EQ(peer->read_to_end(), "");
    ++closed;
    ASSERT_TRUE(wait_until([&] { return echo_->closed == closed; })) << at;
    EXPECT_NE(echo_->reasons().back().find("TLS failed"), std::string::npos)
        << echo_->reasons().back();
  }
  EXPECT_EQ(echo_->frames, frames);
  EXPECT_EQ(echo_->endpoint().counters().closed_for_cause, static_cast<uint64_t>(closed));
  EXPECT_TRUE(is_served(*good));
}

TEST_F(TlsDoor, NewKeysAreUsed) {
  gather(GatherMode::kCopy);
  serve();
  auto client = connect();
  for (int i = 0; i < 5; ++i) {
    client->update_keys();
    EXPECT_TRUE(is_served(*client));
  }
}

TEST_F(TlsDoor, TheKernelEncryptsWhereItCan) {
  gather(GatherMode::kSendmsg);
  serve();
  auto client = connect();
  EXPECT_TRUE(is_served(*client));
  EXPECT_EQ(by_kernel(), kernel_has_tls() ? 1u : 0u);
  EXPECT_TRUE(identity().encrypted);
}

TEST_F(TlsDoor, TheKernelEncryptsNothingWhereRowsAreCopied) {
  gather(GatherMode::kCopy);
  serve();
  auto client = connect();
  EXPECT_TRUE(is_served(*client));
  EXPECT_EQ(by_kernel(), 0u);
}

TEST_F(TlsDoor, TheKernelKeepsItsKeySoAPeerThatAsksForANewOneConnectsAgain) {
  gather(GatherMode::kSendmsg);
  serve();
  auto client = connect();
  ASSERT_TRUE(is_served(*client));
  client->update_keys();
  if (by_kernel() == 0) {
    EXPECT_TRUE(is_served(*client));
    return;
  }
  client->send(test_frame(1, 8));
  EXPECT_EQ(client->read_to_end(), "");
  ASSERT_TRUE(wait_until([&] { return echo_->closed == 1; }));
  EXPECT_NE(echo_->reasons().back().find("asks for new keys"), std::string::npos)
      << echo_->reasons().back();
  EXPECT_TRUE(is_served(*connect()));
}

TEST_F(TlsDoor, ASlowRecordIsASlowFrame) {
  options_.limits.frame_ms = 100;
  serve();
  std::unique_ptr<TlsClient> good, slow;
  DamagingClient* raw = nullptr;
  // A connection without a frame yet may be closed after 100 ms.
  ASSERT_TRUE(wait_until([&] { return is_served(*(good = connect())); }));
  ASSERT_TRUE(wait_until([&] {
    auto uncut = std::make_unique<DamagingClient>(transport_->port(), SIZE_MAX);
    raw = uncut.get();
    slow = connect_tls(std::move(uncut));
    return is_served(*slow);
  }));
  const std::byte head[] = {std::byte{23}, std::byte{3}, std::byte{3}, std::byte{1}, std::byte{0}};
  ASSERT_TRUE(raw->send(head));
  EXPECT_NE(slow->read_to_end().find("a frame was not complete 100 ms"), std::string::npos);
  EXPECT_TRUE(is_served(*good));
}

TEST_F(TlsDoor, StalledHandshakesAreClosed) {
  options_.handshakes.handshake_ms = 50;
  serve();
  auto silent = plain();
  auto half = plain();
  const std::byte head[] = {std::byte{22}, std::byte{3}, std::byte{1}, std::byte{1}, std::byte{0}};
  ASSERT_TRUE(half->send(head));
  EXPECT_EQ(silent->read_to_end(), "");
  EXPECT_EQ(half->read_to_end(), "");
  EXPECT_EQ(transport_->handshakes().failed, 2u);
  EXPECT_EQ(echo_->opened, 0);
}

TEST_F(TlsDoor, BoundsTheHandshakesOfOnePeerAndOfAll) {
  options_.handshakes = {.at_once = 6, .of_one_peer = 4, .handshake_ms = 600'000};
  serve();
  std::vector<std::unique_ptr<Client>> silent;
  for (int i = 0; i < 4; ++i) silent.push_back(plain());
  EXPECT_EQ(plain()->read_to_end(), "") << "the fifth of this address";
  EXPECT_EQ(transport_->handshakes().refused, 1u);
  auto neighbour = connect_tls(plain(kLoopback + 1));
  EXPECT_TRUE(is_served(*neighbour));
  for (uint32_t i = 1; i <= 2; ++i) silent.push_back(plain(kLoopback + i));
  auto seventh = connect_tls(plain(kLoopback + 7));
  EXPECT_TRUE(is_served(*seventh));
  EXPECT_EQ(silent[0]->read_to_end(), "") << "the oldest of the address with the most";
  EXPECT_EQ(transport_->handshakes().refused, 2u);
  EXPECT_TRUE(is_served(*neighbour));
  silent.clear();
  EXPECT_TRUE(wait_until([&] { return transport_->handshakes().failed == 5; }));
  EXPECT_TRUE(is_served(*connect()));
}

TEST_F(TlsDoor, AFloodFromManyAddressesKeepsNobodyOut) {
  options_.handshakes = {.at_once = 4, .of_one_peer = 4, .handshake_ms = 600'000};
  serve();
  std::vector<std::unique_ptr<Client>> silent;
  for (uint32_t i = 1; i <= 20; ++i) silent.push_back(plain(kLoopback + i));
  ASSERT_TRUE(wait_until([&] { return transport_->handshakes().refused == 16; }));
  EXPECT_TRUE(is_served(*connect()));
  EXPECT_EQ(transport_->handshakes().refused, 17u);
  EXPECT_EQ(silent[16]->read_to_end(), "") << "the oldest of all";
  const std::vector<std::string> lines = transport_->refusals();
  ASSERT_EQ(lines.size(), 1u) << "of any number of peers";
  EXPECT_NE(lines[0].find("refused 17 peers: too many TLS handshakes"), std::string::npos);
  EXPECT_NE(lines[0].find("127.0.0.18"), std::string::npos) << lines[0];
}

TEST_F(TlsDoor, AThousandHandshakesAtOnceDelayNoRequest) {
  constexpr uint32_t kPeers = 1000;
  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  files.rlim_cur = std::min<rlim_t>(files.rlim_max, 4096);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  if (files.rlim_cur < 2 * kPeers + 100) GTEST_SKIP() << "needs 2,100 file descriptors";
  options_.handshakes = {.at_once = kPeers, .of_one_peer = kPeers, .handshake_ms = 600'000};
  options_.limits.frame_ms = 600'000;  // a peer that sends no request stays, however slow this is
  serve();
  auto good = connect();
  std::vector<std::unique_ptr<TlsClient>> peers;
  for (uint32_t i = 0; i < kPeers; ++i) {
    peers.push_back(std::make_unique<TlsClient>(plain(), *test_tls().client));
    if (i % 10 == 0) {
      ASSERT_TRUE(is_served(*good));
    }
  }
  EXPECT_EQ(transport_->handshakes().finished, 1u) << "each waits for its peer";
  for (uint32_t i = 0; i < kPeers; ++i) {
    ASSERT_TRUE(peers[i]->shake()) << i;
    if (i % 10 == 0) {
      ASSERT_TRUE(is_served(*good));
    }
  }
  ASSERT_TRUE(wait_until([&] { return transport_->handshakes().finished == kPeers + 1; }));
  EXPECT_TRUE(is_served(*peers.back()));
  EXPECT_EQ(transport_->handshakes().refused + transport_->handshakes().failed, 0u);
  EXPECT_GE(memory_->used(), (kPeers + 1) * tls::Stream::kBytes);
}

TEST_F(TlsDoor, RenewedFilesLoseNoRequest) {
  const tests::Authority& authority = *test_tls().authority;
  const tests::KeyPair own = authority.issue_local("renewed");
  const auto context =
      std::move(tls::ServerContext::open({own.certificate, own.key, "", {}})).value();
  options_.tls = context;
  serve();
  std::atomic<bool> is_over{false};
  std::atomic<int> renewals{0};
  std::atomic<int> failures{0};
  std::thread renewing([&] {
    while (!is_over) {
      authority.issue_local("renewed");
      if (context->reload().ok()) ++renewals;  // else: between the two files
    }
  });
  auto lasting = connect();
  int calls = 0;
  while (calls < 100 || renewals < 20) {
    if (!is_served(*connect()) || !is_served(*lasting)) ++failures;
    ++calls;
  }
  is_over = true;
  renewing.join();
  EXPECT_EQ(failures, 0);
}

TEST_F(TlsDoor, StoppingClosesHandshakes) {
  serve();
  auto silent = plain();
  ASSERT_TRUE(wait_until([&] { return memory_->used() >= kHandshakeBytes; }));
  transport_->stop_accepting();
  EXPECT_EQ(silent->read_to_end(), "");
  EXPECT_EQ(memory_->used(), 0u);
}

}  // namespace
}  // namespace petps::transport
