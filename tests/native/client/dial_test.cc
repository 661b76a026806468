// Names that resolve late or never, and hosts with several addresses of which some are silent.
// The tests wait for events, so no result depends on the speed of the machine: a resolver waits
// until a test releases it, and a silent address stays silent.
#include "petps_client/dial.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <future>
#include <utility>

#include "fixtures.h"
#include "petps_client/remote_server.h"

namespace petps::client::testing {
namespace {

constexpr uint32_t kShortMs = 20;     // deadline of calls that cannot succeed
constexpr uint32_t kLongMs = 60'000;  // deadline of calls that must succeed: they take less
const Address kName{"server.example", 7070};

SocketAddress socket_address(uint16_t port) {
  const sockaddr_in address = loopback(port);
  SocketAddress out;
  std::memcpy(&out.bytes, &address, sizeof(address));
  out.size = sizeof(address);
  return out;
}

uint16_t port_of(const SocketAddress& address) {
  sockaddr_in plain{};
  std::memcpy(&plain, &address.bytes, sizeof(plain));
  return ntohs(plain.sin_port);
}

// A resolver whose first lookup returns at release(), and whose later lookups return at
// destruction. The lookup threads share its state, because they may outlive a HostLookup.
class HeldResolver {
 public:
  explicit HeldResolver(uint16_t port) : state_(std::make_shared<State>()) { state_->port = port; }
  ~HeldResolver() {
    release();
    state_->all_released.set_value();
  }
  HostLookup::Resolve resolve() const {
    return [state = state_](const Address&, std::vector<SocketAddress>& addresses) {
      (state->lookups.fetch_add(1) == 0 ? state->until_first : state->until_all).wait();
      addresses = {socket_address(state->port)};
      return 0;
    };
  }
  void release() {
    if (!std::exchange(is_released_, true)) state_->first_released.set_value();
  }
  int lookups() const { return state_->lookups.load(); }

 private:
  struct State {
    uint16_t port = 0;
    std::atomic<int> lookups{0};
    std::promise<void> first_released;
    std::promise<void> all_released;
    std::shared_future<void> until_first = first_released.get_future().share();
    std::shared_future<void> until_all = all_released.get_future().share();
  };
  std::shared_ptr<State> state_;
  bool is_released_ = false;
};

HostLookup::Resolve fail_with(int failure) {
  return [failure](const Address&, std::vector<SocketAddress>&) { return failure; };
}

size_t count_of(const std::string& part, std::string_view text) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1))
    ++count;
  return count;
}

// A port of this machine that never connects. kRefuses: bound without a listener. kSilent: the
// listener's queue is full, so the kernel drops further attempts.
class DeadPort {
 public:
  enum class Kind { kRefuses, kSilent };
  explicit DeadPort(Kind kind) {
    socket_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    SocketAddress address = socket_address(0);
    EXPECT_EQ(0, bind(socket_, as_sockaddr(address), address.size)) << strerror(errno);
    EXPECT_EQ(0, getsockname(socket_, as_sockaddr(address), &address.size)) << strerror(errno);
    address_ = address;
    if (kind == Kind::kRefuses) return;
    EXPECT_EQ(0, listen(socket_, 0)) << strerror(errno);
    filler_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(0, connect(filler_, as_sockaddr(address), address.size)) << strerror(errno);
  }
  ~DeadPort() {
    if (filler_ >= 0) close(filler_);
    close(socket_);
  }
  const SocketAddress& address() const { return address_; }

 private:
  static sockaddr* as_sockaddr(SocketAddress& address) {
    return reinterpret_cast<sockaddr*>(&address.bytes);
  }
  SocketAddress address_;
  int socket_ = -1;
  int filler_ = -1;
};

