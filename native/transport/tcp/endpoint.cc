#include "transport/tcp/endpoint.h"

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
constexpr uint64_t kWatchedSlot = kWakeSlot - 1;  // of files that are not ours

}  // namespace

TcpEndpoint::TcpEndpoint(const TcpOptions& options)
    : StreamEndpoint(options.limits, options.rules, options.memory), options_(options) {}

TcpEndpoint::~TcpEndpoint() {
  end();
  if (epoll_ >= 0) ::close(epoll_);
}

Status TcpEndpoint::open() {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  if (epoll_ < 0) return base::errno_status(Code::kIoError, "epoll_create1", errno);
  PETPS_RETURN_IF_ERROR(open_wake());
  return add_file(wake_, kWakeSlot);
}

Status TcpEndpoint::add_file(int file, uint64_t slot) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = slot;
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, file, &event) == 0) return {};
  return base::errno_status(Code::kIoError, "epoll_ctl", errno);
}

Status TcpEndpoint::watch(int file) { return add_file(file, kWatchedSlot); }

void TcpEndpoint::set_interest(Connection& c) {
  uint32_t wanted = 0;
  if (!c.ended && (c.state == State::kLingering || may_read(c))) wanted |= EPOLLIN;
  if (c.has_output()) wanted |= EPOLLOUT;
  if (c.state == State::kOpen && c.paused && !c.left) wanted |= EPOLLRDHUP;
  if (wanted == c.interest || c.fd < 0) return;
  epoll_event event{};
  event.events = wanted;
  event.data.u64 = c.id();
  if (epoll_ctl(epoll_, EPOLL_CTL_MOD, c.fd, &event) == 0) c.interest = wanted;
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
  for (NewPeer& peer : peers) adopt_peer(peer);
}

void TcpEndpoint::adopt_peer(NewPeer& peer) {
  if (peer.needs_room && !make_room()) {
    peer.refusal = too_many_connections(limits_);
    peer.place.reset();
    refused_.fetch_add(1, std::memory_order_relaxed);
    open_.fetch_sub(1, std::memory_order_relaxed);
  }
  auto connection = std::make_unique<Connection>();
  connection->fd = peer.fd;
  connection->place = std::move(peer.place);
  connection->address = std::move(peer.address);
  connection->interest = EPOLLIN;
  if (peer.tls != nullptr) {
    connection->tls = std::move(peer.tls);
    connection->undecrypted = std::move(peer.arrived);
    connection->identity = {true, connection->tls->peer_names()};
    connection->fixed_bytes = tls::Stream::kBytes + connection->undecrypted.capacity();
    leave_to_kernel(*connection);
  } else {
    const int on = 1;
    connection->zerocopy = setsockopt(peer.fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof(on)) == 0;
  }
  Connection& c = tcp(take_slot(std::move(connection)));
  epoll_event event{};
  event.events = c.interest;
  event.data.u64 = c.id();
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, c.fd, &event) != 0) {
    if (peer.refusal.ok()) open_.fetch_sub(1, std::memory_order_relaxed);
    destroy(c);
  } else if (!peer.refusal.ok()) {  // the server gets no event for it
    keep_error(c, peer.refusal);
    start_linger(c);
  } else {
    report_opened(c);
    if (c.has_buffered()) add_candidate(c);
  }
}

// Check the candidates of the last poll again and keep those that have something to report.
// Return true if there are any.
bool TcpEndpoint::review_candidates() {
  reviewed_.swap(candidates_);
  size_t tries = kReceiveTries;
  for (const uint32_t slot : reviewed_) {
    Connection& c = tcp(*slots_[slot]);
    c.candidate = false;
    if (c.state != State::kOpen) continue;
    if (has_worn_key(c) && end_worn(c)) continue;
    set_interest(c);
    // A client with several requests in flight has sent the next one while the last was answered.
    if ((tries > 0 || c.has_buffered()) && !has_frame(c)) {
      tries -= tries > 0 ? 1 : 0;
      receive(c);
      if (c.state != State::kOpen) continue;
    }
    const bool has_more = c.has_buffered() && may_read(c);
    if (c.broken || may_end(c) || has_frame(c) || is_truncated(c) || has_more) add_candidate(c);
  }
  reviewed_.clear();
  return !candidates_.empty();
}

