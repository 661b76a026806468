// How a connection is closed: the sweep that enforces limits, the error frame for the peer, and
// the moment from which the device reads nothing more.
#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "transport/rdma/endpoint.h"

namespace petps::transport {

using base::Code;
using base::Status;

void RdmaEndpoint::sweep(uint64_t now) {
  next_sweep_ns_ = now + sweep_ns_;
  for (const auto& c : slots_) {
    if (c != nullptr) sweep_connection(*c, now);
  }
}

void RdmaEndpoint::sweep_connection(Connection& c, uint64_t now) {
  if (c.state == Connection::State::kLingering) {
    if (now >= c.linger_until_ns) destroy(c);
    return;
  }
  if (c.broken) return;
  const Limits& limits = options_.limits;
  for (RdmaSent& sent : c.sent) {  // the oldest first
    if (now <= sent.posted_ns + limits.pin_ms * 1'000'000) break;
    if (sent.reported || !sent.pin) continue;
    sent.reported = true;
    next_events_.push_back({Event::Kind::kOverdue, id_of(c), {}});
  }
  if (c.output() > 0 && now > c.out_since_ns + limits.output_stall_ms * 1'000'000) {
    abort_connection(c, reads_nothing(c.address, limits), true);
    return;
  }
  if (c.idle_clock.idle_for(c.in, c.is_awaited(), now, limits.idle_ms) && limits.idle_ms != 0) {
    Counters::add(counters_.closed_idle, 1);
    finish(c, {}, false);
    start_linger(c);
    return;
  }
  std::span<const std::byte> frame;
  Status reason;
  // Our backpressure is not the peer's slowness: its time restarts when it may send again.
  if (!may_read(c) || c.in.look(options_.rules, frame, reason) != ReceiveBuffer::Look::kPartial) {
    c.frame_clock.reset();
    return;
  }
  if (c.frame_clock.overdue(c.in, limits, now)) {
    fail(c, slow_frame(limits));
  }
}

void RdmaEndpoint::break_connection(Connection& c, Status reason, bool for_cause) {
  if (c.broken) return;
  c.broken = true;
  c.broken_for_cause = for_cause;
  c.broken_reason = std::move(reason);
  add_candidate(c);
}

void RdmaEndpoint::finish(Connection& c, Status reason, bool for_cause) {
  Counters::add(counters_.closed, 1);
  if (for_cause) Counters::add(counters_.closed_for_cause, 1);
  next_events_.push_back({Event::Kind::kClosed, id_of(c), std::move(reason)});
}

void RdmaEndpoint::fail(Connection& c, Status reason) {
  std::vector<std::byte> frame;
  options_.rules.encode_error(reason, frame);
  std::memcpy(grow_output(c, frame.size()), frame.data(),
              frame.size());  // the replies go before the error
  finish(c, std::move(reason), true);
  start_linger(c);
}

void RdmaEndpoint::abort_connection(Connection& c, Status reason, bool for_cause) {
  finish(c, std::move(reason), for_cause);
  destroy(c);
}

void RdmaEndpoint::close(ConnectionId connection, Status reason) {
  Connection* c = find(connection);
  if (c == nullptr) return;
  if (!reason.ok()) {
    fail(*c, std::move(reason));
    return;
  }
  finish(*c, {}, false);
  start_linger(*c);
}

void RdmaEndpoint::end() {
  for (const auto& c : slots_) {
    if (c == nullptr) continue;
    if (c->state == Connection::State::kOpen) finish(*c, {}, false);
    destroy(*c);
  }
  const std::lock_guard lock(mutex_);
  new_.clear();
}

// Keep the queue pair until the peer has its last message, or for kRdmaLingerMs, so that messages
// in flight are not torn.
void RdmaEndpoint::start_linger(Connection& c) {
  c.state = Connection::State::kLingering;
  c.in.release();
  c.received.clear();
  count_memory(c);
  c.linger_until_ns = base::monotonic_ns() + kRdmaLingerMs * 1'000'000;
  if (!c.broken) send_output(c);
  add_candidate(c);
}

void RdmaEndpoint::destroy(Connection& c) {
  options_.budget->change(c.counted, 0);
  c.pair.reset();  // from here on the device reads nothing for this connection
  for (const RdmaSent& sent : c.sent) stage_.give_back(sent.block);
  give_up(c);
  by_pairing_.erase(c.pairing);
  const uint32_t slot = c.slot;
  slots_[slot].reset();  // drops the pins
  free_slots_.push_back(slot);
  assigned_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace petps::transport
