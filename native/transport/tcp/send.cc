// The output path: staging, sending, and keeping what a socket does not take. GATHER.md describes
// the life of a zero-copy send.
// clang-format off
#include <time.h>  // errqueue.h needs it but does not include it
#include <linux/errqueue.h>
// clang-format on
#include <netinet/in.h>
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
  // Every path through this function has read the rows or given them up, so the pin is dropped on
  // return. Zero-copy is the exception: it takes the pin.
  epoch::Pin held = std::move(pin);
  auto* c = static_cast<Connection*>(begin_post(connection, list));
  if (c == nullptr) return;
  if (staged_for_ != nullptr && staged_for_ != c) send_staged();
  if (c->encrypts()) {
    Counters::add(counters_.lists_copied, 1);
    if (list.pieces() == 0 && staged_ == 0 && list.bytes() >= kStageBytes) {
      send_encrypted_parts(*c, list.header_bytes());  // these bytes lie in one place
    } else {
      stage_list(*c, list);
    }
    list.clear();
    return;
  }
  const GatherMode mode = mode_of(*c, list);
  if (mode != GatherMode::kCopy && staged_for_ == c) send_staged();
  if (c->out.bytes() > 0) {
    Counters::add(counters_.lists_copied, 1);
    list.copy_to(grow_output(*c, list.bytes()));
  } else if (mode != GatherMode::kCopy) {
    send_list(*c, list, held, mode == GatherMode::kZerocopy);
  } else if (list.pieces() == 0 && staged_ == 0 && list.bytes() >= kStageBytes) {
    Counters::add(counters_.lists_copied, 1);
    send_or_keep(*c, list.header_bytes());  // these bytes lie in one place
  } else {
    Counters::add(counters_.lists_copied, 1);
    stage_list(*c, list);
  }
  list.clear();
}

GatherMode TcpEndpoint::mode_of(Connection& c, const gather::GatherList& list) {
  if (list.pieces() == 0) return GatherMode::kCopy;
  const GatherMode mode = options_.gather->mode_for(
      (list.bytes() - list.header_bytes().size()) / list.pieces(), list.pieces());
  if (mode != GatherMode::kZerocopy) return mode;
  if (!c.zerocopy) return GatherMode::kSendmsg;
  if (c.flights.size() >= kZerocopyListsPerConnection) collect_completions(c);
  const bool is_full =
      c.flights.size() >= kZerocopyListsPerConnection || in_flight_ >= kZerocopyListsMax;
  return is_full || list.bytes() < options_.zerocopy_bytes ? GatherMode::kCopy : mode;
}

