// The way out: staging, sending, and keeping what a socket does not take.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "transport/tcp/endpoint.h"

namespace petps::transport {

using base::Code;
using base::Status;

void TcpEndpoint::post(ConnectionId connection, gather::GatherList&& list, epoch::Pin&& pin) {
  // Every way out of here has read the rows or given them up, so the pin ends with this call.
  const epoch::Pin reading = std::move(pin);
  Connection* c = find(connection);
  if (c == nullptr || c->broken) {
    list.clear();
    return;
  }
  Counters::add(counters_.lists_posted, 1);
  if (--c->owed <= 0 && c->ended) add_candidate(*c);
  if (staged_for_ != nullptr && staged_for_ != c) send_staged();
  const size_t pieces = std::max<size_t>(list.pieces(), 1);
  const bool copy =
      options_.mode == GatherMode::kCopy || list.pieces() == 0 ||
      (options_.mode == GatherMode::kAuto && list.bytes() / pieces <= kCopyPieceBytes);
  if (!copy && staged_for_ == c) send_staged();
  if (c->output() > 0) {
    list.copy_to(grow_output(*c, list.bytes()));
  } else if (list.pieces() == 0 && staged_ == 0 && list.bytes() >= kStageBytes) {
    send_whole(*c, list.header_bytes());
  } else if (copy) {
    stage_list(*c, list);
  } else {
    send_list(*c, list);
  }
  list.clear();
}

// Bytes that lie in one place and are worth a send of their own.
void TcpEndpoint::send_whole(Connection& c, std::span<const std::byte> bytes) {
  size_t sent = 0;
  if (!send_some(c, bytes.data(), bytes.size(), sent)) return;
  if (sent < bytes.size()) keep_output(c, bytes.data() + sent, bytes.size() - sent);
}

void TcpEndpoint::stage_list(Connection& c, const gather::GatherList& list) {
  gather::Position at;
  size_t left = list.bytes();
  while (left > 0) {
    if (c.output() > 0) {  // the socket is full: the rest queues behind what it did not take
      list.copy_from(at, grow_output(c, left));
      return;
    }
    const size_t part = std::min(left, kStageBytesMax - staged_);
    if (stage_.size() < staged_ + part) stage_.resize(staged_ + part);
    list.copy_some(at, stage_.data() + staged_, part);
    staged_for_ = &c;
    staged_ += part;
    left -= part;
    if (staged_ >= kStageBytes) send_staged();
    if (c.broken) return;
  }
}

void TcpEndpoint::flush() {
  if (staged_for_ != nullptr) send_staged();
}

void TcpEndpoint::send_staged() {
  Connection& c = *staged_for_;
  staged_for_ = nullptr;
  const size_t n = std::exchange(staged_, 0);
  size_t sent = 0;
  if (c.output() == 0 && !send_some(c, stage_.data(), n, sent)) return;
  if (sent < n) keep_output(c, stage_.data() + sent, n - sent);
}

bool TcpEndpoint::send_some(Connection& c, const std::byte* bytes, size_t n, size_t& sent) {
  sent = 0;
  while (sent < n) {
    const ssize_t took = ::send(c.fd, bytes + sent, n - sent, MSG_NOSIGNAL);
    if (took >= 0) {
      sent += static_cast<size_t>(took);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) break;
    break_connection(c, base::errno_status(Code::kUnavailable, "send", errno));
    return false;
  }
  Counters::add(counters_.bytes_sent, sent);
  return true;
}

void TcpEndpoint::send_list(Connection& c, const gather::GatherList& list) {
  std::array<iovec, gather::kMaxIovecs> iovecs;
  gather::Position at;
  size_t sent = 0;
  while (!list.at_end(at)) {
    msghdr message{};
    message.msg_iov = iovecs.data();
    message.msg_iovlen = list.fill_iovecs(at, iovecs);
    if (message.msg_iovlen == 0) break;
    const ssize_t took = ::sendmsg(c.fd, &message, MSG_NOSIGNAL);
    if (took < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) break;
      break_connection(c, base::errno_status(Code::kUnavailable, "sendmsg", errno));
      return;
    }
    sent += static_cast<size_t>(took);
    at = list.advance(at, static_cast<size_t>(took));
  }
  Counters::add(counters_.bytes_sent, sent);
  // The rows may change once the pin is dropped, and a slow peer must not hold it: what is left is
  // copied out.
  if (sent < list.bytes()) list.copy_from(at, grow_output(c, list.bytes() - sent));
}

std::byte* TcpEndpoint::grow_output(Connection& c, size_t n) {
  if (c.output() == 0) {
    c.out.clear();
    c.out_at = 0;
    c.out_since_ns = base::monotonic_ns();
    ++with_output_;
    add_candidate(c);  // its interest changes
  }
  if (c.output() + n > options_.limits.output_close_bytes) {
    break_connection(
        c,
        Status(Code::kResourceExhausted, "peer " + c.address + " leaves more than " +
                                             std::to_string(options_.limits.output_close_bytes) +
                                             " bytes of replies unread"),
        true);
  }
  const size_t at = c.out.size();
  c.out.resize(at + n);
  return c.out.data() + at;
}

void TcpEndpoint::keep_output(Connection& c, const std::byte* bytes, size_t n) {
  if (n > 0) std::memcpy(grow_output(c, n), bytes, n);
}

void TcpEndpoint::send_output(Connection& c) {
  size_t sent = 0;
  const bool had = c.output() > 0;
  if (had && !send_some(c, c.out.data() + c.out_at, c.output(), sent)) {
    if (c.state == State::kLingering) destroy(c);
    return;
  }
  if (sent > 0) c.out_since_ns = base::monotonic_ns();
  c.out_at += sent;
  if (c.output() == 0) {
    if (had) --with_output_;
    c.out = {};
    c.out_at = 0;
    if (c.state == State::kLingering) {
      ::shutdown(c.fd, SHUT_WR);
      if (c.ended) {
        destroy(c);
        return;
      }
    } else {
      add_candidate(c);  // it may be read again
    }
  } else if (c.out_at > c.out.size() / 2) {  // each byte is moved once at most
    c.out.erase(c.out.begin(), c.out.begin() + static_cast<ptrdiff_t>(c.out_at));
    c.out_at = 0;
  }
  set_interest(c);
}

}  // namespace petps::transport
