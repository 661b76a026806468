#include "tests/support/loopback/endpoint.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/clock.h"

namespace petps::transport {

using base::Code;
using base::Status;

namespace {

// How often a waiting poll checks the limits.
constexpr std::chrono::milliseconds kCheckInterval(1);

uint64_t ns(uint64_t ms) { return ms * 1'000'000; }

}  // namespace

LoopbackEndpoint::Connection* LoopbackEndpoint::find(ConnectionId id) const {
  const uint32_t slot = slot_of(id);
  if (slot >= slots_.size()) return nullptr;
  Connection* c = slots_[slot].get();
  return c->open && c->generation == static_cast<uint32_t>(id >> 32) ? c : nullptr;
}

bool LoopbackEndpoint::may_read(const Connection& c) const {
  return !c.paused && c.pipe->unread() < transport_.options_.limits.output_pause_bytes;
}

void LoopbackEndpoint::adopt(std::shared_ptr<Pipe> pipe, std::string address) {
  const auto free =
      std::find_if(slots_.begin(), slots_.end(), [](const auto& c) { return !c->open; });
  Connection* c = nullptr;
  if (free != slots_.end()) {
    c = free->get();
  } else {
    slots_.push_back(std::make_unique<Connection>());
    c = slots_.back().get();
    c->slot = static_cast<uint32_t>(slots_.size() - 1);
  }
  c->open = true;
  c->pipe = std::move(pipe);
  c->address = std::move(address);
  Counters::add(counters_.opened, 1);
  next_events_.push_back({Event::Kind::kOpened, id_of(*c), {}});
}

size_t LoopbackEndpoint::open_connections() const {
  return static_cast<size_t>(
      std::count_if(slots_.begin(), slots_.end(), [](const auto& c) { return c->open; }));
}

std::span<const Event> LoopbackEndpoint::poll(int timeout_ms) {
  std::unique_lock lock(transport_.mutex_);
  const uint64_t until =
      timeout_ms < 0 ? ~uint64_t{0} : base::monotonic_ns() + ns(static_cast<uint64_t>(timeout_ms));
  while (true) {
    const uint64_t now = base::monotonic_ns();
    if (transport_.completions_ == Completions::kShuffled) complete_some();
    deliver();
    check_pins(now);
    collect(now);
    if (!next_events_.empty() || woken_ || now >= until) break;
    transport_.changed_.wait_for(lock, kCheckInterval);
  }
  woken_ = false;
  events_.clear();
  events_.swap(next_events_);
  return events_;
}

void LoopbackEndpoint::collect(uint64_t now) {
  for (const auto& c : slots_) {
    if (c->open) collect_connection(*c, now);
  }
}

void LoopbackEndpoint::collect_connection(Connection& c, uint64_t now) {
  const Limits& limits = transport_.options_.limits;
  Pipe& pipe = *c.pipe;
  if (pipe.client_gone) {
    close_connection(c, {}, false, false);
    return;
  }
  if (pipe.unread() == 0) pipe.taken_ns = now;
  if (now > pipe.taken_ns + ns(limits.output_stall_ms)) {
    close_connection(c, stalled_peer(c.address, limits), true, false);
    return;
  }
  if (!may_read(c)) {
    c.frame_clock.reset();
    return;
  }
  take_input(c);
  std::span<const std::byte> frame;
  Status reason;
  const ReceiveBuffer::Look look = c.in.look(transport_.options_.rules, frame, reason);
  if (look == ReceiveBuffer::Look::kFrame) {
    next_events_.push_back({Event::Kind::kFrames, id_of(c), {}});
  } else if (look == ReceiveBuffer::Look::kBroken) {
    close_connection(c, std::move(reason), true, true);
  } else if (look == ReceiveBuffer::Look::kPartial && pipe.client_ended) {
    close_connection(c, truncated_frame(c.in.bytes()), true, true);
  } else if (look == ReceiveBuffer::Look::kPartial) {
    if (c.frame_clock.is_overdue(c.in, limits, now)) {
      close_connection(c, slow_frame(limits), true, true);
    }
  } else if (pipe.client_ended && pipe.unread() == 0 && c.owed <= 0 &&
             std::none_of(posted_.begin(), posted_.end(),
                          [&](const Posted& p) { return p.connection == id_of(c); })) {
    close_connection(c, {}, false, false);
  }
}

void LoopbackEndpoint::take_input(Connection& c) {
  std::vector<std::byte>& input = c.pipe->to_server;
  while (!input.empty()) {
    const std::span<std::byte> space = c.in.space(transport_.options_.rules);
    if (space.empty()) return;
    const size_t n = std::min(space.size(), input.size());
    std::memcpy(space.data(), input.data(), n);
    input.erase(input.begin(), input.begin() + static_cast<ptrdiff_t>(n));
    c.in.commit(n);
    Counters::add(counters_.bytes_received, n);
    std::span<const std::byte> frame;
    Status reason;
    // Take one buffer's worth per poll, unless the frame at the front still needs more.
    if (c.in.look(transport_.options_.rules, frame, reason) != ReceiveBuffer::Look::kPartial)
      return;
  }
}

bool LoopbackEndpoint::peek(ConnectionId connection, std::span<const std::byte>& frame) {
  const std::lock_guard lock(transport_.mutex_);
  Connection* c = find(connection);
  if (c == nullptr || !may_read(*c)) return false;
  Status reason;
  const ReceiveBuffer::Look look = c->in.look(transport_.options_.rules, frame, reason);
  if (look == ReceiveBuffer::Look::kBroken) close_connection(*c, std::move(reason), true, true);
  return look == ReceiveBuffer::Look::kFrame;
}

void LoopbackEndpoint::consume(ConnectionId connection) {
  const std::lock_guard lock(transport_.mutex_);
  Connection* c = find(connection);
  if (c == nullptr) return;
  c->in.consume();
  ++c->owed;
  Counters::add(counters_.frames_received, 1);
}

void LoopbackEndpoint::post(ConnectionId connection, gather::GatherList&& list, epoch::Pin&& pin) {
  Posted posted;
  posted.list = std::move(list);
  posted.pin = std::move(pin);
  posted.posted_ns = base::monotonic_ns();
  posted.connection = connection;
  list.clear();
  const std::lock_guard lock(transport_.mutex_);
  Connection* c = find(connection);
  if (c == nullptr) return;
  Counters::add(counters_.lists_posted, 1);
  --c->owed;
  posted.number = transport_.next_post_++;
  posted_.push_back(std::move(posted));
  if (transport_.completions_ == Completions::kAtOnce) complete(posted_.back());
  deliver();
  const Limits& limits = transport_.options_.limits;
  if (c->pipe->unread() > limits.output_close_bytes) {
    close_connection(
        *c,
        Status(Code::kResourceExhausted, "peer " + c->address + " leaves more than " +
                                             std::to_string(limits.output_close_bytes) +
                                             " bytes of replies unread"),
        true, false);
  }
}

void LoopbackEndpoint::complete(Posted& posted) {
  if (posted.complete) return;
  posted.bytes.resize(posted.list.bytes());
  posted.list.copy_to(posted.bytes.data());
  posted.pin.drop();
  posted.complete = true;
}

// Deliver completed lists to their clients in the order of their posts, each behind its
// connection's earlier lists.
void LoopbackEndpoint::deliver() {
  std::vector<ConnectionId> blocked;
  for (auto it = posted_.begin(); it != posted_.end();) {
    Connection* c = find(it->connection);
    const bool behind = std::find(blocked.begin(), blocked.end(), it->connection) != blocked.end();
    if (!it->complete) {
      blocked.push_back(it->connection);
      ++it;
      continue;
    }
    if (c != nullptr && behind) {
      ++it;
      continue;
    }
    if (c != nullptr) {
      if (c->pipe->unread() == 0) {
        c->pipe->to_client.clear();
        c->pipe->to_client_at = 0;
        c->pipe->taken_ns = base::monotonic_ns();
      }
      c->pipe->to_client.insert(c->pipe->to_client.end(), it->bytes.begin(), it->bytes.end());
      Counters::add(counters_.bytes_sent, it->bytes.size());
      transport_.changed_.notify_all();
    }
    it = posted_.erase(it);
  }
}

void LoopbackEndpoint::complete_some() {
  std::vector<Posted*> waiting;
  for (Posted& posted : posted_) {
    if (!posted.complete) waiting.push_back(&posted);
  }
  std::shuffle(waiting.begin(), waiting.end(), transport_.random_);
  const size_t n = waiting.empty() ? 0 : transport_.random_() % (waiting.size() + 1);
  for (size_t i = 0; i < n; ++i) complete(*waiting[i]);
}

void LoopbackEndpoint::check_pins(uint64_t now) {
  const uint64_t limit = ns(transport_.options_.limits.pin_ms);
  for (Posted& posted : posted_) {
    if (posted.complete || posted.reported || now <= posted.posted_ns + limit) continue;
    posted.reported = true;
    if (find(posted.connection) != nullptr) {
      next_events_.push_back({Event::Kind::kOverdue, posted.connection, {}});
    }
  }
}

void LoopbackEndpoint::pause(ConnectionId connection) {
  const std::lock_guard lock(transport_.mutex_);
  if (Connection* c = find(connection)) c->paused = true;
}

void LoopbackEndpoint::resume(ConnectionId connection) {
  const std::lock_guard lock(transport_.mutex_);
  if (Connection* c = find(connection)) c->paused = false;
}

void LoopbackEndpoint::close(ConnectionId connection, Status reason) {
  const std::lock_guard lock(transport_.mutex_);
  Connection* c = find(connection);
  if (c == nullptr) return;
  const bool for_cause = !reason.ok();
  close_connection(*c, std::move(reason), for_cause, for_cause);
}

// Lists in flight stay in posted_ with their pins until they complete. Their bytes are then lost.
void LoopbackEndpoint::close_connection(Connection& c, Status reason, bool for_cause,
                                        bool sends_error) {
  if (sends_error) {
    std::vector<std::byte> frame;
    transport_.options_.rules.encode_error(reason, frame);
    c.pipe->to_client.insert(c.pipe->to_client.end(), frame.begin(), frame.end());
  }
  Counters::add(counters_.closed, 1);
  if (for_cause) Counters::add(counters_.closed_for_cause, 1);
  next_events_.push_back({Event::Kind::kClosed, id_of(c), std::move(reason)});
  c.pipe->server_ended = true;
  c.pipe.reset();
  c.open = c.paused = false;
  ++c.generation;
  c.in.release();
  c.owed = 0;
  c.frame_clock.reset();
  transport_.changed_.notify_all();
}

size_t LoopbackEndpoint::pending_posts() const {
  const std::lock_guard lock(transport_.mutex_);
  return posted_.size();
}

std::vector<ConnectionId> LoopbackEndpoint::connections() const {
  const std::lock_guard lock(transport_.mutex_);
  std::vector<ConnectionId> ids;
  for (const auto& c : slots_) {
    if (c->open) ids.push_back(id_of(*c));
  }
  return ids;
}

std::string LoopbackEndpoint::peer(ConnectionId connection) const {
  const std::lock_guard lock(transport_.mutex_);
  const Connection* c = find(connection);
  return c == nullptr ? "" : c->address;
}

void LoopbackEndpoint::wake() {
  const std::lock_guard lock(transport_.mutex_);
  woken_ = true;
  transport_.changed_.notify_all();
}

}  // namespace petps::transport
