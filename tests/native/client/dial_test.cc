// Names that resolve late or never, and hosts with several addresses of which some are silent.
// The tests wait for events, so no outcome depends on the speed of the machine: a resolver is
// held until a test releases it, and a silent address stays silent.
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
constexpr uint32_t kLongMs = 60'000;  // deadline of calls that must succeed: never used up
const Address kName{"server.example", 7070};

SocketAddress loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
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

// A resolver whose first lookup returns at let_go(), and whose later lookups return at
// destruction. The lookup threads share its state, because they may outlive a HostLookup.
class HeldResolver {
 public:
  explicit HeldResolver(uint16_t port) : state_(std::make_shared<State>()) { state_->port = port; }
  ~HeldResolver() {
    let_go();
    state_->end.set_value();
  }
  HostLookup::Resolve resolve() const {
    return [state = state_](const Address&, std::vector<SocketAddress>& found) {
      if (state->lookups.fetch_add(1) == 0) {
        state->first_ended.wait();
      } else {
        state->ended.wait();
      }
      found = {loopback(state->port)};
      return 0;
    };
  }
  void let_go() {
    if (!std::exchange(is_let_go_, true)) state_->first_end.set_value();
  }
  int lookups() const { return state_->lookups.load(); }

 private:
  struct State {
    uint16_t port = 0;
    std::atomic<int> lookups{0};
    std::promise<void> first_end;
    std::promise<void> end;
    std::shared_future<void> first_ended = first_end.get_future().share();
    std::shared_future<void> ended = end.get_future().share();
  };
  std::shared_ptr<State> state_;
  bool is_let_go_ = false;
};

