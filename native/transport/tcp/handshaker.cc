#include "transport/tcp/handshaker.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/clock.h"
#include "base/peer.h"
#include "base/time_slice.h"

namespace petps::transport {

using base::Code;
using base::Status;

namespace {

constexpr uint64_t kWake = ~uint64_t{0};
// Sockets that wait until the thread looks at them.
constexpr uint32_t kWaitingMax = 1024;
// A client's whole first flight, and what it sends behind its last one.
constexpr size_t kArrivedBytes = size_t{16} << 10;

Status plain_text_error() {
  return Status(Code::kFailedPrecondition,
                "this port speaks TLS: use petps+tls:// in the client's URL");
}

// Receives of one peer before the others have their turn.
constexpr int kStepsAtOnce = 4;

}  // namespace

Handshaker::Handshaker(const TcpOptions& options, Refusals& refusals,
                       std::function<void(NewPeer)> deliver)
    : options_(options),
      refusals_(refusals),
      deliver_(std::move(deliver)),
      arrived_(kArrivedBytes) {}

Handshaker::~Handshaker() {
  stop();
  if (epoll_ >= 0) ::close(epoll_);
  if (wake_ >= 0) ::close(wake_);
}

Status Handshaker::open() {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWake;
  if (epoll_ < 0 || wake_ < 0 || epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event) != 0)
    return base::errno_status(Code::kIoError, "epoll or eventfd of TLS handshakes", errno);
  return {};
}

void Handshaker::start() {
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "petps-tls");
}

void Handshaker::stop() {
  stopping_.store(true, std::memory_order_release);
  if (thread_.joinable()) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(wake_, &one, sizeof(one));
    thread_.join();
  }
  while (!guests_.empty()) remove(guests_.begin(), true);
  const std::lock_guard lock(mutex_);
  for (const auto& [fd, address] : new_) ::close(fd);
  new_.clear();
}

Handshakes Handshaker::counts() const {
  return {finished_.load(std::memory_order_relaxed), failed_.load(std::memory_order_relaxed),
          refused_.load(std::memory_order_relaxed)};
}

// ---- Taking peers

Refusals::Reason Handshaker::count_in(const std::string& host) {
  if (!options_.memory->has_room(kHandshakeBytes)) return Refusals::Reason::kMemory;
  const std::lock_guard lock(mutex_);
  // The thread makes room for as many as may be at once. More wait for it only if it is behind.
  if (at_once_ >= options_.handshakes.at_once + kWaitingMax) return Refusals::Reason::kHandshakes;
  const auto at = by_host_.find(host);
  if (at != by_host_.end() && at->second >= options_.handshakes.of_one_peer)
    return Refusals::Reason::kHandshakesOfPeer;
  ++by_host_[host];
  ++at_once_;
  return Refusals::Reason::kEnd;
}

void Handshaker::refuse(Refusals::Reason reason, const std::string& host) {
  refused_.fetch_add(1, std::memory_order_relaxed);
  refusals_.count(reason, host);
}

void Handshaker::count_out(const std::string& host) {
  const std::lock_guard lock(mutex_);
  --at_once_;
  const auto at = by_host_.find(host);
  if (--at->second == 0) by_host_.erase(at);
}

void Handshaker::take(int fd, std::string address) {
  const std::string host = base::host_of(address);
  const Refusals::Reason reason = count_in(host);
  if (reason != Refusals::Reason::kEnd) {
    refuse(reason, host);
    ::close(fd);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    new_.emplace_back(fd, std::move(address));
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_, &one, sizeof(one));
}

void Handshaker::adopt_new() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t n = ::read(wake_, &count, sizeof(count));
  std::vector<std::pair<int, std::string>> peers;
  {
    const std::lock_guard lock(mutex_);
    peers.swap(new_);
  }
  for (auto& [fd, address] : peers) adopt(fd, std::move(address));
}

// Close the oldest guest of the peer that has the most; of peers with equally many, the oldest. A
// guest that has failed already goes first.
void Handshaker::make_room() {
  std::unordered_map<std::string, uint32_t> guests;
  for (const auto& [id, guest] : guests_) ++guests[guest.host];
  auto chosen = guests_.begin();
  const auto weight = [&guests](const Guest& guest) {
    return guest.is_lingering ? ~uint32_t{0} : guests[guest.host];
  };
  for (auto at = guests_.begin(); at != guests_.end(); ++at) {
    if (weight(at->second) > weight(chosen->second)) chosen = at;
  }
  if (!chosen->second.is_lingering) refuse(Refusals::Reason::kHandshakes, chosen->second.host);
  remove(chosen, true);
}

void Handshaker::adopt(int fd, std::string address) {
  while (guests_.size() >= options_.handshakes.at_once) make_room();
  const uint64_t id = next_guest_++;
  const auto at = guests_.emplace(id, Guest{}).first;
  Guest& guest = at->second;
  options_.memory->change(0, kHandshakeBytes);
  guest.fd = fd;
  guest.host = base::host_of(address);
  guest.address = std::move(address);
  guest.until_ns = base::monotonic_ns() + options_.handshakes.handshake_ms * 1'000'000;
  auto stream = options_.tls->accept();
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = id;
  if (!stream.ok() || epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) {
    failed_.fetch_add(1, std::memory_order_relaxed);
    remove(at, true);
    return;
  }
  guest.tls = std::move(stream).value();
}

