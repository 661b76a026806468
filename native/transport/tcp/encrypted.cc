// What an endpoint does for connections with TLS: it decrypts what it receives and encrypts what it
// sends. Records that the socket does not take wait in the output, so the cipher never blocks.
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "transport/tcp/endpoint.h"

namespace petps::transport {

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

void TcpEndpoint::append_output(StreamConnection& connection, std::span<const std::byte> bytes) {
  Connection& c = tcp(connection);
  if (c.tls != nullptr) {
    send_encrypted(c, bytes);
  } else {
    StreamEndpoint::append_output(connection, bytes);
  }
}

// Tell the peer that nothing follows, so that it can tell the end from an attacker's cut.
void TcpEndpoint::announce_end(Connection& c) {
  if (c.has_announced_end) return;
  c.has_announced_end = true;
  encrypted_.clear();
  c.tls->end(encrypted_);
  if (encrypted_.empty()) return;
  std::memcpy(c.out.append(encrypted_.size()), encrypted_.data(), encrypted_.size());
  count_memory(c);
}

}  // namespace petps::transport