HostLookup::Resolve failing(int failure) {
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
    SocketAddress address = loopback(0);
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

TEST(HostLookup, AResolverThatNeverAnswersHoldsNoCallBeyondItsDeadline) {
  HeldResolver held(1);
  HostLookup lookup(kName, held.resolve());
  for (int call = 0; call < 3; ++call) {
    const auto found = lookup.addresses(Deadline::in_ms(kShortMs));
    ASSERT_FALSE(found.ok());
    EXPECT_EQ(base::Code::kDeadlineExceeded, found.status().code());
    EXPECT_EQ("server.example:7070: its name was not resolved within 20 ms",
              found.status().message());
  }
  EXPECT_LE(held.lookups(), 1) << "one thread for each name, however many calls wait for it";
}

TEST(HostLookup, AnAnswerThatComesAfterItsCallHasGivenUpIsKept) {
  HeldResolver held(4711);
  HostLookup lookup(kName, held.resolve());
  ASSERT_FALSE(lookup.addresses(Deadline::in_ms(kShortMs)).ok());
  held.let_go();
  // A second lookup would never return.
  auto found = lookup.addresses(Deadline::in_ms(kLongMs));
  ASSERT_TRUE(found.ok()) << found.status().to_string();
  ASSERT_EQ(1u, found.value().size());
  EXPECT_EQ(4711, port_of(found.value()[0]));
  // After forget() a newer result is wanted, but the second lookup still does not return. The
  // older result is used.
  lookup.forget();
  found = lookup.addresses(Deadline::in_ms(kShortMs));
  ASSERT_TRUE(found.ok()) << found.status().to_string();
  EXPECT_EQ(4711, port_of(found.value()[0]));
}

TEST(HostLookup, ItsThreadMayOutliveIt) {
  HeldResolver held(1);
  { EXPECT_FALSE(HostLookup(kName, held.resolve()).addresses(Deadline::in_ms(kShortMs)).ok()); }
  held.let_go();
}

TEST(HostLookup, ANameThatIsNotKnownIsUnavailable) {
  HostLookup lookup(kName, failing(EAI_NONAME));
  const base::Status status = lookup.addresses(Deadline::in_ms(kLongMs)).status();
  EXPECT_EQ(base::Code::kUnavailable, status.code());
  EXPECT_EQ(std::string("server.example:7070: ") + gai_strerror(EAI_NONAME), status.message());
}

TEST(HostLookup, AnOlderResultServesWhileTheNameServersFail) {
  const auto failure = std::make_shared<std::atomic<int>>(0);
  HostLookup lookup(kName, [failure](const Address&, std::vector<SocketAddress>& found) {
    if (failure->load() == 0) found = {loopback(7)};
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

TEST(ConnectAny, AnAddressThatIsDeadHidesNoneAfterIt) {
  using Kind = DeadPort::Kind;
  FakeServer server([](wire::Opcode, uint64_t, wire::Frame&) { return Answer::kSend; });
  const DeadPort silent(Kind::kSilent);
  const DeadPort other(Kind::kSilent);
  const DeadPort refuses(Kind::kRefuses);
  const auto url = parse_url("petps://" + server.address());
  const SocketAddress alive = loopback(url.value().addresses[0].port);
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

TEST(ConnectAny, WithNobodyThereItEndsByTheDeadlineOrWhenAllHaveRefused) {
  const DeadPort silent(DeadPort::Kind::kSilent);
  const DeadPort refuses(DeadPort::Kind::kRefuses);
  const SocketAddress both[] = {refuses.address(), silent.address()};
  const base::Status late = connect_any("h:1", both, Deadline::in_ms(kShortMs)).status();
  EXPECT_EQ(base::Code::kDeadlineExceeded, late.code());
  EXPECT_EQ("h:1: connect: no answer within 20 ms", late.message());
  const SocketAddress refusing[] = {refuses.address(), refuses.address()};
  const base::Status refused = connect_any("h:1", refusing, Deadline::in_ms(kLongMs)).status();
  EXPECT_EQ(base::Code::kUnavailable, refused.code());
  EXPECT_EQ(std::string("h:1: connect: ") + strerror(ECONNREFUSED), refused.message());
}

// Errors as a caller sees them: the endpoint adds the name, and every layer adds its part.
TEST(RemoteServer, AnErrorOfItsNameOrAddressNamesItOnce) {
  HeldResolver held(1);
  const DeadPort refuses(DeadPort::Kind::kRefuses);
  const auto refusing = [&](const Address&, std::vector<SocketAddress>& found) {
    found = {refuses.address(), refuses.address()};
    return 0;
  };
  const struct {
    HostLookup::Resolve resolve;
    uint32_t ms;
    base::Code code;
  } cases[] = {{held.resolve(), kShortMs, base::Code::kDeadlineExceeded},
               {failing(EAI_NONAME), kLongMs, base::Code::kUnavailable},
               {refusing, kLongMs, base::Code::kUnavailable}};
  for (const auto& one : cases) {
    RemoteServer endpoint(kName, "ranking", Options(), {}, one.resolve);
    const base::Status status = endpoint.lease(Deadline::in_ms(one.ms)).status();
    EXPECT_EQ(one.code, status.code()) << status.to_string();
    EXPECT_EQ(1u, count_of("server.example:7070", status.message())) << status.to_string();
  }
}

TEST(RemoteServer, AServerIsReachedOnceItsNameIsResolved) {
  FakeServer server([](wire::Opcode, uint64_t, wire::Frame&) { return Answer::kSend; });
  const auto url = parse_url("petps://" + server.address());
  HeldResolver held(url.value().addresses[0].port);
  RemoteServer endpoint(kName, "ranking", Options(), {}, held.resolve());
  EXPECT_EQ(base::Code::kDeadlineExceeded,
            endpoint.lease(Deadline::in_ms(kShortMs)).status().code());
  EXPECT_TRUE(endpoint.answers());
  held.let_go();
  const auto leased = endpoint.lease(Deadline::in_ms(kLongMs));
  EXPECT_TRUE(leased.ok()) << leased.status().to_string();
}

}  // namespace
}  // namespace petps::client::testing
