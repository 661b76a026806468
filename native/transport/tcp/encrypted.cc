// What an endpoint does for connections with TLS: it decrypts what it receives and encrypts what it
// sends. Records that the socket does not take wait in the output, so the cipher never blocks.
// Where the kernel encrypts, everything but the records of TLS itself is sent as plain text is.
#include <linux/tls.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "transport/tcp/endpoint.h"

namespace petps::transport {

using base::Code;
using base::Status;

// Move input into `space`, from what is buffered or else from the socket. Return whether there was
// any.
bool TcpEndpoint::decrypt(Connection& c, std::span<std::byte> space) {
  std::span<const std::byte> arrived = c.undecrypted;
  if (!c.has_buffered()) {
    if (ciphertext_.empty()) ciphertext_.resize(kCiphertextBytes);
    const ssize_t n = ::recv(c.fd, ciphertext_.data(), ciphertext_.size(), 0);
    if (n <= 0) {
      note_end(c, n);
      return false;
    }
    note_input(static_cast<size_t>(n));
    arrived = std::span(ciphertext_).first(static_cast<size_t>(n));
  }
  size_t n = 0;
  encrypted_.clear();
  const Status status = c.tls->read(arrived, space, n, encrypted_);
  c.in.commit(n);
  keep_undecrypted(c, arrived);
  c.has_partial_record = c.tls->has_partial_record();
  if (c.tls->has_ended() && !c.tls->has_plain()) c.ended = true;
  count_memory(c);
  if (!encrypted_.empty()) send_or_keep(c, encrypted_);  // an alert, or the answer to new keys
  keep_notices(c);
  if (!status.ok()) fail(c, status);
  return true;
}

void TcpEndpoint::keep_undecrypted(Connection& c, std::span<const std::byte> rest) {
  const size_t before = c.undecrypted.capacity();
  if (rest.empty()) {
    c.undecrypted = {};
  } else if (c.undecrypted.empty()) {
    c.undecrypted.assign(rest.begin(), rest.end());
  } else {  // `rest` is the end of it
    c.undecrypted.erase(c.undecrypted.begin(), c.undecrypted.end() - rest.size());
  }
  c.fixed_bytes += c.undecrypted.capacity() - before;  // modulo 2^64
}

void TcpEndpoint::send_encrypted(Connection& c, std::span<const std::byte> plain) {
  if (c.tls->has_failed()) return;  // the peer has received an alert, or soon will
  encrypted_.clear();
  Status status = c.tls->write(plain, encrypted_);
  if (!status.ok()) {
    break_connection(c, std::move(status), true);
  } else {
    send_or_keep(c, encrypted_);
  }
}

void TcpEndpoint::send_encrypted_parts(Connection& c, std::span<const std::byte> plain) {
  while (!plain.empty() && !c.broken) {
    const size_t n = std::min(plain.size(), kEncryptBytes);
    send_encrypted(c, plain.first(n));
    plain = plain.subspan(n);
  }
}

void TcpEndpoint::append_output(StreamConnection& connection, std::span<const std::byte> bytes) {
  Connection& c = tcp(connection);
  if (c.encrypts()) {
    send_encrypted(c, bytes);
  } else if (c.tls == nullptr || !c.tls->has_failed()) {
    StreamEndpoint::append_output(connection, bytes);
  }
}

// Tell the peer that nothing follows, so that it can tell the end from an attacker's cut.
void TcpEndpoint::announce_end(Connection& c) {
  if (c.has_announced_end) return;
  c.has_announced_end = true;
  encrypted_.clear();
  c.tls->end(encrypted_);
  keep_notices(c);
  if (encrypted_.empty()) return;
  std::memcpy(c.out.append(encrypted_.size()), encrypted_.data(), encrypted_.size());
  count_memory(c);
}

// ---- Kernel TLS

// Let the kernel encrypt what is sent, if it can: then rows need no copy. Only a socket whose rows
// would be copied anyway stays with the cipher of this process.
void TcpEndpoint::leave_to_kernel(Connection& c) {
  static constexpr char kName[] = "tls";
  if (kernel_lacks_tls_ || options_.gather->configured() == GatherMode::kCopy) return;
  if (::setsockopt(c.fd, IPPROTO_TCP, TCP_ULP, kName, sizeof(kName)) != 0) {
    kernel_lacks_tls_ = errno == ENOENT;  // it has searched for the module, which takes time
    return;
  }
  tls::KernelKeys keys;
  const size_t n = c.tls->take_kernel_keys(keys);
  const bool is_taken =
      n > 0 && ::setsockopt(c.fd, SOL_TLS, TLS_TX, keys.data(), static_cast<socklen_t>(n)) == 0;
  tls::erase(keys);
  if (!is_taken) return;
  c.tls->leave_writing_to_kernel();
  Counters::add(counters_.opened_kernel_tls, 1);
}

// A call makes a record of each kRecordBytes, and of what is left.
void TcpEndpoint::note_sent(Connection& c, size_t bytes) {
  if (!c.kernel_encrypts()) return;
  c.records += bytes / tls::kRecordBytes + 1;
  if (!has_worn_key(c)) return;
  add_candidate(c);
  if (c.records >= 2 * tls::kRecordsPerKey)
    break_connection(
        c, Status(Code::kUnavailable, "the TLS key of peer " + c.address + " has served its time"));
}

bool TcpEndpoint::has_worn_key(const Connection& c) const {
  return c.records >= tls::kRecordsPerKey;
}

// The kernel keeps its key, so the connection ends between a reply and the next request, as an idle
// one does. Clients connect again. Return whether it ended.
bool TcpEndpoint::end_worn(Connection& c) {
  if (c.broken || c.is_awaited() || has_frame(c)) return false;
  catch_up(c);
  if (c.state != State::kOpen) return true;
  if (c.broken || c.is_awaited() || has_frame(c)) return false;
  close_quietly(c);
  return true;
}

void TcpEndpoint::keep_notices(Connection& c) {
  if (!c.kernel_encrypts()) return;
  for (tls::Notice& notice : c.tls->take_notices()) c.notices.push_back(std::move(notice));
  if (!c.notices.empty() && c.out.bytes() == 0) send_notices(c);
}

// Send records of TLS itself behind the output. What the socket does not take waits.
void TcpEndpoint::send_notices(Connection& c) {
  while (!c.notices.empty() && c.out.bytes() == 0) {
    tls::Notice& notice = c.notices.front();
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(uint8_t))> control{};
    iovec bytes{notice.bytes.data(), notice.bytes.size()};
    msghdr message{};
    message.msg_iov = &bytes;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_TLS;
    header->cmsg_type = TLS_SET_RECORD_TYPE;
    header->cmsg_len = CMSG_LEN(sizeof(uint8_t));
    *CMSG_DATA(header) = notice.record_type;
    const ssize_t sent = ::sendmsg(c.fd, &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    c.notices.erase(c.notices.begin());  // a socket that fails says so by its next event
  }
}

}  // namespace petps::transport
