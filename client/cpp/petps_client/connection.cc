#include "petps_client/connection.h"

#include <fcntl.h>
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

int poll_socket(int socket, short events, const Deadline& deadline, short* ready) {
  pollfd entry{socket, events, 0};
  const timespec limit = timespec_of(deadline.left_ns());
  const int count = ppoll(&entry, 1, &limit, nullptr);
  *ready = entry.revents;
  return count;
}

}  // namespace

Deadline Deadline::in_ms(uint64_t ms) { return {base::monotonic_ns() + ms * kNsPerMs, ms}; }

Deadline Deadline::share(size_t parts) const {
  const uint64_t now = base::monotonic_ns();
  const uint64_t part = (at_ns > now ? at_ns - now : 0) / parts;
  return {now + part, (part + kNsPerMs - 1) / kNsPerMs};
}

Deadline Deadline::limited(uint64_t ns) const {
  const uint64_t limit = base::monotonic_ns() + ns;
  return limit < at_ns ? Deadline{limit, (ns + kNsPerMs - 1) / kNsPerMs} : *this;
}

bool Deadline::passed() const { return base::monotonic_ns() >= at_ns; }

uint64_t Deadline::left_ns() const {
  const uint64_t now = base::monotonic_ns();
  return at_ns > now ? at_ns - now : 0;
}

