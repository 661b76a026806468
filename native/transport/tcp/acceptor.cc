#include "transport/tcp/acceptor.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "base/peer.h"

namespace petps::transport {

using base::Code;
using base::Status;

namespace {

// Accept numeric addresses only: a name that resolves to a public address would open a port to
// the world by accident.
Status parse_address(const std::string& host, uint16_t port, sockaddr_storage& out,
                     socklen_t& length) {
  out = {};
  auto* v4 = reinterpret_cast<sockaddr_in*>(&out);
  if (inet_pton(AF_INET, host.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    length = sizeof(sockaddr_in);
    return {};
  }
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&out);
  if (inet_pton(AF_INET6, host.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    length = sizeof(sockaddr_in6);
    return {};
  }
  return Status(Code::kInvalidArgument,
                "host '" + host + "' is not a numeric IPv4 or IPv6 address");
}

std::string address_text(const sockaddr_storage& address) {
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  getnameinfo(reinterpret_cast<const sockaddr*>(&address), sizeof(address), host.data(),
              host.size(), port.data(), port.size(), NI_NUMERICHOST | NI_NUMERICSERV);
  const std::string text = host.data();
  return (address.ss_family == AF_INET6 ? "[" + text + "]" : text) + ":" + port.data();
}

}  // namespace

Acceptor::Acceptor(const TcpOptions& options, Places& places,
                   std::vector<std::unique_ptr<TcpEndpoint>>& endpoints)
    : options_(options), places_(places), endpoints_(endpoints) {
  if (options_.tls == nullptr) return;
  handshaker_ = std::make_unique<Handshaker>(options_, refusals_,
                                             [this](NewPeer peer) { hand_over(std::move(peer)); });
}

Acceptor::~Acceptor() {
  stop();
  if (listener_ >= 0) ::close(listener_);
  if (stop_ >= 0) ::close(stop_);
  if (reserve_ >= 0) ::close(reserve_);
}

Status Acceptor::listen() {
  sockaddr_storage address{};
  socklen_t length = 0;
  PETPS_RETURN_IF_ERROR(parse_address(options_.host, options_.port, address, length));
  const std::string where = options_.host + ":" + std::to_string(options_.port);
  listener_ = ::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listener_ < 0) return base::errno_status(Code::kIoError, "socket", errno);
  const int on = 1;
  setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));  // reopen at once after a crash
  // Accepted sockets inherit the buffer sizes, and the receive window must be known before the
  // handshake.
  if (options_.socket_buffer_bytes > 0) {
    const int size = options_.socket_buffer_bytes;
    setsockopt(listener_, SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
    setsockopt(listener_, SOL_SOCKET, SO_RCVBUF, &size, sizeof(size));
  }
  if (::bind(listener_, reinterpret_cast<sockaddr*>(&address), length) != 0) {
    const int error = errno;
    return base::errno_status(error == EADDRINUSE ? Code::kUnavailable : Code::kIoError,
                              "cannot listen on " + where + " (choose another port, 0 for any)",
                              error);
  }
  if (::listen(listener_, kBacklog) != 0)
    return base::errno_status(Code::kIoError, "listen on " + where, errno);
  length = sizeof(address);
  if (getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    return base::errno_status(Code::kIoError, "getsockname", errno);
  }
  port_ = address.ss_family == AF_INET
              ? ntohs(reinterpret_cast<sockaddr_in*>(&address)->sin_port)
              : ntohs(reinterpret_cast<sockaddr_in6*>(&address)->sin6_port);
  stop_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  reserve_ = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (stop_ < 0 || reserve_ < 0)
    return base::errno_status(Code::kIoError, "eventfd or /dev/null", errno);
  return handshaker_ == nullptr ? Status() : handshaker_->open();
}

Status Acceptor::start() {
  if (thread_.joinable()) return Status(Code::kFailedPrecondition, "tcp: start() was called twice");
  if (handshaker_ != nullptr) handshaker_->start();
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "petps-accept");
  return {};
}

void Acceptor::stop() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(stop_, &one, sizeof(one));
  thread_.join();
  if (handshaker_ != nullptr) handshaker_->stop();
  ::close(listener_);  // resets the peers in the backlog, so that they do not wait for an answer
  listener_ = -1;
}

void Acceptor::run() {
  std::array<pollfd, 2> fds{pollfd{listener_, POLLIN, 0}, pollfd{stop_, POLLIN, 0}};
  while (true) {
    const int n = ::poll(fds.data(), fds.size(), -1);
    if (n < 0 && errno != EINTR) return;
    if (fds[1].revents != 0) return;
    if (n > 0 && fds[0].revents != 0) accept_peer();
  }
}

