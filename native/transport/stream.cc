#include "transport/stream.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"

namespace petps::transport {

using base::Code;
using base::Status;

namespace {

uint64_t ns(uint64_t ms) { return ms * 1'000'000; }

// Limits are enforced to within a quarter of the shortest one, and at least every 250 ms.
uint64_t sweep_ns(const Limits& limits) {
  const uint64_t idle_ms = limits.idle_ms == 0 ? limits.pin_ms : limits.idle_ms;
  const uint64_t shortest =
      std::min({limits.output_stall_ms, limits.frame_ms, limits.pin_ms, idle_ms});
  return ns(std::clamp<uint64_t>(shortest / 4, 1, 250));
}

}  // namespace

StreamEndpoint::StreamEndpoint(const Limits& limits, const FrameRules& rules,
                               std::shared_ptr<MemoryBudget> memory)
    : limits_(limits), rules_(rules), memory_(std::move(memory)), sweep_ns_(sweep_ns(limits)) {}

StreamEndpoint::~StreamEndpoint() {
  if (wake_ >= 0) ::close(wake_);
}

// ---- Opening

Status StreamEndpoint::open_wake() {
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return wake_ >= 0 ? Status() : base::errno_status(Code::kIoError, "eventfd", errno);
}

void StreamEndpoint::wake() {
  const uint64_t one = 1;
  // A full counter (EAGAIN) has already woken the poll.
  [[maybe_unused]] const ssize_t n = ::write(wake_, &one, sizeof(one));
}

void StreamEndpoint::clear_wake() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t n = ::read(wake_, &count, sizeof(count));
}

StreamConnection& StreamEndpoint::take_slot(std::unique_ptr<StreamConnection> connection) {
  if (free_slots_.empty()) {
    free_slots_.push_back(static_cast<uint32_t>(slots_.size()));
    slots_.emplace_back();
  }
  std::unique_ptr<StreamConnection>& place = slots_[free_slots_.back()];
  connection->slot = free_slots_.back();
  free_slots_.pop_back();
  if (place != nullptr) {
    connection->generation = place->generation + 1;
    connection->candidate = place->candidate;
  }
  place = std::move(connection);
  place->state = State::kOpen;
  place->idle_clock.begin(place->in, base::monotonic_ns());
  count_memory(*place);
  return *place;
}

void StreamEndpoint::report_opened(const StreamConnection& c) {
  Counters::add(counters_.opened, 1);
  next_events_.push_back({Event::Kind::kOpened, c.id(), {}});
}

// ---- Serving

StreamEndpoint::Look StreamEndpoint::look(StreamConnection& c, std::span<const std::byte>& frame,
                                          Status& reason) const {
  return may_read(c) ? c.in.look(rules_, frame, reason) : Look::kNothing;
}

bool StreamEndpoint::has_frame(StreamConnection& c) const {
  std::span<const std::byte> frame;
  Status reason;
  const Look front = look(c, frame, reason);
  return front == Look::kFrame || front == Look::kBroken;
}

bool StreamEndpoint::report(StreamConnection& c) {
  std::span<const std::byte> frame;
  Status reason;
  const Look front = look(c, frame, reason);
  if (front == Look::kFrame) {
    next_events_.push_back({Event::Kind::kFrames, c.id(), {}});
  } else if (front == Look::kBroken) {
    fail(c, std::move(reason));
  } else if (is_truncated(c)) {
    fail(c, truncated_frame(c.in.bytes()));
  } else if (may_end(c)) {
    close_quietly(c);
  }
  return front == Look::kFrame;
}

bool StreamEndpoint::may_end(const StreamConnection& c) const {
  return c.ended && c.out.bytes() == 0 && c.lists_in_flight() == 0 && !c.paused && c.owed <= 0;
}

bool StreamEndpoint::is_truncated(StreamConnection& c) const {
  if (!c.ended || !may_read(c)) return false;
  std::span<const std::byte> frame;
  Status reason;
  const Look front = c.in.look(rules_, frame, reason);
  return front == Look::kPartial || (front == Look::kNothing && c.has_partial_record);
}

bool StreamEndpoint::peek(ConnectionId connection, std::span<const std::byte>& frame) {
  StreamConnection* c = find(connection);
  if (c == nullptr || c->broken) return false;
  Status reason;
  const Look front = look(*c, frame, reason);
  if (front == Look::kBroken) fail(*c, std::move(reason));
  return front == Look::kFrame;
}