// ---- The thread

void Handshaker::run() {
  base::lower_priority();
  std::array<epoll_event, kEpollEvents> ready{};
  while (!stopping_.load(std::memory_order_acquire)) {
    const int n = epoll_wait(epoll_, ready.data(), kEpollEvents, wait_ms());
    for (int i = 0; i < n; ++i) {
      const uint64_t id = ready[static_cast<size_t>(i)].data.u64;
      if (id == kWake) {
        adopt_new();
      } else if (const auto at = guests_.find(id); at != guests_.end()) {
        advance(at);
      }
    }
    remove_overdue();
  }
}

int Handshaker::wait_ms() const {
  if (guests_.empty()) return -1;
  uint64_t until = ~uint64_t{0};
  for (const auto& [id, guest] : guests_) until = std::min(until, guest.until_ns);
  const uint64_t now = base::monotonic_ns();
  return static_cast<int>((until - std::min(until, now)) / 1'000'000) + 1;
}

void Handshaker::remove_overdue() {
  const uint64_t now = base::monotonic_ns();
  for (auto at = guests_.begin(); at != guests_.end();) {
    const auto next = std::next(at);
    if (now >= at->second.until_ns) {
      if (!at->second.is_lingering) failed_.fetch_add(1, std::memory_order_relaxed);
      remove(at, true);
    }
    at = next;
  }
}

void Handshaker::advance(Guests::iterator at) {
  if (!send_out(at->second)) return fail(at);
  for (int i = 0; i < kStepsAtOnce && step(at); ++i) {
  }
}

bool Handshaker::step(Guests::iterator at) {
  Guest& guest = at->second;
  const ssize_t n = ::recv(guest.fd, arrived_.data(), arrived_.size(), 0);
  if (n < 0 && errno == EINTR) return true;
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    set_interest(at->first, guest);
    return false;
  }
  if (guest.is_lingering && n > 0) return true;  // discard
  if (n <= 0) {
    fail(at);
    return false;
  }
  std::span<const std::byte> arrived = std::span(arrived_).first(static_cast<size_t>(n));
  const Status status = guest.tls->handshake(arrived, guest.out);
  if (guest.tls->is_plain_text()) {
    refuse_plain_text(at);
    return false;
  }
  if (!send_out(guest) || !status.ok()) {
    fail(at);
    return false;
  }
  if (!guest.tls->is_open()) return true;
  finish(at, arrived);
  return false;
}

// The endpoint sends the reason in plain text and waits until the peer has read it.
void Handshaker::refuse_plain_text(Guests::iterator at) {
  failed_.fetch_add(1, std::memory_order_relaxed);
  NewPeer peer;
  peer.fd = at->second.fd;
  peer.address = at->second.address;
  peer.refusal = plain_text_error();
  remove(at, false);
  deliver_(std::move(peer));
}

// A server's handshake ends with a message that it receives, so nothing waits in `out`.
void Handshaker::finish(Guests::iterator at, std::span<const std::byte> rest) {
  finished_.fetch_add(1, std::memory_order_relaxed);
  NewPeer peer;
  peer.fd = at->second.fd;
  peer.address = at->second.address;
  peer.tls = std::move(at->second.tls);
  peer.arrived.assign(rest.begin(), rest.end());
  remove(at, false);
  deliver_(std::move(peer));
}

// Let the peer read the alert: closing a socket with unread input resets it.
void Handshaker::fail(Guests::iterator at) {
  Guest& guest = at->second;
  if (guest.is_lingering) return remove(at, true);
  failed_.fetch_add(1, std::memory_order_relaxed);
  if (!guest.tls->has_failed()) return remove(at, true);
  (void)send_out(guest);
  ::shutdown(guest.fd, SHUT_WR);
  guest.is_lingering = true;
  guest.out.clear();
  guest.until_ns = base::monotonic_ns() + kLingerMs * 1'000'000;
  set_interest(at->first, guest);
}

bool Handshaker::send_out(Guest& guest) {
  size_t sent = 0;
  while (sent < guest.out.size()) {
    const ssize_t n =
        ::send(guest.fd, guest.out.data() + sent, guest.out.size() - sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) return false;
    if (n < 0) break;
    sent += static_cast<size_t>(n);
  }
  guest.out.erase(guest.out.begin(), guest.out.begin() + static_cast<ptrdiff_t>(sent));
  return true;
}

void Handshaker::set_interest(uint64_t id, const Guest& guest) {
  epoll_event event{};
  event.events = guest.out.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT;
  event.data.u64 = id;
  (void)epoll_ctl(epoll_, EPOLL_CTL_MOD, guest.fd, &event);
}

void Handshaker::remove(Guests::iterator at, bool closes) {
  const Guest& guest = at->second;
  if (closes) {
    ::close(guest.fd);
  } else {
    epoll_ctl(epoll_, EPOLL_CTL_DEL, guest.fd, nullptr);
  }
  count_out(guest.host);
  options_.memory->change(kHandshakeBytes, 0);
  guests_.erase(at);
}

}  // namespace petps::transport
