#include "petps_client/dial.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <system_error>
#include <thread>

#include "base/clock.h"

namespace petps::client {

using base::Code;
using base::Result;
using base::Status;

namespace {

// How long a resolved name is used: its addresses change when a server moves. Connections are
// opened rarely, but then many at once; the cache spares the resolver.
constexpr uint64_t kRecentNs = 10'000'000'000;
// Longest delay before the next address of a name is tried. RFC 8305 recommends 100 to 2,000 ms
// on the internet; a data centre replies sooner.
constexpr uint64_t kNextAddressNs = 100'000'000;

int resolve_with(const Address& address, int flags, std::vector<SocketAddress>& addresses) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* first = nullptr;
  const int failure =
      getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &first);
  if (failure != 0) return failure;
  for (const addrinfo* at = first; at != nullptr; at = at->ai_next) {
    if (at->ai_addrlen > sizeof(sockaddr_storage)) continue;
    SocketAddress next;
    std::memcpy(&next.bytes, at->ai_addr, at->ai_addrlen);
    next.size = at->ai_addrlen;
    addresses.push_back(next);
  }
  freeaddrinfo(first);
  return 0;
}

int resolve_by_system(const Address& address, std::vector<SocketAddress>& addresses) {
  return resolve_with(address, AI_ADDRCONFIG, addresses);
}

// Return the socket address of a numeric host; empty for a name.
std::vector<SocketAddress> resolve_numeric(const Address& address) {
  std::vector<SocketAddress> addresses;
  // With AI_NUMERICHOST a name fails at once, without a query to a name server.
  (void)resolve_with(address, AI_NUMERICHOST, addresses);
  return addresses;
}

// Return a socket that is connecting or connected; -1 if it failed at once, with errno set.
int begin_connect(const SocketAddress& to) {
  const int socket = ::socket(to.bytes.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (socket < 0) return -1;
  const auto* address = reinterpret_cast<const sockaddr*>(&to.bytes);
  if (connect(socket, address, to.size) == 0 || errno == EINPROGRESS || errno == EINTR)
    return socket;
  const int error = errno;
  close(socket);
  errno = error;
  return -1;
}

// Connection attempts in flight. The destructor closes the remaining ones.
struct Attempts {
  std::vector<pollfd> sockets;
  ~Attempts() {
    for (const pollfd& entry : sockets) close(entry.fd);
  }
  // Remove and return the first connected socket, or return -1. Close sockets that failed, and set
  // `error` to the reason of the last one.
  int take_connected(int& error) {
    int connected = -1;
    std::erase_if(sockets, [&](const pollfd& entry) {
      if (connected >= 0 || entry.revents == 0) return false;
      int failure = 0;
      socklen_t size = sizeof(failure);
      if (getsockopt(entry.fd, SOL_SOCKET, SO_ERROR, &failure, &size) != 0) failure = errno;
      if (failure == 0) {
        connected = entry.fd;
      } else {
        error = failure;
        close(entry.fd);
      }
      return true;
    });
    return connected;
  }
};

}  // namespace

HostLookup::HostLookup(Address address, Resolve resolve)
    : address_(std::move(address)),
      resolve_(resolve != nullptr ? resolve : resolve_by_system),
      numeric_(resolve != nullptr ? std::vector<SocketAddress>() : resolve_numeric(address_)) {}

HostLookup::HostLookup(Address address, const SocketAddress& at)
    : address_(std::move(address)), resolve_(resolve_by_system), numeric_({at}) {}

HostLookup::Resolve resolver_of(const Options& options) {
  if (options.resolve == nullptr) return nullptr;
  return
      [resolve = options.resolve](const Address& address, std::vector<SocketAddress>& addresses) {
        const auto hosts = resolve(address.host);
        if (!hosts.ok()) return hosts.status().code() == Code::kNotFound ? EAI_NONAME : EAI_AGAIN;
        for (const std::string& host : hosts.value()) {
          const int failure = resolve_with({host, address.port}, AI_NUMERICHOST, addresses);
          if (failure != 0) return failure;
        }
        return 0;
      };
}

