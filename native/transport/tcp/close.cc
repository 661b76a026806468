// How a connection ends: limits that are swept for, the error frame a peer is told, and the wait
// for it to be read.
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

// Of those that nobody waits for, the one that has brought nothing whole for the longest goes.
// False: none has been idle for kSpareIdleMs.
bool TcpEndpoint::make_room() {
  const uint64_t now = base::monotonic_ns();
  Connection* longest = nullptr;
  for (const auto& c : slots_) {
    if (c->state != State::kOpen || c->broken || staged_for_ == c.get()) continue;
    if (!c->idle_clock.idle_for(c->in, c->is_awaited() || has_frame(*c), now, kSpareIdleMs))
      continue;
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
  const Limits& limits = options_.limits;
  if (c.output() > 0 && now > c.out_since_ns + limits.output_stall_ms * 1'000'000) {
    abort_connection(c, reads_nothing(c.address, limits), true);
    return;
  }
  const bool idle =
      c.idle_clock.idle_for(c.in, c.is_awaited() || has_frame(c), now, limits.idle_ms);
  if (idle && limits.idle_ms != 0) {
    Counters::add(counters_.closed_idle, 1);
    finish(c, {}, false);
    start_linger(c);
    return;
  }
  std::span<const std::byte> frame;
  Status reason;
  // Back-pressure of ours is not the peer's slowness: its time begins again when it may send.
  if (!may_read(c) || c.in.look(options_.rules, frame, reason) != ReceiveBuffer::Look::kPartial) {
    c.frame_clock.reset();
    return;
  }
  if (c.frame_clock.overdue(c.in, limits, now)) {
    fail(c, slow_frame(limits));
  }
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
  if (staged_for_ == &c) send_staged();  // replies before the error
  std::vector<std::byte> frame;
  options_.rules.encode_error(reason, frame);
  keep_output(c, frame.data(), frame.size());
  finish(c, std::move(reason), true);
  start_linger(c);
}

void TcpEndpoint::abort_connection(Connection& c, Status reason, bool for_cause) {
  finish(c, std::move(reason), for_cause);
  const linger now{1, 0};  // what the kernel still holds for it is thrown away
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

// Closing a socket with unread input resets it, and the peer would lose the error frame. So: stop
// sending, throw away what still comes, and close when the peer has closed, or after kLingerMs.
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
  if (n == 0 && (c.output() > 0 || !c.flights.empty())) {  // it stopped sending and may still read
    c.ended = true;
    set_interest(c);
    return;
  }
  if (n <= 0 || c.linger_bytes > kLingerBytes) destroy(c);
}

// Lists whose rows the kernel reads: what became of them, and whether it takes too long.
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

// Resets the connection, which empties its send queue, but keeps the socket: only its error queue
// tells when clones of packets, held by network cards, are gone too.
void TcpEndpoint::settle(Connection& c) {
  if (c.state != State::kSettling) {
    sockaddr nobody{};
    nobody.sa_family = AF_UNSPEC;
    if (::connect(c.fd, &nobody, sizeof(nobody)) != 0) ::shutdown(c.fd, SHUT_RDWR);
    // A reset socket is readable for ever; the sweep looks at it instead.
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
      // Its peer has been reset: whoever reads these rows now reads them for nobody.
      if (c->flights.empty() || base::monotonic_ns() >= until) break;
      ::poll(nullptr, 0, 1);
    }
  }
}

// Nobody polls any more. A socket that does not settle in time goes with the others: its connection
// is reset, so what a device still reads of its rows reaches nobody, and the kernel keeps the pages
// until then.
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
  ::close(c.fd);  // leaves the epoll set with it
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