TEST(HostLookup, ReturnsByTheDeadlineWhenTheResolverHangs) {
  HeldResolver held(1);
  HostLookup lookup(kName, held.resolve());
  for (int call = 0; call < 3; ++call) {
    const auto addresses = lookup.addresses(Deadline::in_ms(kShortMs));
    ASSERT_FALSE(addresses.ok());
    EXPECT_EQ(base::Code::kDeadlineExceeded, addresses.status().code());
    EXPECT_EQ("server.example:7070: its name was not resolved within 20 ms",
              addresses.status().message());
  }
  EXPECT_LE(held.lookups(), 1) << "one thread for each name, however many calls wait for it";
}

TEST(HostLookup, KeepsAResultThatArrivesAfterTheDeadline) {
  HeldResolver held(4711);
  HostLookup lookup(kName, held.resolve());
  ASSERT_FALSE(lookup.addresses(Deadline::in_ms(kShortMs)).ok());
  held.release();
  // A second lookup would never return.
  auto addresses = lookup.addresses(Deadline::in_ms(kLongMs));
  ASSERT_TRUE(addresses.ok()) << addresses.status().to_string();
  ASSERT_EQ(1u, addresses.value().size());
  EXPECT_EQ(4711, port_of(addresses.value()[0]));
  // forget() starts a second lookup, which does not return. So the older result is used.
  lookup.forget();
  addresses = lookup.addresses(Deadline::in_ms(kShortMs));
  ASSERT_TRUE(addresses.ok()) << addresses.status().to_string();
  EXPECT_EQ(4711, port_of(addresses.value()[0]));
}

TEST(HostLookup, MayBeDestroyedBeforeItsThreadFinishes) {
  HeldResolver held(1);
  { EXPECT_FALSE(HostLookup(kName, held.resolve()).addresses(Deadline::in_ms(kShortMs)).ok()); }
  held.release();
}

TEST(HostLookup, ReportsAnUnknownNameAsUnavailable) {
  HostLookup lookup(kName, fail_with(EAI_NONAME));
  const base::Status status = lookup.addresses(Deadline::in_ms(kLongMs)).status();
  EXPECT_EQ(base::Code::kUnavailable, status.code());
  EXPECT_EQ(std::string("server.example:7070: ") + gai_strerror(EAI_NONAME), status.message());
}

TEST(HostLookup, ReturnsAnOlderResultWhileTheNameServersFail) {
  const auto failure = std::make_shared<std::atomic<int>>(0);
  HostLookup lookup(kName, [failure](const Address&, std::vector<SocketAddress>& addresses) {
    if (failure->load() == 0) addresses = {socket_address(7)};
    return failure->load();
  });
  ASSERT_TRUE(lookup.addresses(Deadline::in_ms(kLongMs)).ok());
  *failure = EAI_AGAIN;
  lookup.forget();
  const auto again = lookup.addresses(Deadline::in_ms(kLongMs));
  ASSERT_TRUE(again.ok()) << again.status().to_string();
  EXPECT_EQ(port_of(again.value().at(0)), 7);
  *failure = EAI_NONAME;  // the name is gone: its addresses may be another host's
  EXPECT_EQ(lookup.addresses(Deadline::in_ms(kLongMs)).status().code(), base::Code::kUnavailable);
}

TEST(ConnectAny, ConnectsToTheOneAddressThatIsAlive) {
  using Kind = DeadPort::Kind;
  FakeServer server;
  const DeadPort silent(Kind::kSilent);
  const DeadPort other(Kind::kSilent);
  const DeadPort refuses(Kind::kRefuses);
  const auto url = parse_url("petps://" + server.address());
  const SocketAddress alive = socket_address(url.value().addresses[0].port);
  const std::vector<std::vector<SocketAddress>> lists = {
      {alive, silent.address()},
      {silent.address(), alive},
      {refuses.address(), alive},
      {silent.address(), other.address(), refuses.address(), alive},
      {refuses.address(), silent.address(), alive, other.address()}};
  for (size_t i = 0; i < lists.size(); ++i) {
    const auto connected = connect_any("server.example:7070", lists[i], Deadline::in_ms(kLongMs));
    ASSERT_TRUE(connected.ok()) << "list " << i << ": " << connected.status().to_string();
    SocketAddress peer;
    peer.size = sizeof(peer.bytes);
    ASSERT_EQ(0,
              getpeername(connected.value(), reinterpret_cast<sockaddr*>(&peer.bytes), &peer.size));
    EXPECT_EQ(port_of(alive), port_of(peer)) << "list " << i;
    close(connected.value());
  }
}

