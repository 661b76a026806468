#include "transport/tcp/endpoint.h"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"

namespace petps::transport {

using base::Code;
using base::Status;

namespace {

constexpr uint64_t kWakeSlot = ~uint64_t{0};

uint64_t ns(uint64_t ms) { return ms * 1'000'000; }

}  // namespace

TcpEndpoint::TcpEndpoint(const TcpOptions& options) : options_(options) {
  // Limits are enforced to within a quarter of the shortest one, and the sweep runs at least
  // every 250 ms.
  const Limits& limits = options_.limits;
  const uint64_t idle_ms = limits.idle_ms == 0 ? limits.pin_ms : limits.idle_ms;
  const uint64_t shortest =
      std::min({limits.output_stall_ms, limits.frame_ms, limits.pin_ms, idle_ms});
  sweep_ns_ = ns(std::clamp<uint64_t>(shortest / 4, 1, 250));
}

TcpEndpoint::~TcpEndpoint() {
  end();
  for (const NewPeer& peer : new_) ::close(peer.fd);
  if (wake_ >= 0) ::close(wake_);
  if (epoll_ >= 0) ::close(epoll_);
}

Status TcpEndpoint::open() {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  if (epoll_ < 0) return base::errno_status(Code::kIoError, "epoll_create1", errno);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_ < 0) return base::errno_status(Code::kIoError, "eventfd", errno);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeSlot;
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event) != 0) {
    return base::errno_status(Code::kIoError, "epoll_ctl", errno);
  }
  return {};
}

TcpEndpoint::Connection* TcpEndpoint::find(ConnectionId id) const {
  const uint32_t slot = slot_of(id);
  if (slot >= slots_.size()) return nullptr;
  Connection* c = slots_[slot].get();
  return c->state == State::kOpen && c->generation == static_cast<uint32_t>(id >> 32) ? c : nullptr;
}

bool TcpEndpoint::may_read(const Connection& c) const {
  if (c.paused) return false;
  return c.output() == 0 ||
         (c.output() < options_.limits.output_pause_bytes && !options_.memory->is_tight());
}

void TcpEndpoint::count_memory(Connection& c) {
  const size_t now = c.in.touched() + c.out.capacity();
  options_.memory->change(c.counted, now);
  c.counted = now;
}

void TcpEndpoint::add_candidate(Connection& c) {
  if (c.candidate) return;
  c.candidate = true;
  candidates_.push_back(c.slot);
}

void TcpEndpoint::set_interest(Connection& c) {
  uint32_t wanted = 0;
  if (!c.ended && (c.state == State::kLingering || may_read(c))) wanted |= EPOLLIN;
  if (c.output() > 0) wanted |= EPOLLOUT;
  if (wanted == c.interest || c.fd < 0) return;
  epoll_event event{};
  event.events = wanted;
  event.data.u64 = id_of(c);
  if (epoll_ctl(epoll_, EPOLL_CTL_MOD, c.fd, &event) == 0) c.interest = wanted;
}

void TcpEndpoint::wake() {
  const uint64_t one = 1;
  // A full counter (EAGAIN) has already woken the poll.
  [[maybe_unused]] const ssize_t n = ::write(wake_, &one, sizeof(one));
}

void TcpEndpoint::adopt(NewPeer peer) {
  assigned_.fetch_add(1, std::memory_order_relaxed);
  if (peer.refusal.ok()) open_.fetch_add(1, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    new_.push_back(std::move(peer));
  }
  has_new_.store(true, std::memory_order_release);
  wake();
}

void TcpEndpoint::ask_for_room() {
  wants_room_.store(true, std::memory_order_release);
  wake();
}

