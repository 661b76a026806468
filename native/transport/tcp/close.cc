// How a connection ends: limits that are swept for, the error frame a peer is told, and the wait
// for it to be read.
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
  for (const auto& c : slots_) {
    if (c->state != State::kFree) sweep_connection(*c, now);
  }
}

void TcpEndpoint::sweep_connection(Connection& c, uint64_t now) {
  if (c.state == State::kLingering) {
    if (now >= c.linger_until_ns) destroy(c);
    return;
  }
  const Limits& limits = options_.limits;
  if (c.output() > 0 && now > c.out_since_ns + limits.output_stall_ms * 1'000'000) {
    abort_connection(
        c,
        Status(Code::kResourceExhausted, "peer " + c.address + " has read nothing for " +
                                             std::to_string(limits.output_stall_ms) + " ms"),
        true);
    return;
  }
  std::span<const std::byte> frame;
  Status reason;
  // Back-pressure of ours is not the peer's slowness: its time begins again when it may send.
  if (!may_read(c) || c.in.look(options_.rules, frame, reason) != ReceiveBuffer::Look::kPartial) {
    c.partial_since_ns = 0;
    return;
  }
  if (c.partial_since_ns == 0 || c.partial_frame != c.in.frames_consumed()) {
    c.partial_since_ns = now;
    c.partial_frame = c.in.frames_consumed();
  } else if (now > c.partial_since_ns + limits.frame_ms * 1'000'000) {
    fail(c, Status(Code::kDeadlineExceeded, "a frame was not complete " +
                                                std::to_string(limits.frame_ms) +
                                                " ms after its first byte: connection closed"));
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
  if (n == 0 && c.output() > 0) {  // it stopped sending and may still read
    c.ended = true;
    set_interest(c);
    return;
  }
  if (n <= 0 || c.linger_bytes > kLingerBytes) destroy(c);
}

void TcpEndpoint::destroy(Connection& c) {
  ::close(c.fd);  // leaves the epoll set with it
  if (c.output() > 0) --with_output_;
  c.fd = -1;
  c.state = State::kFree;
  ++c.generation;
  c.paused = c.ended = c.broken = c.broken_for_cause = false;
  c.broken_reason = {};
  c.in.release();
  c.out = {};
  c.out_at = 0;
  c.partial_since_ns = 0;
  c.interest = 0;
  c.owed = 0;
  free_slots_.push_back(c.slot);
  assigned_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace petps::transport
