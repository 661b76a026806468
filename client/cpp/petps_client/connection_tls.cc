// A connection over TLS: the same frames, encrypted. The stream touches no socket, so deadlines
// hold for it as for plain text.
#include <sys/socket.h>

#include <cerrno>

#include "base/clock.h"
#include "petps_client/connection.h"

namespace petps::client {

using base::Code;
using base::Status;

Status Connection::start_tls(tls::ClientContext& context, const std::string& server_name,
                             const Deadline& deadline) {
  auto stream = context.connect(server_name);
  if (!stream.ok()) return break_with(stream.status().code(), stream.status().message());
  tls_ = std::move(stream).value();
  ciphertext_.resize(kCiphertextBytes);
  inbox_.resize(tls::kRecordBytes);
  used_since_ns_ = base::monotonic_ns();
  Status status = tls_->handshake(undecrypted_, outgoing_);
  while (status.ok() && !tls_->is_open()) {
    PETPS_RETURN_IF_ERROR(flush());
    status = receive_ciphertext(deadline);
    if (was_closed_by_server_) {
      return break_with(Code::kUnavailable,
                        std::string("the server closed the connection during the TLS handshake: "
                                    "it is busy or stops, or it does not speak TLS"));
    }
    if (!status.ok()) return status;
    status = tls_->handshake(undecrypted_, outgoing_);
  }
  const Status sent = flush();  // the last message, or an alert
  if (tls_->is_plain_text())
    return break_with(Code::kFailedPrecondition, "the server does not speak TLS: use petps://");
  if (!status.ok()) return break_with(status.code(), status.message());
  return sent;
}

Status Connection::receive_ciphertext(const Deadline& deadline) {
  for (;;) {
    PETPS_RETURN_IF_ERROR(receive_ciphertext_now());
    if (!undecrypted_.empty()) return {};
    PETPS_RETURN_IF_ERROR(wait(deadline));
  }
}

Status Connection::receive_ciphertext_now() {
  for (;;) {
    const ssize_t received = recv(socket_, ciphertext_.data(), ciphertext_.size(), 0);
    if (received > 0) {
      undecrypted_ = std::span(ciphertext_).first(static_cast<size_t>(received));
      return {};
    }
    if (received == 0) return break_by_close();
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return {};
    return break_by_errno("receive", errno);
  }
}

Status Connection::decrypt_now(std::span<std::byte> out, size_t& n) {
  for (;;) {
    const Status status = tls_->read(undecrypted_, out, n, outgoing_);
    if (!status.ok()) {
      (void)flush();  // the alert
      return break_with(status.code(), status.message());
    }
    has_received_ = has_received_ || n > 0;
    if (n > 0) return {};
    if (tls_->has_ended()) return break_by_close();
    PETPS_RETURN_IF_ERROR(receive_ciphertext_now());
    if (undecrypted_.empty()) return {};
  }
}

void Connection::decrypt_ahead() {
  if (has_read_ahead() || (undecrypted_.empty() && !tls_->has_plain())) return;
  inbox_begin_ = inbox_end_ = 0;
  // The next read returns an error, and is_reusable() sees it.
  (void)tls_->read(undecrypted_, inbox_, inbox_end_, outgoing_);
}

}  // namespace petps::client