void TcpEndpoint::stage_list(Connection& c, const gather::GatherList& list) {
  gather::Position at;
  size_t left = list.bytes();
  while (left > 0) {
    // The socket is full: queue the rest behind what it did not take.
    if (c.out.bytes() > 0 && !c.encrypts()) {
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
  if (c.encrypts()) {
    send_encrypted_parts(c, {stage_.data(), n});
  } else {
    send_or_keep(c, {stage_.data(), n});
  }
}

void TcpEndpoint::send_or_keep(Connection& c, std::span<const std::byte> bytes) {
  size_t sent = 0;
  if (c.out.bytes() == 0 && !send_some(c, bytes.data(), bytes.size(), sent)) return;
  if (sent < bytes.size()) keep_output(c, bytes.data() + sent, bytes.size() - sent);
}

bool TcpEndpoint::send_some(Connection& c, const std::byte* bytes, size_t n, size_t& sent) {
  sent = 0;
  while (sent < n) {
    const ssize_t taken = ::send(c.fd, bytes + sent, n - sent, MSG_NOSIGNAL);
    if (taken >= 0) {
      note_sent(c, static_cast<size_t>(taken));
      sent += static_cast<size_t>(taken);
      continue;
    }
    const int error = errno;
    if (error == EINTR) continue;
    if (error == EAGAIN || error == EWOULDBLOCK) break;
    break_connection(c, base::errno_status(Code::kUnavailable, "send to " + c.address, error));
    return false;
  }
  Counters::add(counters_.bytes_sent, sent);
  return true;
}

void TcpEndpoint::send_list(Connection& c, gather::GatherList& list, epoch::Pin& pin,
                            bool zerocopy) {
  Counters::add(zerocopy ? counters_.lists_zerocopy : counters_.lists_gathered, 1);
  std::array<iovec, gather::kMaxIovecs> iovecs;
  gather::Position at;
  size_t sent = 0;
  const uint32_t first = c.next_send;
  while (!list.at_end(at)) {
    msghdr message{};
    message.msg_iov = iovecs.data();
    message.msg_iovlen = list.fill_iovecs(at, iovecs);
    if (message.msg_iovlen == 0) break;
    const ssize_t taken =
        ::sendmsg(c.fd, &message, zerocopy ? MSG_NOSIGNAL | MSG_ZEROCOPY : MSG_NOSIGNAL);
    if (taken < 0) {
      const int error = errno;
      if (error == EINTR) continue;
      if (error == EAGAIN || error == EWOULDBLOCK) break;
      if (error == ENOBUFS && zerocopy) {  // optmem_max or locked memory used up: let it copy
        Counters::add(counters_.zerocopy_refused, 1);
        zerocopy = false;
        continue;
      }
      // The page of a row cannot be read, or the network card cannot read it. The copy below
      // reads it as any pull does. If the medium is gone, that terminates the process with
      // media's message, and no client asks for such a row again and again.
      if (error == EFAULT) break;
      break_connection(c, base::errno_status(Code::kUnavailable, "sendmsg to " + c.address, error));
      break;
    }
    note_sent(c, static_cast<size_t>(taken));
    if (zerocopy) ++c.next_send;  // the kernel numbers only the calls that took something
    sent += static_cast<size_t>(taken);
    at = list.advance(at, static_cast<size_t>(taken));
  }
  Counters::add(counters_.bytes_sent, sent);
  // The rows may change once the pin is dropped, and a slow peer must not hold the pin. So copy
  // out what is left.
  if (sent < list.bytes() && !c.broken) list.copy_from(at, grow_output(c, list.bytes() - sent));
  if (c.next_send != first) take_flight(c, list, pin, first);
}

// From now on the kernel reads the list's rows and header by address, so both must stay in place.
void TcpEndpoint::take_flight(Connection& c, gather::GatherList& list, epoch::Pin& pin,
                              uint32_t first) {
  const uint32_t sends = c.next_send - first;
  Counters::add(counters_.zerocopy_sends, sends);
  c.flights.add(std::move(list), std::move(pin), first, sends, base::monotonic_ns());
  ++in_flight_;
  list = gather::GatherList();
  if (landed_.empty()) return;
  list = std::move(landed_.back());
  landed_.pop_back();
}

// Read the socket's error queue. It holds completions only, so it is empty when all lists have
// landed.
void TcpEndpoint::collect_completions(Connection& c) {
  const size_t before = c.flights.size();
  do {
    alignas(cmsghdr) std::array<std::byte, 256> control;
    msghdr message{};
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    if (::recvmsg(c.fd, &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) {
      if (errno == EINTR) continue;
      break;
    }
    for (cmsghdr* h = CMSG_FIRSTHDR(&message); h != nullptr; h = CMSG_NXTHDR(&message, h)) {
      if (!(h->cmsg_level == SOL_IP && h->cmsg_type == IP_RECVERR) &&
          !(h->cmsg_level == SOL_IPV6 && h->cmsg_type == IPV6_RECVERR)) {
        continue;
      }
      sock_extended_err error;
      std::memcpy(&error, CMSG_DATA(h), sizeof(error));
      if (error.ee_origin != SO_EE_ORIGIN_ZEROCOPY || error.ee_errno != 0) continue;
      if ((error.ee_code & SO_EE_CODE_ZEROCOPY_COPIED) != 0)
        Counters::add(counters_.zerocopy_copied, error.ee_data - error.ee_info + 1);
      c.flights.complete(error.ee_info, error.ee_data, landed_);
    }
  } while (!c.flights.empty());
  in_flight_ -= before - c.flights.size();
  if (before > 0 && c.flights.empty() && c.state == State::kOpen) add_candidate(c);
}

void TcpEndpoint::keep_output(Connection& c, const std::byte* bytes, size_t n) {
  if (n > 0) std::memcpy(grow_output(c, n), bytes, n);
}

void TcpEndpoint::send_output(StreamConnection& connection) {
  Connection& c = tcp(connection);
  if (c.tls != nullptr && c.state == State::kLingering) announce_end(c);
  size_t sent = 0;
  if (c.out.bytes() > 0 && !send_some(c, c.out.data(), c.out.bytes(), sent)) {
    if (c.state == State::kLingering) destroy(c);
    return;
  }
  consume_output(c, sent);
  send_notices(c);
  if (!c.has_output() && c.state == State::kLingering && end_lingering(c)) return;
  set_interest(c);
  if (c.state == State::kOpen && c.has_buffered() && may_read(c)) add_candidate(c);
}

}  // namespace petps::transport