void StreamEndpoint::consume(ConnectionId connection) {
  StreamConnection* c = find(connection);
  if (c == nullptr) return;
  c->in.consume();
  ++c->owed;
  Counters::add(counters_.frames_received, 1);
}

void StreamEndpoint::pause(ConnectionId connection) {
  StreamConnection* c = find(connection);
  if (c == nullptr || c->paused) return;
  c->paused = true;
  add_candidate(*c);
}

void StreamEndpoint::resume(ConnectionId connection) {
  StreamConnection* c = find(connection);
  if (c == nullptr || !c->paused) return;
  c->paused = false;
  add_candidate(*c);
}

void StreamEndpoint::keep(ConnectionId connection) {
  if (StreamConnection* c = find(connection)) c->kept = true;
}

size_t StreamEndpoint::pending_posts() const {
  size_t pending = 0;
  for (const auto& c : slots_) pending += c->lists_in_flight() + (c->out.bytes() > 0 ? 1 : 0);
  return pending;
}

std::vector<ConnectionId> StreamEndpoint::connections() const {
  std::vector<ConnectionId> ids;
  for (const auto& c : slots_) {
    if (c->state == State::kOpen) ids.push_back(c->id());
  }
  return ids;
}

std::string StreamEndpoint::peer(ConnectionId connection) const {
  const StreamConnection* c = find(connection);
  return c == nullptr ? "" : c->address;
}

StreamConnection* StreamEndpoint::begin_post(ConnectionId connection, gather::GatherList& list) {
  StreamConnection* c = find(connection);
  if (c == nullptr || c->broken) {
    list.clear();
    return nullptr;
  }
  Counters::add(counters_.lists_posted, 1);
  if (--c->owed <= 0 && c->ended) add_candidate(*c);
  return c;
}

std::byte* StreamEndpoint::grow_output(StreamConnection& c, size_t n) {
  Status refusal = memory_->admit_output(c.address, c.out.bytes(), n, limits_.output_close_bytes);
  if (!refusal.ok() || c.broken) {
    break_connection(c, std::move(refusal), true);
    if (waste_.size() < n) waste_.resize(n);
    return waste_.data();
  }
  if (c.out.bytes() == 0) {
    c.out_since_ns = base::monotonic_ns();
    add_candidate(c);  // tcp waits for room in the socket; rdma sends what fits
  }
  std::byte* const room = c.out.append(n);
  count_memory(c);
  return room;
}

void StreamEndpoint::append_output(StreamConnection& c, std::span<const std::byte> bytes) {
  std::memcpy(grow_output(c, bytes.size()), bytes.data(), bytes.size());
}

void StreamEndpoint::consume_output(StreamConnection& c, size_t n) {
  if (n == 0) return;
  c.out_since_ns = base::monotonic_ns();
  c.out.consume(n);
  if (c.out.bytes() > 0) return;
  count_memory(c);
  if (c.state == State::kOpen) add_candidate(c);  // it may be read again
}

void StreamEndpoint::count_memory(StreamConnection& c) {
  const size_t now = c.in.touched() + c.out.capacity() + c.fixed_bytes;
  memory_->change(c.counted, now);
  c.counted = now;
}

// ---- Closing

void StreamEndpoint::sweep(uint64_t now) {
  next_sweep_ns_ = now + sweep_ns_;
  const uint64_t pin_ns = ns(limits_.pin_ms);
  for (const auto& c : slots_) {
    if (c->state == State::kLingering && now >= c->linger_until_ns) destroy(*c);
    if (c->state != State::kOpen || c->broken) continue;
    if (now > pin_ns && c->take_overdue(now - pin_ns))
      next_events_.push_back({Event::Kind::kOverdue, c->id(), {}});
    enforce_limits(*c, now);
  }
}

void StreamEndpoint::enforce_limits(StreamConnection& c, uint64_t now) {
  if (exceeded_limit(c, now) == Limit::kNone) return;
  catch_up(c);
  if (c.state != State::kOpen || c.broken) return;
  switch (exceeded_limit(c, now)) {
    case Limit::kNone:
      break;
    case Limit::kStall:
      break_connection(c, stalled_peer(c.address, limits_), true);
      break;
    case Limit::kIdle:
      Counters::add(counters_.closed_idle, 1);
      close_quietly(c);
      break;
    case Limit::kFrame:
      fail(c, slow_frame(limits_));
      break;
  }
}

