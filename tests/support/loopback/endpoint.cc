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
constexpr std::chrono::milliseconds kLook(1);

uint64_t ns(uint64_t ms) { return ms * 1'000'000; }

}  // namespace

LoopbackEndpoint::Connection* LoopbackEndpoint::find(ConnectionId id) const {
  const uint32_t slot = slot_of(id);
  if (slot >= slots_.size()) return nullptr;
  Connection* c = slots_[slot].get();
  return c->open && c->generation == static_cast<uint32_t>(id >> 32) ? c : nullptr;
}

bool LoopbackEndpoint::may_read(const Connection& c) const {
  return !c.paused && c.line->unread() < transport_.options_.limits.output_pause_bytes;
}

void LoopbackEndpoint::adopt(std::shared_ptr<Line> line, std::string address) {
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
  c->line = std::move(line);
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
    transport_.changed_.wait_for(lock, kLook);
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
  Line& line = *c.line;
  if (line.client_gone) {
    end_connection(c, {}, false, false);
    return;
  }
  if (line.unread() == 0) line.taken_ns = now;
  if (now > line.taken_ns + ns(limits.output_stall_ms)) {
    end_connection(c, reads_nothing(c.address, limits), true, false);
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
    end_connection(c, std::move(reason), true, true);
  } else if (look == ReceiveBuffer::Look::kPartial && line.client_ended) {
    end_connection(c, truncated_frame(c.in.bytes()), true, true);
  } else if (look == ReceiveBuffer::Look::kPartial) {
    if (c.frame_clock.overdue(c.in, limits, now)) {
      end_connection(c, slow_frame(limits), true, true);
    }
  } else if (line.client_ended && line.unread() == 0 && c.owed <= 0 &&
             std::none_of(posted_.begin(), posted_.end(),
                          [&](const Posted& p) { return p.connection == id_of(c); })) {
    end_connection(c, {}, false, false);
  }
}

void LoopbackEndpoint::take_input(Connection& c) {
  std::vector<std::byte>& input = c.line->to_server;
  while (!input.empty()) {
    const std::span<std::byte> space = c.in.space(transport_.options_.rules);
    if (space.empty()) return;
    const size_t n = std::min(space.size(), input.size());
    std::memcpy(space.data(), input.data(), n);
    input.erase(input.begin(), input.begin() + static_cast<ptrdiff_t>(n));
    c.in.received(n);
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
  if (look == ReceiveBuffer::Look::kBroken) end_connection(*c, std::move(reason), true, true);
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
  if (c->line->unread() > limits.output_close_bytes) {
    end_connection(*c,
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
      if (c->line->unread() == 0) {
        c->line->to_client.clear();
        c->line->to_client_at = 0;
        c->line->taken_ns = base::monotonic_ns();
      }
      c->line->to_client.insert(c->line->to_client.end(), it->bytes.begin(), it->bytes.end());
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
  end_connection(*c, std::move(reason), for_cause, for_cause);
}

// Lists that are still in flight stay in posted_, with their pins, until they complete; their
// bytes are then lost.
void LoopbackEndpoint::end_connection(Connection& c, Status reason, bool for_cause, bool tell) {
  if (tell) {
    std::vector<std::byte> frame;
    transport_.options_.rules.encode_error(reason, frame);
    c.line->to_client.insert(c.line->to_client.end(), frame.begin(), frame.end());
  }
  Counters::add(counters_.closed, 1);
  if (for_cause) Counters::add(counters_.closed_for_cause, 1);
  next_events_.push_back({Event::Kind::kClosed, id_of(c), std::move(reason)});
  c.line->server_ended = true;
  c.line.reset();
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
