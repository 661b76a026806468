// Behaviour that only zero-copy has: rows that are read after their list was posted, and what must
// wait for that. Does not cover: a network card that reads late (tests/lab). Loopback copies when
// a packet is received, so only what waits in the send queue is read late here.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>

#include "transport/tcp/tcp.h"
#include "transport_echo.h"

namespace petps::transport {
namespace {

class Zerocopy : public testing::Test {
 protected:
  void make(const Limits& limits = {}) {
    TcpOptions options;
    options.gather = std::make_shared<const GatherChoice>(GatherMode::kZerocopy);
    options.limits = limits;
    options.rules = test_rules();
    options.host = host_;
    auto tcp = make_tcp(options);
    if (!tcp.ok() && host_ == "::1") return;
    ASSERT_TRUE(tcp.ok()) << tcp.status().to_string();
    transport_ = std::move(tcp.value());
    ASSERT_TRUE(transport_->start().ok());
    echo_ = std::make_unique<Echo>(*transport_, 0, domain_, kRowBytes);
    echo_->rows_of = [](uint32_t number) { return number == kSmall ? 3 : 1000; };
  }
  void serve(const Limits& limits = {}) {
    make(limits);
    echo_->start();
  }
  std::unique_ptr<Client> connect() { return backend_named("tcp_zerocopy").connect(*transport_); }
  // Answer requests until rows wait in the send queue, which is more than any window takes.
  void fill_send_queue(Client& mute, uint32_t requests) {
    for (uint32_t i = 0; i < requests; ++i) ASSERT_TRUE(mute.send(test_frame(kFirst + i, 8)));
    ASSERT_TRUE(echo_->wait_until([&] { return counters().lists_zerocopy > 0; }));
    ASSERT_TRUE(echo_->wait_until([&] { return echo_->reader().live() > 0; }));
  }
  const Counters& counters() { return echo_->endpoint().counters(); }
  void expect_served(Client& good, uint32_t number = kFirst) {
    EXPECT_TRUE(echo_->answers(good, number));
  }

  // One connection is closed, all pins are dropped, and `good` is still served.
  void expect_closed_and_released(Client& good, uint32_t number = kFirst) {
    EXPECT_TRUE(echo_->wait_until([&] { return echo_->closed == 1; }));
    EXPECT_TRUE(echo_->wait_until([&] { return echo_->reader().live() == 0; }));
    expect_served(good, number);
  }

