// Where a token goes: to a server of this machine or over TLS, after the server's certificate was
// verified, and nowhere else. Does not cover: what a server does with it (tests/native/server).
#include "petps_client/token.h"

#include <ifaddrs.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "access/access.h"
#include "fixtures.h"
#include "tests/support/certificates/certificates.h"

namespace petps::client::testing {
namespace {

using base::Code;

constexpr std::string_view kToken = "s3cret-token";

// Return an IPv4 address of this machine that is no loopback address; 0 if it has none.
in_addr_t address_of_a_network() {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return 0;
  in_addr_t found = 0;
  for (const ifaddrs* at = all; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr || at->ifa_addr->sa_family != AF_INET) continue;
    const in_addr_t address = reinterpret_cast<sockaddr_in*>(at->ifa_addr)->sin_addr.s_addr;
    if (ntohl(address) >> 24 != IN_LOOPBACKNET) found = address;
  }
  freeifaddrs(all);
  return found;
}

std::string text_of(in_addr_t address) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&address);
  std::string text;
  for (int i = 0; i < 4; ++i) text += (i == 0 ? "" : ".") + std::to_string(bytes[i]);
  return text;
}

// Listens on an address of this machine, and takes what one client sends.
class Listener {
 public:
  explicit Listener(in_addr_t address) : address_(address) {
    sockaddr_in at = loopback(0);
    at.sin_addr.s_addr = address;
    socklen_t size = sizeof at;
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(0, bind(listener_, reinterpret_cast<sockaddr*>(&at), size));
    EXPECT_EQ(0, listen(listener_, 1));
    EXPECT_EQ(0, getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &size));
    port_ = ntohs(at.sin_port);
  }
  ~Listener() { close(listener_); }
  std::string url() const {
    return "petps://" + text_of(address_) + ":" + std::to_string(port_) + "/ranking";
  }
  // Return all bytes of the client that has connected, which must have ended by now.
  std::string received() const {
    const int client = accept(listener_, nullptr, nullptr);
    std::string all;
    char bytes[4096];
    for (ssize_t n; (n = recv(client, bytes, sizeof bytes, 0)) > 0;)
      all.append(bytes, static_cast<size_t>(n));
    close(client);
    return all;
  }

 private:
  in_addr_t address_;
  int listener_ = -1;
  uint16_t port_ = 0;
};

Options with_token() {
  Options options;
  options.token = kToken;
  options.deadline_ms = 600'000;
  return options;
}

TEST(Token, IsReadToTheEndOfAPipe) {
  int ends[2];
  ASSERT_EQ(0, pipe(ends));
  Options options;
  options.token_file = "/proc/self/fd/" + std::to_string(ends[0]);
  std::thread writer([&] {
    EXPECT_EQ(6, write(ends[1], "first-", 6));
    for (int unread = 1; unread > 0; std::this_thread::sleep_for(std::chrono::milliseconds(1)))
      ASSERT_EQ(0, ioctl(ends[0], FIONREAD, &unread));
    EXPECT_EQ(7, write(ends[1], "second\n", 7));
    close(ends[1]);
  });
  const auto token = read_token(options);
  writer.join();
  close(ends[0]);
  ASSERT_TRUE(token.ok()) << token.status().to_string();
  EXPECT_EQ("first-second", token.value());
}

TEST(Token, IsNotSentToAnotherMachineWithoutTls) {
  const in_addr_t address = address_of_a_network();
  if (address == 0) GTEST_SKIP() << "this machine has no IPv4 address but loopback";
  const Listener listener(address);
  expect_error(Client::connect(listener.url(), with_token()).status(), Code::kFailedPrecondition,
               {text_of(address),
                "a token is not sent over an unencrypted connection to another"
                " machine: use petps+tls://"});
  EXPECT_EQ(listener.received(), "");
}

TEST(Token, IsSentToThisMachineUntilItIsRevoked) {
  access::Grant grant;
  grant.name = "test";
  grant.has_token = true;
  grant.token = access::hash_token(kToken);
  grant.roles = access::kAllRoles;
  server::ServerOptions options;
  options.gate = std::make_shared<access::Gate>(access::Mode::kGrants);
  options.gate->replace({grant});
  RealServer server(options);
  server.add_table("users", codec::Dtype::kF32, 4, 100, 10);
  server.start();
  const auto client = connect_to(server.url(), with_token());
  const std::vector<uint64_t> keys = first_keys(10);
  std::vector<float> rows(keys.size() * 4);
  ASSERT_TRUE(client->pull("users", keys, rows).ok());
  options.gate->replace({});
  base::Status status;
  while ((status = client->pull("users", keys, rows).status()).ok()) std::this_thread::yield();
  expect_error(status, Code::kUnauthenticated, {"token"});  // and not when the deadline is over
}

TEST(Token, IsNotSentToAServerWithAWrongCertificate) {
  const tests::Authority authority;
  const tests::Authority other("other");
  const tests::KeyPair files = authority.issue_local();
  server::ServerOptions options;
  auto context =
      tls::ServerContext::open({files.certificate, files.key, "", tls::ClientCertificates::kOff});
  ASSERT_TRUE(context.ok()) << context.status().to_string();
  options.tls = context.value();
  // No grant has the token, so the gate counts a failure each time that it arrives.
  options.gate = std::make_shared<access::Gate>(access::Mode::kGrants);
  RealServer server(options);
  server.start();
  const std::string url = "petps+tls://" + server.address() + "/ranking";
  Options wrong_authority = with_token();
  wrong_authority.tls.ca = other.ca();
  Options wrong_name = with_token();
  wrong_name.tls.ca = authority.ca();
  wrong_name.tls.server_name = "a.example";
  uint64_t refused = 0;
  for (const Options& wrong : {wrong_authority, wrong_name}) {
    expect_error(Client::connect(url, wrong).status(), Code::kUnauthenticated, {"certificate"});
    ++refused;
    while (server.server().stats().handshakes_failed < refused) std::this_thread::yield();
  }
  EXPECT_EQ(server.server().stats().handshakes_finished, 0u) << "nothing was decrypted";
  EXPECT_EQ(options.gate->counts().logins_failed, 0u);
  Options right = with_token();
  right.tls.ca = authority.ca();
  expect_error(Client::connect(url, right).status(), Code::kUnauthenticated, {"token"});
  EXPECT_EQ(options.gate->counts().logins_failed, 1u) << "a refused token is not tried again";
}

}  // namespace
}  // namespace petps::client::testing