std::string text_of(const SocketAddress& address) {
  char host[NI_MAXHOST] = "?";
  (void)getnameinfo(reinterpret_cast<const sockaddr*>(&address.bytes), address.size, host,
                    sizeof(host), nullptr, 0, NI_NUMERICHOST);
  return host;
}

// Called with shared_->mutex held.
void HostLookup::start() {
  shared_->is_running = true;
  const auto run = [shared = shared_, resolve = resolve_, address = address_] {
    std::vector<SocketAddress> addresses;
    const int failure = resolve(address, addresses);
    const std::lock_guard lock(shared->mutex);
    shared->is_running = false;
    shared->finished += 1;
    shared->failure = failure;
    if (failure == 0) {
      shared->addresses = std::move(addresses);
      shared->resolved_at_ns = base::monotonic_ns();
      shared->is_recent = true;
    }
    shared->changed.notify_all();
  };
  std::thread(run).detach();
}

Result<std::vector<SocketAddress>> HostLookup::addresses(const Deadline& deadline) {
  if (!numeric_.empty()) return numeric_;
  const std::string peer = address_.text();
  std::unique_lock lock(shared_->mutex);
  if (shared_->is_recent && base::monotonic_ns() - shared_->resolved_at_ns < kRecentNs)
    return shared_->addresses;
  const uint64_t before = shared_->finished;
  try {
    if (!shared_->is_running) start();
  } catch (const std::system_error& error) {
    shared_->is_running = false;
    return Status(Code::kResourceExhausted,
                  peer + ": cannot start a thread to resolve the name: " + error.what());
  }
  const bool is_finished =
      shared_->changed.wait_for(lock, std::chrono::nanoseconds(deadline.left_ns()),
                                [&] { return shared_->finished != before; });
  // If the name servers cannot be reached, use the older result, as when they are slow.
  const bool has_older = shared_->failure == EAI_AGAIN && !shared_->addresses.empty();
  if (is_finished && shared_->failure != 0 && !has_older) {
    return Status(Code::kUnavailable, peer + ": " + gai_strerror(shared_->failure));
  }
  if (!shared_->addresses.empty()) return shared_->addresses;
  return Status(Code::kDeadlineExceeded, peer + ": its name was not resolved within " +
                                             std::to_string(deadline.given_ms) + " ms");
}

void HostLookup::forget() {
  const std::lock_guard lock(shared_->mutex);
  shared_->is_recent = false;
}

Result<int> connect_any(const std::string& peer, std::span<const SocketAddress> addresses,
                        const Deadline& deadline) {
  Attempts attempts;
  int error = ECONNREFUSED;
  size_t started = 0;
  uint64_t next_at_ns = base::monotonic_ns();
  for (;;) {
    const uint64_t now = base::monotonic_ns();
    if (started < addresses.size() && (now >= next_at_ns || attempts.sockets.empty())) {
      const size_t left = addresses.size() - started;
      next_at_ns = now + std::min(kNextAddressNs, deadline.left_ns() / (left + 1));
      const int socket = begin_connect(addresses[started++]);
      if (socket >= 0) {
        attempts.sockets.push_back({socket, POLLOUT, 0});
      } else {
        error = errno;
        continue;
      }
    }
    if (attempts.sockets.empty())
      return base::errno_status(Code::kUnavailable, peer + ": connect", error);
    // This thread may not have run until the deadline was over: the sockets count first.
    const bool is_late = deadline.passed();
    uint64_t wait_ns = deadline.left_ns();
    if (started < addresses.size())
      wait_ns = std::min(wait_ns, next_at_ns - std::min(next_at_ns, base::monotonic_ns()));
    const timespec limit = timespec_of(wait_ns);
    const int count = ppoll(attempts.sockets.data(), attempts.sockets.size(), &limit, nullptr);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return base::errno_status(Code::kUnavailable, peer + ": poll", errno);
    const int connected = attempts.take_connected(error);
    if (connected >= 0) return connected;
    if (is_late && (!attempts.sockets.empty() || started < addresses.size())) {
      return Status(Code::kDeadlineExceeded, peer + ": connect: no reply within " +
                                                 std::to_string(deadline.given_ms) + " ms");
    }
  }
}

}  // namespace petps::client