void TcpEndpoint::adopt_new() {
  std::vector<NewPeer> peers;
  {
    const std::lock_guard lock(mutex_);
    has_new_.store(false, std::memory_order_relaxed);
    peers.swap(new_);
  }
  for (NewPeer& peer : peers) {
    if (peer.needs_room && !make_room()) {
      peer.refusal = too_many_connections(options_.limits);
      refused_.fetch_add(1, std::memory_order_relaxed);
      open_.fetch_sub(1, std::memory_order_relaxed);
    }
    if (free_slots_.empty()) {
      free_slots_.push_back(static_cast<uint32_t>(slots_.size()));
      slots_.push_back(std::make_unique<Connection>());
      slots_.back()->slot = free_slots_.back();
    }
    Connection& c = *slots_[free_slots_.back()];
    free_slots_.pop_back();
    c.fd = peer.fd;
    c.address = std::move(peer.address);
    c.state = State::kOpen;
    c.interest = EPOLLIN;
    c.idle_clock.begin(c.in, base::monotonic_ns());
    const int on = 1;
    c.zerocopy = setsockopt(c.fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof(on)) == 0;
    epoll_event event{};
    event.events = c.interest;
    event.data.u64 = id_of(c);
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, c.fd, &event) != 0) {
      if (peer.refusal.ok()) open_.fetch_sub(1, std::memory_order_relaxed);
      destroy(c);
      continue;
    }
    if (!peer.refusal.ok()) {  // the server gets no event for it
      std::vector<std::byte> frame;
      options_.rules.encode_error(peer.refusal, frame);
      keep_output(c, frame.data(), frame.size());
      start_linger(c);
      continue;
    }
    Counters::add(counters_.opened, 1);
    next_events_.push_back({Event::Kind::kOpened, id_of(c), {}});
  }
}

// Check the candidates of the last poll again and keep those that have something to report.
// Return true if there are any.
bool TcpEndpoint::review_candidates() {
  scratch_.swap(candidates_);
  size_t tries = kReceiveTries;
  for (const uint32_t slot : scratch_) {
    Connection& c = *slots_[slot];
    c.candidate = false;
    if (c.state != State::kOpen) continue;
    set_interest(c);
    // A client with several requests in flight has sent the next one while the last was answered.
    if (tries > 0 && !has_frame(c)) {
      --tries;
      receive(c);
    }
    if (c.broken || may_end(c) || has_frame(c)) add_candidate(c);
  }
  scratch_.clear();
  return !candidates_.empty();
}

// The peer sends no more and has received everything. A connection that is paused, or owed a
// reply, must stay, because the server still works for it.
bool TcpEndpoint::may_end(const Connection& c) const {
  return c.ended && c.output() == 0 && c.flights.empty() && !c.paused && c.owed <= 0;
}

// Also false while the connection is paused or its output is not taken: resume() or the drained
// output makes it a candidate again.
bool TcpEndpoint::has_frame(Connection& c) {
  if (!may_read(c)) return false;
  std::span<const std::byte> frame;
  Status reason;
  const ReceiveBuffer::Look look = c.in.look(options_.rules, frame, reason);
  return look == ReceiveBuffer::Look::kFrame || look == ReceiveBuffer::Look::kBroken;
}

void TcpEndpoint::report_candidates() {
  // fail() adds no candidate, because its connection is no longer open.
  for (size_t i = 0; i < candidates_.size(); ++i) {
    Connection& c = *slots_[candidates_[i]];
    if (c.state != State::kOpen) continue;
    if (c.broken) {
      abort_connection(c, std::move(c.broken_reason), c.broken_for_cause);
      continue;
    }
    std::span<const std::byte> frame;
    Status reason;
    const ReceiveBuffer::Look look =
        may_read(c) ? c.in.look(options_.rules, frame, reason) : ReceiveBuffer::Look::kNothing;
    if (look == ReceiveBuffer::Look::kFrame) {
      next_events_.push_back({Event::Kind::kFrames, id_of(c), {}});
    } else if (look == ReceiveBuffer::Look::kBroken) {
      fail(c, std::move(reason));
    } else if (look == ReceiveBuffer::Look::kPartial && c.ended) {
      fail(c, truncated_frame(c.in.bytes()));
    } else if (may_end(c)) {
      finish(c, {}, false);
      destroy(c);
    }
  }
}

std::span<const Event> TcpEndpoint::poll(int timeout_ms) {
  flush();
  const uint64_t now = base::monotonic_ns();
  if (now >= next_sweep_ns_) sweep(now);
  const bool waiting = review_candidates();
  int wait = timeout_ms;
  const bool busy = waiting || !next_events_.empty();
  if (busy) {
    wait = 0;
  } else if (free_slots_.size() != slots_.size()) {
    // The sweep must check the limits of the connections in time.
    const int until = static_cast<int>((next_sweep_ns_ - now) / 1'000'000) + 1;
    wait = wait < 0 ? until : std::min(wait, until);
  }
  // While the connections at hand keep this thread busy, the others are checked every
  // kLookEveryNs.
  int n = 0;
  if (!busy || now - looked_ns_ >= kLookEveryNs) {
    looked_ns_ = now;
    n = epoll_wait(epoll_, ready_.data(), kEpollEvents, wait);
  }
  for (int i = 0; i < n; ++i) {
    const uint64_t id = ready_[static_cast<size_t>(i)].data.u64;
    if (id == kWakeSlot) {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t got = ::read(wake_, &count, sizeof(count));
      continue;
    }
    Connection& c = *slots_[slot_of(id)];
    if (c.state != State::kFree && id_of(c) == id) handle(c, ready_[static_cast<size_t>(i)].events);
  }
  if (wants_room_.exchange(false, std::memory_order_acquire)) make_room();
  if (has_new_.load(std::memory_order_acquire)) adopt_new();
  report_candidates();
  events_.clear();
  events_.swap(next_events_);
  return events_;
}