void Acceptor::accept_peer() {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  const int fd = ::accept4(listener_, reinterpret_cast<sockaddr*>(&address), &length,
                           SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd >= 0) {
    tune(fd);
    if (handshaker_ != nullptr) {
      handshaker_->take(fd, address_text(address));
    } else {
      NewPeer peer;
      peer.fd = fd;
      peer.address = address_text(address);
      hand_over(std::move(peer));
    }
    return;
  }
  // A peer that gave up (ECONNABORTED) or a network error concerns that peer only.
  if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
    refuse_without_descriptors();
}

void Acceptor::tune(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  // A peer whose machine is gone sends nothing. Probe it after a minute, give up after two.
  const int idle_s = 60;
  const int interval_s = 10;
  const int probes = 6;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof(interval_s));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
}

void Acceptor::hand_over(NewPeer peer) {
  Status refusal = find_place(peer);
  uint32_t open = 0;
  uint32_t leaving = 0;
  TcpEndpoint* fewest = endpoints_.front().get();
  for (const auto& endpoint : endpoints_) {
    const uint32_t connections = endpoint->open_count();
    open += connections;
    const uint32_t sockets = endpoint->assigned();
    leaving += sockets - std::min(sockets, connections);  // the two counts are not read together
    if (sockets < fewest->assigned()) fewest = endpoint.get();
  }
  TcpEndpoint* idlest = nullptr;
  if (refusal.ok() && open >= options_.limits.connections) {
    idlest = longest_idle();
    if (idlest == nullptr) {
      refusal = too_many_connections(options_.limits);
      refusals_.count(Refusals::Reason::kConnections, base::host_of(peer.address));
    }
  }
  if (!refusal.ok()) {
    peer.place.reset();
    refused_.fetch_add(1, std::memory_order_relaxed);
    if (leaving >= kRefusalsAtOnce) {
      ::close(peer.fd);
      return;
    }
  }
  TcpEndpoint& chosen = idlest != nullptr ? *idlest : *fewest;
  peer.refusal = std::move(refusal);
  peer.needs_room = idlest != nullptr;
  chosen.adopt(std::move(peer));
}

Status Acceptor::find_place(NewPeer& peer) {
  if (!peer.refusal.ok()) return std::move(peer.refusal);
  if (options_.admit) PETPS_RETURN_IF_ERROR(options_.admit(Peer{peer.address}));
  const std::string host = base::host_of(peer.address);
  peer.place = places_.take(host, options_.limits.connections_per_peer);
  if (peer.place != nullptr) return {};
  refusals_.count(Refusals::Reason::kConnectionsOfPeer, host);
  return too_many_of_peer(host, options_.limits);
}

// Return the endpoint whose connection has been idle the longest, or null if none has been idle
// for kSpareIdleMs.
TcpEndpoint* Acceptor::longest_idle() const {
  const uint64_t now = base::monotonic_ns();
  TcpEndpoint* idlest = nullptr;
  uint64_t since = now - std::min(now, kSpareIdleMs * 1'000'000);
  for (const auto& endpoint : endpoints_) {
    if (endpoint->idle_since_ns() > since) continue;
    since = endpoint->idle_since_ns();
    idlest = endpoint.get();
  }
  return idlest;
}

// Refuse the peer that waits. Otherwise the listener stays readable, the thread spins, and the peer
// gets no answer.
void Acceptor::refuse_without_descriptors() {
  ::close(reserve_);
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  const int fd = ::accept4(listener_, reinterpret_cast<sockaddr*>(&address), &length,
                           SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd >= 0) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    refusals_.count(Refusals::Reason::kDescriptors, base::host_of(address_text(address)));
    if (options_.tls == nullptr) {  // before its handshake a TLS peer could not read it
      std::vector<std::byte> frame;
      options_.rules.encode_error(
          Status(
              Code::kResourceExhausted,
              "the server has no file descriptors left: try again, or raise its limit (ulimit -n)"),
          frame);
      [[maybe_unused]] const ssize_t n = ::send(fd, frame.data(), frame.size(), MSG_NOSIGNAL);
    }
    ::close(fd);
    if (TcpEndpoint* idlest = longest_idle()) idlest->ask_for_room();  // for the next peer
  } else {
    ::poll(nullptr, 0, 10);  // memory is short: try again in a moment
  }
  reserve_ = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
}

}  // namespace petps::transport
