// One connection: bytes in and out by a deadline. It knows frames, but not their content.
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "petps_client/deadline.h"
#include "petps_client/dial.h"
#include "tls/tls.h"
#include "transport/rdma/peer.h"
#include "wire/wire.h"

namespace petps::client {

// A connection to one server, over TCP, TLS or RDMA.
// ASSUMPTIONS: one thread at a time. After any error except an error reply the connection is
// broken, because the next bytes belong to no request.
// ERRORS: kUnavailable (refused, closed, reset), kDeadlineExceeded; with TLS also kUnauthenticated
// (a certificate is not accepted) and kFailedPrecondition (no TLS 1.3). All name the server.
class Connection {
 public:
  static base::Result<std::unique_ptr<Connection>> open(const std::string& peer, HostLookup& host,
                                                        const Deadline& deadline);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Run the TLS handshake, before anything else is sent. The server's certificate must have
  // `server_name`.
  base::Status start_tls(tls::ClientContext& context, const std::string& server_name,
                         const Deadline& deadline);

  // Offer the server a queue pair. All later frames go over it; the socket then only shows when
  // the server closes the connection.
  // Errors: the server refused, or a local failure; the connection then stays on TCP unless
  // is_broken().
  base::Status move_to_rdma(transport::Verbs& verbs, const Deadline& deadline);

  const std::string& peer() const { return peer_; }
  // Return whether nobody but the server reads what is sent: it is on this machine, or the
  // connection is encrypted and its certificate was verified.
  bool keeps_secrets() const;
  uint64_t next_request_id() { return next_request_id_++; }

  // Queue a frame. flush() sends what the socket takes now; read() sends the rest while it waits.
  void queue(std::span<const std::byte> frame);
  base::Status flush();
  // Read exactly out.size() bytes, straight into `out` unless they were read ahead.
  base::Status read(std::span<std::byte> out, const Deadline& deadline) {
    iovec piece{out.data(), out.size()};
    return read_pieces({&piece, 1}, deadline);
  }
  // Read into several places, one after another. Changes `pieces`.
  base::Status read_pieces(std::span<iovec> pieces, const Deadline& deadline);
  // The same, but read only what has arrived. `pieces` then holds the places that are left.
  base::Status read_now(std::span<iovec>& pieces);
  // Wait until something has arrived, and send queued bytes.
  base::Status wait(const Deadline& deadline);
  base::Status read_header(wire::FrameHeader& header, const Deadline& deadline);
  // Decode a header that was read.
  base::Status decode_header(std::span<const std::byte> bytes, wire::FrameHeader& header);
  // Read the whole body of a small reply, 8-byte aligned. The span is valid until the next call.
  base::Result<std::span<const std::byte>> read_body(const wire::FrameHeader& header,
                                                     const Deadline& deadline);
  // Read the body of an error reply. `error` is the server's error, with the server's name.
  base::Status read_error(const wire::FrameHeader& header, const Deadline& deadline,
                          base::Status& error);
  // Return the error in the body of an error reply, with the server's name.
  base::Status error_of(const wire::FrameHeader& header, std::span<const std::byte> body) const;
  // Send the request in frame(), read its reply, and decode it by decode(header, body). Not for
  // pulls. Return an error reply as an error, and kUnavailable when the reply cannot be decoded.
  template <typename Decode>
  base::Status exchange(const Deadline& deadline, const Decode& decode) {
    wire::FrameHeader header;
    const auto body = send_and_read_reply(header, deadline);
    if (!body.ok()) return body.status();
    const base::Status decoded = decode(header, body.value());
    return decoded.ok() ? base::Status() : distrust(decoded.message());
  }

