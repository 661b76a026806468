#include "petps_client/connection.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/clock.h"

namespace petps::client {

using base::Code;
using base::Result;
using base::Status;

namespace {

constexpr uint64_t kNsPerMs = 1'000'000;

// Result of getaddrinfo, freed when it goes.
struct Resolved {
  addrinfo* first = nullptr;
  ~Resolved() {
    if (first != nullptr) freeaddrinfo(first);
  }
};

int poll_socket(int socket, short events, const Deadline& deadline, short* ready) {
  pollfd entry{socket, events, 0};
  const uint64_t left = deadline.left_ns();
  const timespec limit{static_cast<time_t>(left / 1'000'000'000),
                       static_cast<long>(left % 1'000'000'000)};
  const int count = ppoll(&entry, 1, &limit, nullptr);
  *ready = entry.revents;
  return count;
}

// A connected, non-blocking socket, or -1 with errno set (ETIMEDOUT at the deadline).
int connect_socket(const addrinfo& to, const Deadline& deadline) {
  const int socket =
      ::socket(to.ai_family, to.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, to.ai_protocol);
  if (socket < 0) return -1;
  int error = connect(socket, to.ai_addr, to.ai_addrlen) == 0 ? 0 : errno;
  while (error == EINPROGRESS || error == EINTR) {
    short ready = 0;
    const int count = poll_socket(socket, POLLOUT, deadline, &ready);
    if (count < 0 && errno == EINTR) continue;
    error = ETIMEDOUT;
    socklen_t size = sizeof(error);
    if (count > 0 && getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    break;
  }
  if (error == 0) return socket;
  close(socket);
  errno = error;
  return -1;
}

}  // namespace

Deadline Deadline::in_ms(uint64_t ms) { return {base::monotonic_ns() + ms * kNsPerMs, ms}; }

Deadline Deadline::share(size_t parts) const {
  const uint64_t now = base::monotonic_ns();
  const uint64_t part = (at_ns > now ? at_ns - now : 0) / parts;
  return {now + part, (part + kNsPerMs - 1) / kNsPerMs};
}

bool Deadline::passed() const { return base::monotonic_ns() >= at_ns; }

uint64_t Deadline::left_ns() const {
  const uint64_t now = base::monotonic_ns();
  return at_ns > now ? at_ns - now : 0;
}

Result<std::unique_ptr<Connection>> Connection::open(const Address& address,
                                                     const Deadline& deadline) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | AI_ADDRCONFIG;
  Resolved resolved;
  const std::string peer = address.text();
  const int failure = getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(),
                                  &hints, &resolved.first);
  if (failure != 0) return Status(Code::kUnavailable, peer + ": " + gai_strerror(failure));
  int error = ECONNREFUSED;
  for (const addrinfo* to = resolved.first; to != nullptr; to = to->ai_next) {
    const int socket = connect_socket(*to, deadline);
    if (socket >= 0) {
      const int on = 1;
      setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
      return std::unique_ptr<Connection>(new Connection(socket, peer));
    }
    error = errno;
  }
  return base::errno_status(Code::kUnavailable, peer + ": connect", error);
}

Connection::~Connection() {
  rdma_.reset();
  if (either_ >= 0) close(either_);
  close(socket_);
}

Status Connection::break_with(Code code, std::string_view what) {
  broken_ = true;
  return Status(code, peer_ + ": " + std::string(what));
}

Status Connection::lost(std::string_view what, int error_number) {
  broken_ = true;
  return base::errno_status(Code::kUnavailable, peer_ + ": " + std::string(what), error_number);
}

Status Connection::distrust(std::string_view what) {
  return break_with(Code::kUnavailable, "the server broke the protocol: " + std::string(what));
}

Status Connection::flush() {
  if (rdma_ != nullptr) {
    const Status sent = rdma_->send(outgoing_);
    outgoing_.clear();
    return sent.ok() || rdma_->has_bytes() ? Status() : break_with(sent.code(), sent.message());
  }
  while (outgoing_sent_ < outgoing_.size()) {
    const ssize_t sent = send(socket_, outgoing_.data() + outgoing_sent_,
                              outgoing_.size() - outgoing_sent_, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return {};
    if (sent < 0) return lost("send", errno);
    outgoing_sent_ += static_cast<size_t>(sent);
  }
  outgoing_.clear();
  outgoing_sent_ = 0;
  if (outgoing_.capacity() > kOutgoingBytesKept) outgoing_.shrink_to_fit();
  return {};
}

Status Connection::wait(const Deadline& deadline) {
  if (rdma_ != nullptr) return wait_rdma(deadline);
  const bool sending = outgoing_sent_ < outgoing_.size();
  short ready = 0;
  const int count = poll_socket(socket_, static_cast<short>(sending ? POLLIN | POLLOUT : POLLIN),
                                deadline, &ready);
  if (count < 0 && errno != EINTR) return lost("poll", errno);
  if (count == 0) {
    return break_with(Code::kDeadlineExceeded,
                      "no complete reply within " + std::to_string(deadline.given_ms) + " ms");
  }
  if (count > 0 && (ready & POLLOUT) != 0) return flush();
  return {};
}

Status Connection::read_pieces(std::span<iovec> pieces, const Deadline& deadline) {
  const auto advance = [&pieces](size_t n) {
    while (!pieces.empty() && n >= pieces.front().iov_len) {
      n -= pieces.front().iov_len;
      pieces = pieces.subspan(1);
    }
    if (n == 0) return;
    pieces.front().iov_base = static_cast<std::byte*>(pieces.front().iov_base) + n;
    pieces.front().iov_len -= n;
  };
  advance(0);  // empty ones
  while (!pieces.empty()) {
    if (rdma_ != nullptr) {
      const size_t n = rdma_->receive(
          {static_cast<std::byte*>(pieces.front().iov_base), pieces.front().iov_len});
      advance(n);
      if (n == 0) PETPS_RETURN_IF_ERROR(wait(deadline));
      continue;
    }
    if (has_read_ahead()) {
      const size_t n = std::min(pieces.front().iov_len, inbox_end_ - inbox_begin_);
      std::memcpy(pieces.front().iov_base, inbox_.data() + inbox_begin_, n);
      inbox_begin_ += n;
      advance(n);
      continue;
    }
    // What comes behind the last piece may be read ahead into the inbox.
    std::array<iovec, kPiecesPerReceive + 1> parts;
    const size_t asked = std::min(pieces.size(), kPiecesPerReceive);
    size_t wanted = 0;
    for (size_t i = 0; i < asked; ++i) {
      parts[i] = pieces[i];
      wanted += pieces[i].iov_len;
    }
    const bool all = asked == pieces.size();
    if (all) parts[asked] = {inbox_.data(), inbox_.size()};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = asked + (all ? 1 : 0);
    const ssize_t received = recvmsg(socket_, &message, 0);
    if (received == 0) return break_with(Code::kUnavailable, "the server closed the connection");
    if (received < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN && errno != EWOULDBLOCK) return lost("receive", errno);
      PETPS_RETURN_IF_ERROR(wait(deadline));
      continue;
    }
    const size_t taken = std::min(wanted, static_cast<size_t>(received));
    advance(taken);
    inbox_begin_ = 0;
    inbox_end_ = static_cast<size_t>(received) - taken;
  }
  return {};
}

Status Connection::read_header(wire::FrameHeader& header, const Deadline& deadline) {
  std::byte bytes[wire::kHeaderBytes];
  PETPS_RETURN_IF_ERROR(read(bytes, deadline));
  const Status decoded = wire::decode_reply_header(bytes, header);
  if (!decoded.ok()) return distrust(decoded.message());
  return {};
}

Result<std::span<const std::byte>> Connection::read_body(const wire::FrameHeader& header,
                                                         const Deadline& deadline) {
  body_.resize((size_t{header.body_bytes} + 7) / 8);  // decode_header bounds it
  const std::span<std::byte> body =
      std::as_writable_bytes(std::span(body_)).first(header.body_bytes);
  PETPS_RETURN_IF_ERROR(read(body, deadline));
  return std::span<const std::byte>(body);
}

Status Connection::read_error(const wire::FrameHeader& header, const Deadline& deadline,
                              Status& error) {
  if (header.body_bytes > wire::kMaxErrorBytes) {
    return distrust("an error text of " + std::to_string(header.body_bytes) + " bytes");
  }
  const auto body = read_body(header, deadline);
  if (!body.ok()) return body.status();
  const Status sent = wire::decode_error(header, body.value());
  error = Status(sent.code(), peer_ + ": " + std::string(sent.message()));
  return {};
}

Result<std::span<const std::byte>> Connection::ask(const wire::Frame& request,
                                                   wire::FrameHeader& reply,
                                                   const Deadline& deadline) {
  wire::FrameHeader sent;
  std::memcpy(&sent, request.data(), wire::kHeaderBytes);
  queue(request);
  PETPS_RETURN_IF_ERROR(flush());
  PETPS_RETURN_IF_ERROR(read_header(reply, deadline));
  if (reply.code != 0) {
    Status error;
    PETPS_RETURN_IF_ERROR(read_error(reply, deadline, error));
    if (reply.request_id != sent.request_id)
      broken_ = true;  // such as a refused connection: it answers nobody
    return error;
  }
  if (reply.request_id != sent.request_id || reply.opcode != (sent.opcode | wire::kReplyBit)) {
    return distrust("a reply to another request than was asked");
  }
  return read_body(reply, deadline);
}

bool Connection::is_reusable() {
  if (broken_ || outgoing_sent_ < outgoing_.size() || has_read_ahead()) return false;
  if (rdma_ != nullptr && (!rdma_->progress().ok() || rdma_->has_bytes() || rdma_->ended()))
    return false;
  return is_quiet();
}

bool Connection::is_quiet() const {
  std::byte byte;
  const ssize_t received = recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
}

}  // namespace petps::client