  static constexpr uint32_t kSmall = 1;
  static constexpr uint32_t kFirst = 10;
  static constexpr size_t kRowBytes = 4000;  // 4 MB per reply
  epoch::Domain domain_;                     // outlives every pin
  std::string host_ = "127.0.0.1";
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Echo> echo_;
};

TEST_F(Zerocopy, RowsAreReadAfterTheyWerePosted) {
  make();
  auto mute = connect();
  ASSERT_TRUE(mute->send(test_frame(kFirst, 8)));
  while (counters().lists_zerocopy == 0) echo_->step(50);
  for (int i = 0; i < 5; ++i) echo_->step(1);
  EXPECT_EQ(echo_->reader().live(), 1u) << "the network still reads";
  const std::vector<std::byte> posted = echo_->expected_reply(kFirst);
  std::fill(echo_->rows().begin(), echo_->rows().end(), std::byte{0xEE});
  echo_->start();
  const std::vector<std::byte> reply = mute->receive_frame();
  ASSERT_EQ(reply.size(), posted.size());
  EXPECT_NE(reply, posted) << "otherwise no test here could detect a pin that is dropped too early";
  EXPECT_TRUE(echo_->wait_until([&] { return echo_->reader().live() == 0; }));
}

// The domain may be destroyed next, and then a pin must not exist any more.
TEST_F(Zerocopy, EndDropsEveryPin) {
  make();
  auto mute = connect();
  ASSERT_TRUE(mute->send(test_frame(kFirst, 8)));
  while (counters().lists_zerocopy == 0) echo_->step(50);
  ASSERT_EQ(echo_->reader().live(), 1u);
  transport_->stop_accepting();
  transport_->end();
  EXPECT_EQ(echo_->reader().live(), 0u);
}

TEST_F(Zerocopy, SmallListsAreCopied) {
  serve();
  auto client = connect();
  EXPECT_TRUE(echo_->answers(*client, kSmall));
  EXPECT_EQ(counters().lists_zerocopy, 0u);
  EXPECT_EQ(counters().lists_copied, 1u);
}

TEST_F(Zerocopy, APeerThatStopsReadingIsClosedAndItsRowsReleased) {
  Limits limits;
  limits.pin_ms = 2'000;
  limits.output_stall_ms = 600'000;  // so that only the pin's limit applies
  limits.output_pause_bytes = limits.output_close_bytes;
  serve(limits);
  auto mute = connect();
  auto good = connect();
  fill_send_queue(*mute, 2);
  expect_closed_and_released(*good, kSmall);  // the limit of pins is this one's too
  EXPECT_GE(echo_->overdue, 1);
  EXPECT_NE(echo_->reasons()[0].find("rows held too long"), std::string::npos);
}

TEST_F(Zerocopy, APeerThatDiesReleasesItsRows) {
  serve();
  auto dying = connect();
  auto good = connect();
  fill_send_queue(*dying, 2);
  dying->close();  // unread bytes: the kernel resets the connection
  expect_closed_and_released(*good);
}

TEST_F(Zerocopy, AConnectionThatIsClosedForCauseReleasesItsRows) {
  Limits limits;
  limits.output_close_bytes = 8 << 20;
  limits.output_pause_bytes = 64 << 20;
  serve(limits);
  auto mute = connect();
  auto good = connect();
  fill_send_queue(*mute, 6);
  expect_closed_and_released(*good);
}

TEST_F(Zerocopy, ASlowPeerHoldsFewPins) {
  make();
  echo_->rows_of = [](uint32_t) { return 10; };  // 40 KB
  echo_->start();
  auto mute = connect();
  auto good = connect();
  for (uint32_t i = 0; i < 400; ++i) ASSERT_TRUE(mute->send(test_frame(kFirst, 8)));
  ASSERT_TRUE(echo_->wait_until([&] { return echo_->reader().live() > 0; }));
  for (int i = 0; i < 20; ++i) {
    expect_served(*good);
    EXPECT_LE(echo_->reader().live(), 40u);  // 16 of each connection, and those being posted
  }
  EXPECT_EQ(echo_->no_pin, 0);
}

TEST_F(Zerocopy, DestroyingATransportWaitsForItsRows) {
  serve();
  auto mute = connect();
  fill_send_queue(*mute, 2);
  epoch::Reader& reader = echo_->reader();
  echo_->stop();
  EXPECT_GT(reader.live(), 0u);
  EXPECT_GT(echo_->endpoint().pending_posts(), 0u);
  transport_.reset();
  EXPECT_EQ(reader.live(), 0u);
}

// Give the calling thread, and the threads it starts, a network of their own. Return false if not
// permitted.
bool enter_own_network() {
  if (::unshare(CLONE_NEWNET) != 0) return false;
  const int fd = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ifreq request{};
  std::strcpy(request.ifr_name, "lo");
  request.ifr_flags = IFF_UP;
  const bool up = ::ioctl(fd, SIOCSIFFLAGS, &request) == 0;
  ::close(fd);
  return up;
}

bool set_optmem(const char* bytes) {
  const int fd = ::open("/proc/sys/net/core/optmem_max", O_WRONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const bool written = ::write(fd, bytes, std::strlen(bytes)) > 0;
  ::close(fd);
  return written;
}

// A queue of packets below the socket acts as a slow network card: it still reads rows long after
// the connection was reset.
TEST_F(Zerocopy, ClosingKeepsRowsUntilTheLastPacketIsGone) {
  bool allowed = false;
  std::thread apart([&] {
    allowed = enter_own_network() &&
              std::system("tc qdisc add dev lo root tbf rate 25kbit burst 128kb limit 4mb") == 0;
    if (!allowed) return;
    Limits limits;
    limits.pin_ms = 100;
    serve(limits);
    auto client = connect();
    ASSERT_TRUE(client->send(test_frame(kFirst, 8)));
    std::thread reading([&] { client->read_to_end(60'000); });  // so that packets are in flight
    EXPECT_TRUE(echo_->wait_until([&] { return echo_->closed == 1; }));
    EXPECT_TRUE(echo_->wait_until([&] { return echo_->reasons().size() == 2; }))
        << "closed, then reported as still being read";
    EXPECT_NE(
        echo_->reasons().back().find("was closed 100 ms ago and the network card still reads 1"),
        std::string::npos)
        << echo_->reasons().back();
    EXPECT_EQ(echo_->reader().live(), 1u);
    EXPECT_TRUE(echo_->wait_until([&] { return echo_->reader().live() == 0; }, 60'000));
    EXPECT_EQ(echo_->overdue, 2);
    echo_->stop();
    EXPECT_EQ(echo_->endpoint().pending_posts(), 0u);
    reading.join();
  });
  apart.join();
  if (!allowed) GTEST_SKIP() << "needs permission to make a network namespace, and tc with tbf";
}

TEST_F(Zerocopy, CompletionsComeOverIpv6Too) {
  host_ = "::1";
  make();
  if (transport_ == nullptr) GTEST_SKIP() << "no IPv6 here";
  echo_->start();
  const int fd = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_port = htons(transport_->port());
  address.sin6_addr = in6addr_loopback;
  ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  const std::vector<std::byte> request = test_frame(kFirst, 8);
  ASSERT_EQ(::send(fd, request.data(), request.size(), 0), static_cast<ssize_t>(request.size()));
  std::vector<std::byte> reply(echo_->expected_reply(kFirst).size());
  ASSERT_EQ(::recv(fd, reply.data(), reply.size(), MSG_WAITALL),
            static_cast<ssize_t>(reply.size()));
  EXPECT_EQ(reply, echo_->expected_reply(kFirst));
  EXPECT_GT(counters().zerocopy_sends, 0u);
  EXPECT_TRUE(echo_->wait_until([&] { return echo_->reader().live() == 0; }));
  ::close(fd);
}

TEST_F(Zerocopy, WithoutMemoryForCompletionsTheKernelCopies) {
  bool allowed = false;
  std::thread apart([&] {
    // Per network since Linux 6.8; before, the file does not exist in a separate network namespace.
    allowed = enter_own_network() && set_optmem("1");
    if (!allowed) return;
    serve();
    auto client = connect();
    for (uint32_t number = kFirst; number < kFirst + 20; ++number)
      ASSERT_TRUE(echo_->answers(*client, number)) << number;
    EXPECT_EQ(counters().zerocopy_refused, 20u);
    EXPECT_EQ(counters().zerocopy_sends, 0u);
    echo_->stop();
  });
  apart.join();
  if (!allowed)
    GTEST_SKIP() << "needs permission to make a network namespace with its own optmem_max";
}

}  // namespace
}  // namespace petps::transport