// As when this thread did not run from the connect to the deadline.
TEST(ConnectAny, AConnectedSocketCountsAfterTheDeadlineToo) {
  FakeServer server;
  const auto url = parse_url("petps://" + server.address());
  const SocketAddress alive[] = {socket_address(url.value().addresses[0].port)};
  const auto connected = connect_any("h:1", alive, Deadline{0, 1});
  ASSERT_TRUE(connected.ok()) << connected.status().to_string();
  close(connected.value());
  const DeadPort refuses(DeadPort::Kind::kRefuses);
  const SocketAddress refusing[] = {refuses.address()};
  const base::Status refused = connect_any("h:1", refusing, Deadline{0, 1}).status();
  EXPECT_EQ(base::Code::kUnavailable, refused.code()) << refused.to_string();
}

TEST(ConnectAny, FailsAtTheDeadlineOrWhenAllAddressesHaveRefused) {
  const DeadPort silent(DeadPort::Kind::kSilent);
  const DeadPort refuses(DeadPort::Kind::kRefuses);
  const SocketAddress both[] = {refuses.address(), silent.address()};
  const base::Status late = connect_any("h:1", both, Deadline::in_ms(kShortMs)).status();
  EXPECT_EQ(base::Code::kDeadlineExceeded, late.code());
  EXPECT_EQ("h:1: connect: no reply within 20 ms", late.message());
  const SocketAddress refusing[] = {refuses.address(), refuses.address()};
  const base::Status refused = connect_any("h:1", refusing, Deadline::in_ms(kLongMs)).status();
  EXPECT_EQ(base::Code::kUnavailable, refused.code());
  EXPECT_EQ(std::string("h:1: connect: ") + strerror(ECONNREFUSED), refused.message());
}

// Each layer adds to an error, but only one adds the name.
TEST(RemoteServer, NamesTheServerOnceInAnErrorOfItsNameOrAddress) {
  HeldResolver held(1);
  const DeadPort refuses(DeadPort::Kind::kRefuses);
  const auto resolve_to_refusing = [&](const Address&, std::vector<SocketAddress>& addresses) {
    addresses = {refuses.address(), refuses.address()};
    return 0;
  };
  const struct {
    HostLookup::Resolve resolve;
    uint32_t ms;
    base::Code code;
  } cases[] = {{held.resolve(), kShortMs, base::Code::kDeadlineExceeded},
               {fail_with(EAI_NONAME), kLongMs, base::Code::kUnavailable},
               {resolve_to_refusing, kLongMs, base::Code::kUnavailable}};
  for (const auto& test_case : cases) {
    RemoteServer remote(kName, "ranking", Options(), {}, test_case.resolve);
    const base::Status status = remote.lease(Deadline::in_ms(test_case.ms)).status();
    EXPECT_EQ(test_case.code, status.code()) << status.to_string();
    EXPECT_EQ(1u, count_of("server.example:7070", status.message())) << status.to_string();
  }
}

TEST(RemoteServer, ConnectsOnceTheNameIsResolved) {
  FakeServer server;
  const auto url = parse_url("petps://" + server.address());
  HeldResolver held(url.value().addresses[0].port);
  RemoteServer remote(kName, "ranking", Options(), {}, held.resolve());
  EXPECT_EQ(base::Code::kDeadlineExceeded, remote.lease(Deadline::in_ms(kShortMs)).status().code());
  EXPECT_TRUE(remote.is_live());
  held.release();
  const auto leased = remote.lease(Deadline::in_ms(kLongMs));
  EXPECT_TRUE(leased.ok()) << leased.status().to_string();
}

}  // namespace
}  // namespace petps::client::testing