  // Begin a call's use of the connection. `is_reused`: an earlier call has used it.
  void begin_use(bool is_reused);
  void end_use();            // also frees the memory of large requests and replies
  uint64_t idle_ns() const;  // time since end_use
  bool has_received() const { return has_received_; }  // bytes, since begin_use
  // Return whether the connection failed. It is then closed instead of reused.
  bool is_broken() const { return is_broken_; }
  // Return how long this use waited until the caller's time ran out; 0: no timeout.
  uint64_t timed_out_after_ns() const { return timed_out_after_ns_; }
  // Return whether the connection was idle before this use, and the server closed it before it
  // sent a byte of a reply. This is no failure, because servers close idle connections. The server
  // may or may not have received the request.
  bool was_closed_while_idle() const {
    return was_closed_by_server_ && is_reused_ && !has_received_;
  }
  // The hello of the server behind this connection. The address may lead to another server later.
  wire::HelloReply hello;
  bool has_read_catalogue = false;  // of this server
  // Mark the connection as broken. Return kUnavailable: the named server broke the protocol.
  base::Status distrust(std::string_view what);
  // Mark the connection as broken by an error that answers no request, such as that of a server
  // which is about to close it. Return kUnavailable with the text of the error.
  base::Status break_by_error(const base::Status& error);
  // Give up the replies that are still due, because another server has answered. The connection is
  // broken afterwards. `is_late`: this counts as a timeout of the server.
  void abandon(bool is_late);
  // Return the entry by which poll() waits for this connection among others. Do not wait if
  // has_read_ahead().
  pollfd poll_entry();
  bool has_read_ahead() const {
    return rdma_ != nullptr ? rdma_->has_bytes() : inbox_begin_ < inbox_end_;
  }
  // Return whether these events announce bytes of a reply, or the end of the connection.
  bool has_arrived(short events);

  // Return whether nothing remains to be sent or read, and the server has not closed the
  // connection.
  bool is_reusable();

  std::vector<std::byte>& scratch() { return scratch_; }
  wire::Frame& frame() { return frame_; }

 private:
  Connection(int socket, std::string peer)
      : socket_(socket), peer_(std::move(peer)), inbox_(kInboxBytes) {}
  base::Status wait_rdma(const Deadline& deadline);
  // TLS: decrypt what has arrived into `out`; set `n` to the number of bytes.
  base::Status decrypt_now(std::span<std::byte> out, size_t& n);
  // TLS: receive ciphertext, waiting for it.
  base::Status receive_ciphertext(const Deadline& deadline);
  base::Status receive_ciphertext_now();
  // TLS: move what has arrived into the inbox, so that has_read_ahead() is right.
  void decrypt_ahead();
  base::Result<std::span<const std::byte>> send_and_read_reply(wire::FrameHeader& reply,
                                                               const Deadline& deadline);
  // Return whether the socket has no bytes to read and the server has not closed it.
  bool is_quiet() const;
  // Mark the connection as broken, and return the error.
  base::Status break_with(base::Code code, std::string_view reason);
  base::Status break_by_errno(std::string_view operation, int error_number);
  base::Status break_by_close();
  base::Status break_by_timeout(const Deadline& deadline);

  // The inbox receives the head of the next reply, which follows the rows of the current one. A
  // reply to 500 keys has a head of 136 bytes.
  static constexpr size_t kInboxBytes = 4096;
  // Limit of pieces in one recvmsg. The kernel copies the list of pieces at every call, so a
  // longer list would be copied again and again.
  static constexpr size_t kPiecesPerReceive = 256;
  // A TLS server's bytes arrive in parts of up to four records. The inbox holds a record.
  static constexpr size_t kCiphertextBytes = 4 * (tls::kRecordBytes + tls::kRecordExtraBytes);
  // TLS: a shorter piece is copied out of the inbox. A call of the cipher costs about as much as
  // copying this much.
  static constexpr size_t kDecryptInPlaceBytes = 4096;
  // A buffer larger than this is freed after its use: hundreds of idle connections, each with the
  // memory of its largest request, would be the most of a router's memory.
  static constexpr size_t kBufferBytesKept = 1 << 20;

  int socket_;
  std::unique_ptr<tls::Stream> tls_;           // null: plain text
  std::vector<std::byte> ciphertext_;          // TLS: of the last receive
  std::span<const std::byte> undecrypted_;     // the part of it that is not decrypted yet
  std::unique_ptr<transport::RdmaPeer> rdma_;  // null: frames go over the socket
  int poll_file_ = -1;                         // epoll of the socket and of rdma_'s completions
  std::string peer_;
  bool is_broken_ = false;
  bool was_closed_by_server_ = false;  // or reset
  bool is_reused_ = false;             // see begin_use
  bool has_received_ = false;          // bytes have arrived since begin_use
  uint64_t used_since_ns_ = 0;
  uint64_t idle_since_ns_ = 0;
  uint64_t timed_out_after_ns_ = 0;
  uint64_t next_request_id_ = 1;
  std::vector<std::byte> inbox_;
  size_t inbox_begin_ = 0;
  size_t inbox_end_ = 0;
  std::vector<std::byte> outgoing_;  // TLS: encrypted
  size_t outgoing_sent_ = 0;
  std::vector<std::byte> scratch_;
  std::vector<uint64_t> body_;
  wire::Frame frame_;
};

}  // namespace petps::client
