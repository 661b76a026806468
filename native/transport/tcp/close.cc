// How a socket is closed: what a peer sends while its connection lingers, and the wait until
// nothing reads the rows of zero-copy sends.
#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "transport/tcp/endpoint.h"

namespace petps::transport {

using base::Code;
using base::Status;

void TcpEndpoint::sweep_sockets(uint64_t now) {
  for (const auto& slot : slots_) {
    Connection& c = tcp(*slot);
    if (!c.flights.empty()) check_flights(c, now);
    if (c.kernel_encrypts() && c.state == State::kLingering && !c.has_output()) end_lingering(c);
  }
  sweep(now);
  uint64_t idle_since = ~uint64_t{0};
  for (const auto& c : slots_) {
    if (c->state == State::kOpen && !c->is_awaited())
      idle_since = std::min(idle_since, c->idle_clock.since_ns());
  }
  idle_since_ns_.store(idle_since, std::memory_order_relaxed);
}

// Close the connection that has been idle the longest, among those to which nothing is owed.
// Return false if none has been idle for kSpareIdleMs.
bool TcpEndpoint::make_room() {
  const uint64_t now = base::monotonic_ns();
  StreamConnection* longest = nullptr;
  for (const auto& c : slots_) {
    if (c->state != State::kOpen || c->broken || !is_idle(*c, now, kSpareIdleMs)) continue;
    catch_up(*c);
    if (c->state != State::kOpen || c->broken || !is_idle(*c, now, kSpareIdleMs)) continue;
    if (longest == nullptr || c->idle_clock.since_ns() < longest->idle_clock.since_ns())
      longest = c.get();
  }
  if (longest == nullptr) return false;
  Counters::add(counters_.closed_for_room, 1);
  report_closed(*longest, {}, false);
  destroy(*longest);
  return true;
}

// All output of a lingering connection is in the kernel. Return whether the connection is gone.
bool TcpEndpoint::end_lingering(Connection& c) {
  if (c.kernel_encrypts()) {
    // Records that wait for room in the socket would be lost, if it were shut down or closed. The
    // peer knows the end by close_notify.
    int unsent = 0;
    if (!c.ended || ::ioctl(c.fd, SIOCOUTQ, &unsent) != 0 || unsent > 0) return false;
  } else {
    ::shutdown(c.fd, SHUT_WR);
  }
  if (!c.ended || !c.flights.empty()) return false;
  destroy(c);
  return true;
}

// The input of a lingering connection. Closing a socket with unread input resets it, and the peer
// would lose the error frame. So discard what arrives until the peer has closed, or for kLingerMs.
void TcpEndpoint::discard(Connection& c) {
  std::array<std::byte, 4096> waste;
  const ssize_t n = ::recv(c.fd, waste.data(), waste.size(), 0);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (n > 0) c.linger_bytes += static_cast<size_t>(n);
  // The peer may still read.
  if (n == 0 && (c.has_output() || !c.flights.empty() || c.kernel_encrypts())) {
    c.ended = true;
    if (!c.has_output() && end_lingering(c)) return;
    set_interest(c);
    return;
  }
  if (n <= 0 || c.linger_bytes > kLingerBytes) destroy(c);
}

// Collect the completions of lists whose rows the kernel reads. Report a connection that settles
// for too long.
void TcpEndpoint::check_flights(Connection& c, uint64_t now) {
  if (c.state != State::kSettling) {
    collect_completions(c);
    return;
  }
  settle(c);
  if (c.state != State::kSettling || c.reported) return;
  if (now <= c.settling_since_ns + limits_.pin_ms * 1'000'000) return;
  c.reported = true;
  next_events_.push_back(
      {Event::Kind::kOverdue, c.id(),
       Status(Code::kDeadlineExceeded,
              "peer " + c.address + " was closed " + std::to_string(limits_.pin_ms) +
                  " ms ago and the network card still reads " + std::to_string(c.flights.size()) +
                  " of its replies: their rows are kept until it is done")});
}

// Reset the connection, which empties its send queue, but keep the socket: only its error queue
// shows when the clones of packets that network cards hold are gone too.
void TcpEndpoint::settle(Connection& c) {
  if (c.state != State::kSettling) {
    sockaddr nobody{};
    nobody.sa_family = AF_UNSPEC;
    if (::connect(c.fd, &nobody, sizeof(nobody)) != 0) ::shutdown(c.fd, SHUT_RDWR);
    // A reset socket is readable forever, so the sweep checks it instead of epoll.
    epoll_ctl(epoll_, EPOLL_CTL_DEL, c.fd, nullptr);
    release_buffers(c);
    c.state = State::kSettling;
    c.settling_since_ns = base::monotonic_ns();
  }
  collect_completions(c);
  if (c.flights.empty()) destroy(c);
}

void TcpEndpoint::settle_all() {
  const uint64_t until = base::monotonic_ns() + kSettleMs * 1'000'000;
  for (const auto& slot : slots_) {
    Connection& c = tcp(*slot);
    while (!c.flights.empty()) {
      settle(c);
      // The peer has been reset, so a device that still reads these rows sends them to nobody.
      if (c.flights.empty() || base::monotonic_ns() >= until) break;
      ::poll(nullptr, 0, 1);
    }
  }
}

// Close a socket that does not settle in time like the others. Its connection has been reset, so a
// device that still reads its rows sends them to nobody, and the kernel keeps their pages until
// then.
void TcpEndpoint::end() {
  settle_all();
  for (const auto& slot : slots_) {
    Connection& c = tcp(*slot);
    if (c.state == State::kFree) continue;
    c.flights = Flights();
    destroy(c);
  }
  const std::lock_guard lock(mutex_);
  for (const NewPeer& peer : new_) ::close(peer.fd);
  new_.clear();
}

void TcpEndpoint::destroy(StreamConnection& connection) {
  Connection& c = tcp(connection);
  if (!c.flights.empty()) {
    settle(c);
    return;
  }
  if (staged_for_ == &c) {
    staged_for_ = nullptr;
    staged_ = 0;
  }
  c.place.reset();
  c.tls.reset();
  c.notices.clear();
  c.undecrypted = {};
  ::close(c.fd);  // also removes it from the epoll set
  c.fd = -1;
  free_slot(c);
}

}  // namespace petps::transport