StreamEndpoint::Limit StreamEndpoint::exceeded_limit(StreamConnection& c, uint64_t now) const {
  if (c.out.bytes() > 0 && now > c.out_since_ns + ns(limits_.output_stall_ms)) return Limit::kStall;
  const uint64_t idle_ms = idle_limit_ms(c);
  if (idle_ms != 0 && is_idle(c, now, idle_ms)) return Limit::kIdle;
  std::span<const std::byte> frame;
  Status reason;
  // Our backpressure is not the peer's slowness: its time restarts when it may send again.
  const Look front = look(c, frame, reason);
  const bool has_begun = front == Look::kNothing && c.has_partial_record && may_read(c);
  if (front != Look::kPartial && !has_begun) {
    c.frame_clock.reset();
    return Limit::kNone;
  }
  return c.frame_clock.is_overdue(c.in, limits_, now) ? Limit::kFrame : Limit::kNone;
}

uint64_t StreamEndpoint::idle_limit_ms(const StreamConnection& c) const {
  const bool has_sent = c.in.frames_consumed() > 0 || c.in.bytes() > 0 || c.has_partial_record;
  if (has_sent) return limits_.idle_ms;
  return limits_.idle_ms == 0 ? limits_.frame_ms : std::min(limits_.idle_ms, limits_.frame_ms);
}

bool StreamEndpoint::is_idle(StreamConnection& c, uint64_t now, uint64_t ms) const {
  return c.idle_clock.is_idle_for(c.in, c.is_awaited() || has_frame(c), now, ms);
}

void StreamEndpoint::catch_up(StreamConnection& c) {
  if (c.out.bytes() > 0) send_output(c);
  receive_waiting(c);
  if (c.state == State::kOpen) add_candidate(c);
}

void StreamEndpoint::break_connection(StreamConnection& c, Status reason, bool for_cause) {
  if (c.broken) return;
  c.broken = true;
  c.broken_for_cause = for_cause;
  c.broken_reason = std::move(reason);
  add_candidate(c);
}

void StreamEndpoint::drop_broken(StreamConnection& c) {
  report_closed(c, std::move(c.broken_reason), c.broken_for_cause);
  destroy(c);
}

void StreamEndpoint::close(ConnectionId connection, Status reason) {
  StreamConnection* c = find(connection);
  if (c == nullptr) return;
  if (!reason.ok()) {
    fail(*c, std::move(reason));
  } else {
    flush();
    close_quietly(*c);
  }
}

void StreamEndpoint::fail(StreamConnection& c, Status reason) {
  flush();  // the replies go before the error
  keep_error(c, reason);
  report_closed(c, std::move(reason), true);
  start_linger(c);
}

void StreamEndpoint::keep_error(StreamConnection& c, const Status& reason) {
  std::vector<std::byte> frame;
  rules_.encode_error(reason, frame);
  append_output(c, frame);
}

void StreamEndpoint::close_quietly(StreamConnection& c) {
  report_closed(c, {}, false);
  start_linger(c);
}

void StreamEndpoint::report_closed(StreamConnection& c, Status reason, bool for_cause) {
  Counters::add(counters_.closed, 1);
  open_.fetch_sub(1, std::memory_order_relaxed);
  if (for_cause) Counters::add(counters_.closed_for_cause, 1);
  next_events_.push_back({Event::Kind::kClosed, c.id(), std::move(reason)});
}

void StreamEndpoint::start_linger(StreamConnection& c) {
  c.state = State::kLingering;
  c.in.release();
  count_memory(c);
  c.linger_until_ns = base::monotonic_ns() + ns(kLingerMs);
  if (c.broken) {
    destroy(c);
  } else {
    send_output(c);
  }
}

void StreamEndpoint::release_buffers(StreamConnection& c) {
  c.in.release();
  c.out.release();
  count_memory(c);
}

void StreamEndpoint::free_slot(StreamConnection& c) {
  c.fixed_bytes = 0;
  release_buffers(c);
  c.state = State::kFree;
  free_slots_.push_back(c.slot);
  assigned_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace petps::transport