void TcpEndpoint::report_candidates() {
  for (size_t i = 0; i < candidates_.size(); ++i) {
    Connection& c = tcp(*slots_[candidates_[i]]);
    if (c.state != State::kOpen) continue;
    if (!c.broken) {
      report(c);
      continue;
    }
    const linger now{1, 0};  // discard what the kernel still holds for the connection
    setsockopt(c.fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    drop_broken(c);
  }
}

// Wait for events of the sockets and return their number.
int TcpEndpoint::wait(uint64_t now, bool is_busy, int timeout_ms) {
  if (is_busy) {
    // While the connections at hand keep this thread busy, the others are checked every
    // kLookEveryNs.
    if (now - looked_ns_ < kLookEveryNs) return 0;
    timeout_ms = 0;
  } else if (now < busy_until_ns_) {
    timeout_ms = 0;
  } else if (free_slots_.size() != slots_.size()) {
    // The sweep must check the limits of the connections in time.
    const int until = static_cast<int>((next_sweep_ns_ - now) / 1'000'000) + 1;
    timeout_ms = timeout_ms < 0 ? until : std::min(timeout_ms, until);
  }
  looked_ns_ = now;
  return epoll_wait(epoll_, ready_.data(), kEpollEvents, timeout_ms);
}

std::span<const Event> TcpEndpoint::poll(int timeout_ms) {
  flush();
  const uint64_t now = base::monotonic_ns();
  if (now >= next_sweep_ns_) sweep_sockets(now);
  const bool is_busy = review_candidates() || !next_events_.empty();
  const int n = wait(now, is_busy, timeout_ms);
  for (int i = 0; i < n; ++i) {
    const epoll_event& event = ready_[static_cast<size_t>(i)];
    if (event.data.u64 == kWakeSlot) {
      clear_wake();
      continue;
    }
    if (event.data.u64 == kWatchedSlot) continue;
    Connection& c = tcp(*slots_[slot_of(event.data.u64)]);
    if (c.state != State::kFree && c.id() == event.data.u64) handle(c, event.events);
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
  if ((events & EPOLLRDHUP) != 0) c.left = true;
  // Completions appear as an error. A real error appears again when no completions are left.
  const bool has_completions = (events & EPOLLERR) != 0 && !c.flights.empty();
  if (has_completions) collect_completions(c);
  if ((events & EPOLLOUT) != 0 && c.has_output()) send_output(c);
  const bool hung_up = (events & EPOLLHUP) != 0 || ((events & EPOLLERR) != 0 && !has_completions);
  if (c.state == State::kFree || c.state == State::kSettling) return;
  if (c.state == State::kLingering) {
    if (hung_up || (events & EPOLLIN) != 0) {
      discard(c);
    } else if (has_completions && c.ended && c.out.bytes() == 0 && c.flights.empty()) {
      destroy(c);
    }
    return;
  }
  if (hung_up && (c.ended || !may_read(c)))
    break_connection(c, {});  // the peer can no longer read the replies
  if ((events & EPOLLIN) != 0 || hung_up) receive(c);
  add_candidate(c);
}

bool TcpEndpoint::receive(Connection& c) {
  if (c.ended || c.broken || !may_read(c)) return false;
  std::span<std::byte> space = c.in.space(rules_);
  if (space.empty()) return false;
  if (c.in.bytes() >= kFreeBytes) {  // part of a long request
    space = space.first(std::min(space.size(), kTakeBytes));
    if (!memory_->has_room(space.size())) {
      if (!has_frame(c)) fail(c, memory_->refuse(space.size()));
      return false;  // answer whole requests first
    }
  }
  if (c.tls != nullptr) return decrypt(c, space);
  const ssize_t n = ::recv(c.fd, space.data(), space.size(), 0);
  if (n <= 0) {
    note_end(c, n);
    return false;
  }
  const size_t touched = c.in.touched();
  c.in.commit(static_cast<size_t>(n));
  if (c.in.touched() != touched) count_memory(c);
  note_input(static_cast<size_t>(n));
  return true;
}

void TcpEndpoint::note_input(size_t bytes) {
  if (options_.busy_poll_us > 0)
    busy_until_ns_ = base::monotonic_ns() + uint64_t{options_.busy_poll_us} * 1000;
  Counters::add(counters_.bytes_received, bytes);
}

void TcpEndpoint::note_end(Connection& c, ssize_t n) {
  const int error = errno;
  if (n == 0) {
    c.ended = true;
  } else if (error != EAGAIN && error != EWOULDBLOCK && error != EINTR) {
    break_connection(c, base::errno_status(Code::kUnavailable, "recv from " + c.address, error));
  }
}

void TcpEndpoint::receive_waiting(StreamConnection& c) {
  while (c.state == State::kOpen && !has_frame(c) && receive(tcp(c))) {
  }
}

PeerIdentity TcpEndpoint::identity(ConnectionId connection) const {
  const auto* c = static_cast<const Connection*>(find(connection));
  return c == nullptr ? PeerIdentity() : c->identity;
}

}  // namespace petps::transport