Result<std::unique_ptr<Connection>> Connection::open(const std::string& peer, HostLookup& host,
                                                     const Deadline& deadline) {
  const auto addresses = host.addresses(deadline);
  if (!addresses.ok()) return addresses.status();
  const auto socket = connect_any(peer, addresses.value(), deadline);
  if (!socket.ok()) {
    host.forget();
    return socket.status();
  }
  const int on = 1;
  setsockopt(socket.value(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return std::unique_ptr<Connection>(new Connection(socket.value(), peer));
}

Connection::~Connection() {
  if (tls_ != nullptr && !is_broken_ && outgoing_.empty()) {
    tls_->end(outgoing_);  // so that the server can tell the end from an attacker's cut
    (void)flush();
  }
  rdma_.reset();
  if (poll_file_ >= 0) close(poll_file_);
  close(socket_);
}

Status Connection::break_with(Code code, std::string_view reason) {
  is_broken_ = true;
  return Status(code, peer_ + ": " + std::string(reason));
}

void Connection::begin_use(bool is_reused) {
  is_reused_ = is_reused;
  has_received_ = false;
  used_since_ns_ = base::monotonic_ns();
}

void Connection::end_use() {
  idle_since_ns_ = base::monotonic_ns();
  if (frame_.capacity() > kBufferBytesKept) frame_ = wire::Frame();
  if (scratch_.capacity() > kBufferBytesKept) scratch_ = std::vector<std::byte>();
  if (body_.capacity() * sizeof(uint64_t) > kBufferBytesKept) body_ = std::vector<uint64_t>();
}

uint64_t Connection::idle_ns() const { return base::monotonic_ns() - idle_since_ns_; }

Status Connection::break_by_close() {
  was_closed_by_server_ = true;
  return break_with(Code::kUnavailable, "the server closed the connection");
}

void Connection::abandon(bool is_late) {
  is_broken_ = true;
  if (is_late) timed_out_after_ns_ = std::max<uint64_t>(base::monotonic_ns() - used_since_ns_, 1);
}

Status Connection::break_by_timeout(const Deadline& deadline) {
  timed_out_after_ns_ = std::max<uint64_t>(base::monotonic_ns() - used_since_ns_, 1);
  return break_with(Code::kDeadlineExceeded,
                    "no complete reply within " + std::to_string(deadline.given_ms) + " ms");
}

Status Connection::break_by_errno(std::string_view operation, int error_number) {
  is_broken_ = true;
  was_closed_by_server_ = true;
  return base::errno_status(Code::kUnavailable, peer_ + ": " + std::string(operation),
                            error_number);
}

Status Connection::distrust(std::string_view what) {
  return break_with(Code::kUnavailable, "the server broke the protocol: " + std::string(what));
}

Status Connection::break_by_error(const Status& error) {
  is_broken_ = true;
  return Status(Code::kUnavailable, std::string(error.message()));  // read_error named the server
}

void Connection::queue(std::span<const std::byte> frame) {
  if (tls_ == nullptr) {
    outgoing_.insert(outgoing_.end(), frame.begin(), frame.end());
  } else {
    (void)tls_->write(frame, outgoing_);  // the next read returns its error
  }
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
    if (sent < 0) return break_by_errno("send", errno);
    outgoing_sent_ += static_cast<size_t>(sent);
  }
  outgoing_.clear();
  outgoing_sent_ = 0;
  if (outgoing_.capacity() > kBufferBytesKept) outgoing_.shrink_to_fit();
  return {};
}

Status Connection::wait(const Deadline& deadline) {
  if (rdma_ != nullptr) return wait_rdma(deadline);
  const bool sending = outgoing_sent_ < outgoing_.size();
  short ready = 0;
  const int count = poll_socket(socket_, static_cast<short>(sending ? POLLIN | POLLOUT : POLLIN),
                                deadline, &ready);
  if (count < 0 && errno != EINTR) return break_by_errno("poll", errno);
  if (count == 0) return break_by_timeout(deadline);
  if (count > 0 && (ready & POLLOUT) != 0) return flush();
  return {};
}

Status Connection::read_pieces(std::span<iovec> pieces, const Deadline& deadline) {
  for (;;) {
    PETPS_RETURN_IF_ERROR(read_now(pieces));
    if (pieces.empty()) return {};
    PETPS_RETURN_IF_ERROR(wait(deadline));
  }
}

Status Connection::read_now(std::span<iovec>& pieces) {
  const auto advance = [&pieces](size_t n) {
    while (!pieces.empty() && n >= pieces.front().iov_len) {
      n -= pieces.front().iov_len;
      pieces = pieces.subspan(1);
    }
    if (n == 0) return;
    pieces.front().iov_base = static_cast<std::byte*>(pieces.front().iov_base) + n;
    pieces.front().iov_len -= n;
  };
  advance(0);  // skip empty pieces
  while (!pieces.empty()) {
    if (rdma_ != nullptr) {
      const size_t n = rdma_->receive(
          {static_cast<std::byte*>(pieces.front().iov_base), pieces.front().iov_len});
      if (n == 0) return {};
      advance(n);
      has_received_ = true;
      continue;
    }
    if (has_read_ahead()) {
      const size_t n = std::min(pieces.front().iov_len, inbox_end_ - inbox_begin_);
      std::memcpy(pieces.front().iov_base, inbox_.data() + inbox_begin_, n);
      inbox_begin_ += n;
      advance(n);
      continue;
    }
    if (tls_ != nullptr) {
      const bool is_direct = pieces.front().iov_len >= kDecryptInPlaceBytes;
      const std::span<std::byte> out =
          is_direct
              ? std::span(static_cast<std::byte*>(pieces.front().iov_base), pieces.front().iov_len)
              : std::span(inbox_);
      size_t n = 0;
      PETPS_RETURN_IF_ERROR(decrypt_now(out, n));
      if (n == 0) return {};
      if (is_direct) {
        advance(n);
      } else {
        inbox_begin_ = 0;
        inbox_end_ = n;
      }
      continue;
    }
    // The inbox receives bytes that follow the last piece.
    std::array<iovec, kPiecesPerReceive + 1> parts;
    const size_t count = std::min(pieces.size(), kPiecesPerReceive);
    size_t wanted = 0;
    for (size_t i = 0; i < count; ++i) {
      parts[i] = pieces[i];
      wanted += pieces[i].iov_len;
    }
    const bool has_last = count == pieces.size();
    if (has_last) parts[count] = {inbox_.data(), inbox_.size()};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count + (has_last ? 1 : 0);
    const ssize_t received = recvmsg(socket_, &message, 0);
    if (received == 0) return break_by_close();
    if (received < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return {};
      return break_by_errno("receive", errno);
    }
    has_received_ = true;
    const size_t taken = std::min(wanted, static_cast<size_t>(received));
    advance(taken);
    inbox_begin_ = 0;
    inbox_end_ = static_cast<size_t>(received) - taken;
  }
  if (tls_ != nullptr) decrypt_ahead();
  return {};
}

Status Connection::read_header(wire::FrameHeader& header, const Deadline& deadline) {
  std::byte bytes[wire::kHeaderBytes];
  PETPS_RETURN_IF_ERROR(read(bytes, deadline));
  return decode_header(bytes, header);
}

Status Connection::decode_header(std::span<const std::byte> bytes, wire::FrameHeader& header) {
  const Status decoded = wire::decode_reply_header(bytes, header);
  if (!decoded.ok()) return distrust(decoded.message());
  if (header.code != 0 && header.body_bytes > wire::kMaxErrorBytes)
    return distrust("an error text of " + std::to_string(header.body_bytes) + " bytes");
  return {};
}

Result<std::span<const std::byte>> Connection::read_body(const wire::FrameHeader& header,
                                                         const Deadline& deadline) {
  body_.resize((size_t{header.body_bytes} + 7) / 8);  // decode_header limits body_bytes
  const std::span<std::byte> body =
      std::as_writable_bytes(std::span(body_)).first(header.body_bytes);
  PETPS_RETURN_IF_ERROR(read(body, deadline));
  return std::span<const std::byte>(body);
}

Status Connection::read_error(const wire::FrameHeader& header, const Deadline& deadline,
                              Status& error) {
  const auto body = read_body(header, deadline);
  if (!body.ok()) return body.status();
  error = error_of(header, body.value());
  return {};
}

Status Connection::error_of(const wire::FrameHeader& header,
                            std::span<const std::byte> body) const {
  const Status decoded = wire::decode_error(header, body);
  return Status(decoded.code(), peer_ + ": " + std::string(decoded.message()));
}

Result<std::span<const std::byte>> Connection::send_and_read_reply(wire::FrameHeader& reply,
                                                                   const Deadline& deadline) {
  wire::FrameHeader request;
  std::memcpy(&request, frame_.data(), wire::kHeaderBytes);
  queue(frame_);
  PETPS_RETURN_IF_ERROR(flush());
  PETPS_RETURN_IF_ERROR(read_header(reply, deadline));
  if (reply.code != 0) {
    Status error;
    PETPS_RETURN_IF_ERROR(read_error(reply, deadline, error));
    // The error answers no request, for example because the server refuses the connection.
    if (reply.request_id != request.request_id) is_broken_ = true;
    return error;
  }
  if (reply.request_id != request.request_id ||
      reply.opcode != (request.opcode | wire::kReplyBit)) {
    return distrust("a reply to another request than the one sent");
  }
  return read_body(reply, deadline);
}

bool Connection::is_reusable() {
  if (is_broken_ || outgoing_sent_ < outgoing_.size() || has_read_ahead()) return false;
  if (tls_ != nullptr && (tls_->has_ended() || tls_->has_failed() || tls_->has_partial_record()))
    return false;
  if (rdma_ != nullptr && (!rdma_->progress().ok() || rdma_->has_bytes() || rdma_->has_ended()))
    return false;
  return is_quiet();
}

bool Connection::keeps_secrets() const {
  if (tls_ != nullptr) return true;
  sockaddr_storage peer{};
  socklen_t size = sizeof(peer);
  if (getpeername(socket_, reinterpret_cast<sockaddr*>(&peer), &size) != 0) return false;
  if (peer.ss_family == AF_INET) {
    const auto& address = reinterpret_cast<const sockaddr_in&>(peer).sin_addr;
    return ntohl(address.s_addr) >> 24 == IN_LOOPBACKNET;
  }
  const auto& address = reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr;
  return peer.ss_family == AF_INET6 &&
         (IN6_IS_ADDR_LOOPBACK(&address) ||
          (IN6_IS_ADDR_V4MAPPED(&address) && address.s6_addr[12] == IN_LOOPBACKNET));
}

bool Connection::is_quiet() const {
  std::byte byte;
  const ssize_t received = recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
}

}  // namespace petps::client
