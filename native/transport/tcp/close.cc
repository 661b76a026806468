// How a connection is closed: the sweep that enforces limits, the error frame for the peer, and
// the wait until the peer has read it.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "transport/tcp/endpoint.h"

namespace petps::transport {

using base::Code;
using base::Status;

void TcpEndpoint::sweep(uint64_t now) {
  next_sweep_ns_ = now + sweep_ns_;
  uint64_t idle_since = ~uint64_t{0};
  for (const auto& c : slots_) {
    if (c->state != State::kFree) sweep_connection(*c, now);
    if (c->state == State::kOpen && !c->is_awaited())
      idle_since = std::min(idle_since, c->idle_clock.since_ns());
  }
  idle_since_ns_.store(idle_since, std::memory_order_relaxed);
}

// Close the connection that has been idle the longest, among those to which nothing is owed.
// Return false if none has been idle for kSpareIdleMs.
bool TcpEndpoint::make_room() {
  const uint64_t now = base::monotonic_ns();
  Connection* longest = nullptr;
  for (const auto& c : slots_) {
    if (c->state != State::kOpen || c->broken || staged_for_ == c.get()) continue;
    if (!is_idle(*c, now, kSpareIdleMs)) continue;
    catch_up(*c);
    if (c->state != State::kOpen || c->broken || !is_idle(*c, now, kSpareIdleMs)) continue;
    if (longest == nullptr || c->idle_clock.since_ns() < longest->idle_clock.since_ns())
      longest = c.get();
  }
  if (longest == nullptr) return false;
  Counters::add(counters_.closed_for_room, 1);
  finish(*longest, {}, false);
  destroy(*longest);
  return true;
}

void TcpEndpoint::sweep_connection(Connection& c, uint64_t now) {
  if (!c.flights.empty()) check_flights(c, now);
  if (c.state == State::kLingering && now >= c.linger_until_ns) destroy(c);
  if (c.state != State::kOpen) return;
  if (broken_limit(c, now) == Limit::kNone) return;
  catch_up(c);
  if (c.state != State::kOpen || c.broken) return;
  switch (broken_limit(c, now)) {
    case Limit::kNone:
      break;
    case Limit::kStall:
      abort_connection(c, reads_nothing(c.address, options_.limits), true);
      break;
    case Limit::kIdle:
      Counters::add(counters_.closed_idle, 1);
      finish(c, {}, false);
      start_linger(c);
      break;
    case Limit::kFrame:
      fail(c, slow_frame(options_.limits));
      break;
  }
}

TcpEndpoint::Limit TcpEndpoint::broken_limit(Connection& c, uint64_t now) {
  const Limits& limits = options_.limits;
  if (c.output() > 0 && now > c.out_since_ns + limits.output_stall_ms * 1'000'000)
    return Limit::kStall;
  if (limits.idle_ms != 0 && is_idle(c, now, limits.idle_ms)) return Limit::kIdle;
  std::span<const std::byte> frame;
  Status reason;
  // Our backpressure is not the peer's slowness: its time restarts when it may send again.
  if (!may_read(c) || c.in.look(options_.rules, frame, reason) != ReceiveBuffer::Look::kPartial) {
    c.frame_clock.reset();
    return Limit::kNone;
  }
  return c.frame_clock.overdue(c.in, limits, now) ? Limit::kFrame : Limit::kNone;
}

// The peer has owed a whole frame for `ms`.
bool TcpEndpoint::is_idle(Connection& c, uint64_t now, uint64_t ms) {
  return c.idle_clock.idle_for(c.in, c.is_awaited() || has_frame(c), now, ms);
}

// Send what the socket takes and receive what waits in it, up to one frame. A limit may end a
// connection only after this: the peer may have done its part while this thread stood still.
void TcpEndpoint::catch_up(Connection& c) {
  if (c.output() > 0) send_output(c);
  size_t before = 0;
  do {
    before = c.in.bytes();
    if (c.state == State::kOpen && !has_frame(c)) receive(c);
  } while (c.in.bytes() > before);
  if (c.state == State::kOpen) add_candidate(c);
}

void TcpEndpoint::break_connection(Connection& c, Status reason, bool for_cause) {
  if (c.broken) return;
  c.broken = true;
  c.broken_for_cause = for_cause;
  c.broken_reason = std::move(reason);
  add_candidate(c);
}

void TcpEndpoint::finish(Connection& c, Status reason, bool for_cause) {
  if (staged_for_ == &c) {
    staged_for_ = nullptr;
    staged_ = 0;
  }
  Counters::add(counters_.closed, 1);
  open_.fetch_sub(1, std::memory_order_relaxed);
  if (for_cause) Counters::add(counters_.closed_for_cause, 1);
  next_events_.push_back({Event::Kind::kClosed, id_of(c), std::move(reason)});
}

void TcpEndpoint::fail(Connection& c, Status reason) {
  if (staged_for_ == &c) send_staged();  // the replies go before the error
  std::vector<std::byte> frame;
  options_.rules.encode_error(reason, frame);
  keep_output(c, frame.data(), frame.size());
  finish(c, std::move(reason), true);
  start_linger(c);
}

void TcpEndpoint::abort_connection(Connection& c, Status reason, bool for_cause) {
  finish(c, std::move(reason), for_cause);
  const linger now{1, 0};  // discard what the kernel still holds for the connection
  setsockopt(c.fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  destroy(c);
}

void TcpEndpoint::close(ConnectionId connection, Status reason) {
  Connection* c = find(connection);
  if (c == nullptr) return;
  if (!reason.ok()) {
    fail(*c, std::move(reason));
    return;
  }
  if (staged_for_ == c) send_staged();
  finish(*c, {}, false);
  start_linger(*c);
}

// Closing a socket with unread input resets it, and the peer would lose the error frame. So stop
// sending, discard what still arrives, and close when the peer has closed, or after kLingerMs.
void TcpEndpoint::start_linger(Connection& c) {
  c.state = State::kLingering;
  c.in.release();
  count_memory(c);
  c.linger_until_ns = base::monotonic_ns() + kLingerMs * 1'000'000;
  c.linger_bytes = 0;
  if (c.broken) {
    destroy(c);
    return;
  }
  send_output(c);
}

void TcpEndpoint::discard(Connection& c) {
  std::array<std::byte, 4096> waste;
  const ssize_t n = ::recv(c.fd, waste.data(), waste.size(), 0);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (n > 0) c.linger_bytes += static_cast<size_t>(n);
  if (n == 0 && (c.output() > 0 || !c.flights.empty())) {  // the peer may still read
    c.ended = true;
    set_interest(c);
    return;
  }
  if (n <= 0 || c.linger_bytes > kLingerBytes) destroy(c);
}

// Collect the completions of lists whose rows the kernel reads, and report lists that take too
// long.
void TcpEndpoint::check_flights(Connection& c, uint64_t now) {
  if (c.state == State::kSettling) {
    settle(c);
  } else {
    collect_completions(c);
  }
  const uint64_t pin_ns = options_.limits.pin_ms * 1'000'000;
  if (now < pin_ns) return;
  if (c.state == State::kOpen && c.flights.take_overdue(now - pin_ns))
    next_events_.push_back({Event::Kind::kOverdue, id_of(c), {}});
  if (c.state == State::kSettling && !c.reported && now - pin_ns > c.settling_since_ns) {
    c.reported = true;
    next_events_.push_back(
        {Event::Kind::kOverdue, id_of(c),
         Status(Code::kDeadlineExceeded,
                "peer " + c.address + " was closed " + std::to_string(options_.limits.pin_ms) +
                    " ms ago and the network card still reads " + std::to_string(c.flights.size()) +
                    " of its replies: their rows are kept until it is done")});
  }
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
    if (c.output() > 0) --with_output_;
    c.out = std::vector<std::byte>();
    c.out_at = 0;
    c.in.release();
    count_memory(c);
    c.state = State::kSettling;
    c.settling_since_ns = base::monotonic_ns();
  }
  collect_completions(c);
  if (c.flights.empty()) destroy(c);
}

void TcpEndpoint::settle_all() {
  const uint64_t until = base::monotonic_ns() + kSettleMs * 1'000'000;
  for (const auto& c : slots_) {
    while (!c->flights.empty()) {
      settle(*c);
      // The peer has been reset, so a device that still reads these rows sends them to nobody.
      if (c->flights.empty() || base::monotonic_ns() >= until) break;
      ::poll(nullptr, 0, 1);
    }
  }
}

// No thread polls any more. A socket that does not settle in time is closed like the others. Its
// connection is reset, so what a device still reads of its rows reaches nobody, and the kernel
// keeps the pages until then.
void TcpEndpoint::end() {
  settle_all();
  for (const auto& c : slots_) {
    if (c->state == State::kFree) continue;
    c->flights = Flights();
    destroy(*c);
  }
  const std::lock_guard lock(mutex_);
  for (const NewPeer& peer : new_) ::close(peer.fd);
  new_.clear();
}

void TcpEndpoint::destroy(Connection& c) {
  if (!c.flights.empty()) {
    settle(c);
    return;
  }
  ::close(c.fd);  // also removes it from the epoll set
  if (c.output() > 0) --with_output_;
  c.fd = -1;
  c.state = State::kFree;
  ++c.generation;
  c.paused = c.ended = c.broken = c.broken_for_cause = c.zerocopy = c.reported = false;
  c.next_send = 0;
  c.broken_reason = {};
  c.kept = false;
  c.in.release();
  c.out = std::vector<std::byte>();
  c.out_at = 0;
  count_memory(c);
  c.frame_clock.reset();
  c.interest = 0;
  c.owed = 0;
  free_slots_.push_back(c.slot);
  assigned_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace petps::transport