void TcpEndpoint::handle(Connection& c, uint32_t events) {
  if (c.state == State::kSettling) return;
  // Completions appear as an error. A real error appears again when no completions are left.
  const bool completions = (events & EPOLLERR) != 0 && !c.flights.empty();
  if (completions) collect_completions(c);
  if ((events & EPOLLOUT) != 0 && c.output() > 0) send_output(c);
  const bool hung_up = (events & EPOLLHUP) != 0 || ((events & EPOLLERR) != 0 && !completions);
  if (c.state == State::kFree || c.state == State::kSettling) return;
  if (c.state == State::kLingering) {
    if (hung_up || (events & EPOLLIN) != 0) {
      discard(c);
    } else if (completions && c.ended && c.output() == 0 && c.flights.empty()) {
      destroy(c);
    }
    return;
  }
  if (hung_up && (c.ended || !may_read(c)))
    break_connection(c, {});  // the peer can no longer read the replies
  if ((events & EPOLLIN) != 0 || hung_up) receive(c);
  add_candidate(c);
}

void TcpEndpoint::receive(Connection& c) {
  if (c.ended || c.broken || !may_read(c)) return;
  std::span<std::byte> space = c.in.space(options_.rules);
  if (space.empty()) return;
  if (c.in.bytes() >= kFreeBytes) {  // part of a long request
    space = space.first(std::min(space.size(), kTakeBytes));
    if (!options_.memory->has_room(space.size())) {
      if (!has_frame(c)) fail(c, options_.memory->refuse(space.size()));
      return;  // answer whole requests first
    }
  }
  const ssize_t n = ::recv(c.fd, space.data(), space.size(), 0);
  if (n > 0) {
    const size_t touched = c.in.touched();
    c.in.received(static_cast<size_t>(n));
    if (c.in.touched() != touched) count_memory(c);
    Counters::add(counters_.bytes_received, static_cast<uint64_t>(n));
  } else if (n == 0) {
    c.ended = true;
  } else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
    break_connection(c, base::errno_status(Code::kUnavailable, "recv", errno));
  }
}

bool TcpEndpoint::peek(ConnectionId connection, std::span<const std::byte>& frame) {
  Connection* c = find(connection);
  if (c == nullptr || c->broken || !may_read(*c)) return false;
  Status reason;
  const ReceiveBuffer::Look look = c->in.look(options_.rules, frame, reason);
  if (look == ReceiveBuffer::Look::kBroken) fail(*c, std::move(reason));
  return look == ReceiveBuffer::Look::kFrame;
}

void TcpEndpoint::keep(ConnectionId connection) {
  if (Connection* c = find(connection)) c->kept = true;
}

void TcpEndpoint::consume(ConnectionId connection) {
  Connection* c = find(connection);
  if (c == nullptr) return;
  c->in.consume();
  ++c->owed;
  Counters::add(counters_.frames_received, 1);
}

void TcpEndpoint::pause(ConnectionId connection) {
  Connection* c = find(connection);
  if (c == nullptr || c->paused) return;
  c->paused = true;
  set_interest(*c);
}

void TcpEndpoint::resume(ConnectionId connection) {
  Connection* c = find(connection);
  if (c == nullptr || !c->paused) return;
  c->paused = false;
  set_interest(*c);
  add_candidate(*c);
}

std::vector<ConnectionId> TcpEndpoint::connections() const {
  std::vector<ConnectionId> ids;
  for (const auto& c : slots_) {
    if (c->state == State::kOpen) ids.push_back(id_of(*c));
  }
  return ids;
}

std::string TcpEndpoint::peer(ConnectionId connection) const {
  const Connection* c = find(connection);
  return c == nullptr ? "" : c->address;
}

}  // namespace petps::transport
