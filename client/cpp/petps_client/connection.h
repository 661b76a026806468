// One TCP connection: bytes in and out by a deadline. It knows frames, but not their content.
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
#include "transport/rdma/peer.h"
#include "wire/wire.h"

namespace petps::client {

// A connection to one server.
// ASSUMPTIONS: one thread at a time. After any error but an error reply the connection is broken:
// the bytes that arrive next belong to no request.
// ERRORS: kUnavailable (refused, closed, reset), kDeadlineExceeded; both name the server.
class Connection {
 public:
  static base::Result<std::unique_ptr<Connection>> open(const std::string& peer, HostLookup& host,
                                                        const Deadline& deadline);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Offer the server a queue pair. All later frames go over it; the socket then only shows when
  // the server closes the connection.
  // Errors: the server refused, or a local failure; the connection then stays on
  // TCP unless broken().
  base::Status move_to_rdma(transport::Verbs& verbs, const Deadline& deadline);
  bool is_over_rdma() const { return rdma_ != nullptr; }

  const std::string& peer() const { return peer_; }
  uint64_t next_request_id() { return next_request_id_++; }

  // Queue a frame. flush() sends what the socket takes now; read() sends the rest while it waits.
  void queue(std::span<const std::byte> frame) {
    outgoing_.insert(outgoing_.end(), frame.begin(), frame.end());
  }
  base::Status flush();
  // Read exactly out.size() bytes, straight into `out` unless they were read ahead.
  base::Status read(std::span<std::byte> out, const Deadline& deadline) {
    iovec piece{out.data(), out.size()};
    return read_pieces({&piece, 1}, deadline);
  }
  // Read into several places, one after another. Changes `pieces`.
  base::Status read_pieces(std::span<iovec> pieces, const Deadline& deadline);
  base::Status read_header(wire::FrameHeader& header, const Deadline& deadline);
  // Read the whole body of a small reply, 8-byte aligned. The span is valid until the next call.
  base::Result<std::span<const std::byte>> read_body(const wire::FrameHeader& header,
                                                     const Deadline& deadline);
  // Read the body of an error reply. `error` is the server's error, with the server's name.
  base::Status read_error(const wire::FrameHeader& header, const Deadline& deadline,
                          base::Status& error);
  // Send one request and read its reply (not for pull). An error reply is returned as an error.
  base::Result<std::span<const std::byte>> ask(const wire::Frame& request, wire::FrameHeader& reply,
                                               const Deadline& deadline);

  // Begin a call's use of the connection. `reused`: an earlier call has used it.
  void begin_use(bool reused);
  void end_use();
  uint64_t idle_ns() const;  // time since end_use
  // Return whether the connection failed. It is then closed instead of reused.
  bool broken() const { return broken_; }
  // Return how long this use waited when the caller's time ran out before a reply; 0: it did not.
  uint64_t timed_out_after_ns() const { return timed_out_after_ns_; }
  // Return whether a connection that was idle before this use closed without a byte of a
  // reply. Servers close idle connections, so it is no failure. The server may or may not have
  // taken what was sent.
  bool was_closed_while_idle() const { return lost_ && reused_ && !heard_; }
  // The hello of the server behind this connection. The address may lead to another server later.
  wire::HelloReply hello;
  bool has_read_catalogue = false;  // of this server
  // Mark the connection as broken. Return kUnavailable: the named server broke the protocol.
  base::Status distrust(std::string_view what);
  // Return the poll() events to wait for, when a thread waits for several connections. Bytes that
  // were read ahead need no wait.
  pollfd wish();
  bool has_read_ahead() const {
    return rdma_ != nullptr ? rdma_->has_bytes() : inbox_begin_ < inbox_end_;
  }
  // Return whether these events announce bytes of a reply, or the end of the connection.
  bool has_arrived(short events);

  // Return whether no byte is owed in either direction and the server has not
  // closed the connection.
  bool is_reusable();

  std::vector<std::byte>& scratch() { return scratch_; }
  wire::Frame& frame() { return frame_; }

 private:
  Connection(int socket, std::string peer)
      : socket_(socket), peer_(std::move(peer)), inbox_(kInboxBytes) {}
  base::Status wait(const Deadline& deadline);
  base::Status wait_rdma(const Deadline& deadline);
  bool is_quiet() const;  // the socket has neither bytes nor an end to report
  base::Status lost(std::string_view what, int error_number);
  base::Status break_with(base::Code code, std::string_view what);
  base::Status closed_by_server();
  base::Status time_out(const Deadline& deadline);

  // The head of the next reply is read ahead into the inbox, behind the rows of the current one.
  // A reply to 500 keys has a head of 136 bytes.
  static constexpr size_t kInboxBytes = 4096;
  // Limit of pieces in one recvmsg. The kernel copies the list of pieces at every call, so a
  // longer list would be copied again and again.
  static constexpr size_t kPiecesPerReceive = 256;
  // A send buffer that a large push grew beyond this is freed.
  static constexpr size_t kOutgoingBytesKept = 1 << 20;

  int socket_;
  std::unique_ptr<transport::RdmaPeer> rdma_;  // null: frames go over the socket
  int either_ = -1;                            // epoll of the socket and of rdma_'s completions
  std::string peer_;
  bool broken_ = false;
  bool lost_ = false;    // closed or reset by the server
  bool reused_ = false;  // see begin_use
  bool heard_ = false;   // bytes have arrived since begin_use
  uint64_t used_since_ns_ = 0;
  uint64_t idle_since_ns_ = 0;
  uint64_t timed_out_after_ns_ = 0;
  uint64_t next_request_id_ = 1;
  std::vector<std::byte> inbox_;
  size_t inbox_begin_ = 0;
  size_t inbox_end_ = 0;
  std::vector<std::byte> outgoing_;
  size_t outgoing_sent_ = 0;
  std::vector<std::byte> scratch_;
  std::vector<uint64_t> body_;
  wire::Frame frame_;
};

}  // namespace petps::client
