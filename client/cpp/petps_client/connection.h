// One TCP connection: bytes in and out by a deadline. Knows frames, not what they mean.
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

// ASSUMPTIONS: one thread at a time. After any error the connection is broken: what arrives next belongs to nobody.
// ERRORS: kUnavailable (refused, closed, reset), kDeadlineExceeded; both name the server.
class Connection {
 public:
  static base::Result<std::unique_ptr<Connection>> open(const std::string& peer, HostLookup& host,
                                                        const Deadline& deadline);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Offers the server a queue pair; what follows goes over it, and the socket tells of the server's end.
  // Errors: what the server answered (then all goes on over TCP), or a broken connection.
  base::Status move_to_rdma(transport::Verbs& verbs, const Deadline& deadline);
  bool is_over_rdma() const { return rdma_ != nullptr; }

  const std::string& peer() const { return peer_; }
  uint64_t next_request_id() { return next_request_id_++; }

  // Queues a frame; flush sends what the socket takes now, read sends the rest while it waits.
  void queue(std::span<const std::byte> frame) {
    outgoing_.insert(outgoing_.end(), frame.begin(), frame.end());
  }
  base::Status flush();
  // Exactly out.size() bytes, straight into `out` where the socket has them.
  base::Status read(std::span<std::byte> out, const Deadline& deadline) {
    iovec piece{out.data(), out.size()};
    return read_pieces({&piece, 1}, deadline);
  }
  // The same into several places, one after another; changes `pieces`.
  base::Status read_pieces(std::span<iovec> pieces, const Deadline& deadline);
  base::Status read_header(wire::FrameHeader& header, const Deadline& deadline);
  // The whole body of a small reply, 8-byte aligned; valid until the next call.
  base::Result<std::span<const std::byte>> read_body(const wire::FrameHeader& header,
                                                     const Deadline& deadline);
  // Reads the body of an error reply; `error` is what it says, with the server's name.
  base::Status read_error(const wire::FrameHeader& header, const Deadline& deadline,
                          base::Status& error);
  // One request, one reply (not pull): queue, flush, header, body. An error reply is an error here.
  base::Result<std::span<const std::byte>> ask(const wire::Frame& request, wire::FrameHeader& reply,
                                               const Deadline& deadline);

  // A call begins to use it; `reused`: another call has, before.
  void begin_use(bool reused);
  void end_use();
  uint64_t idle_ns() const;  // since end_use
  // A broken connection is closed instead of reused.
  bool broken() const { return broken_; }
  // The caller's time passed before a reply came: for how long this use waited. 0: it did not.
  uint64_t timed_out_after_ns() const { return timed_out_after_ns_; }
  // It was idle before this use, and ended without a byte of a reply: a server closes idle
  // connections, which is no failure of it. Whether it took what was sent is not known.
  bool was_closed_while_idle() const { return lost_ && reused_ && !heard_; }
  // Of the server behind this very connection: an address may lead to another one next time.
  wire::HelloReply hello;
  bool has_read_catalogue = false;  // of that server
  // The server broke the protocol: kUnavailable with its name, and the connection is not used again.
  base::Status distrust(std::string_view what);
  // For waiting on several: the events of poll() that something can be done on; bytes that were read ahead need no waiting.
  pollfd wish();
  bool has_read_ahead() const {
    return rdma_ != nullptr ? rdma_->has_bytes() : inbox_begin_ < inbox_end_;
  }
  // Whether those events mean that a reply begins to arrive, or that the connection has ended.
  bool has_arrived(short events);

  // Nothing is owed either way and the server has not closed it.
  bool is_reusable();

  std::vector<std::byte>& scratch() { return scratch_; }
  wire::Frame& frame() { return frame_; }

 private:
  Connection(int socket, std::string peer)
      : socket_(socket), peer_(std::move(peer)), inbox_(kInboxBytes) {}
  base::Status wait(const Deadline& deadline);
  base::Status wait_rdma(const Deadline& deadline);
  bool is_quiet() const;  // nothing has come over the socket, not even its end
  base::Status lost(std::string_view what, int error_number);
  base::Status break_with(base::Code code, std::string_view what);
  base::Status closed_by_server();
  base::Status time_out(const Deadline& deadline);

  // Replies' heads are read ahead into it behind the rows of the reply before; 500 keys need 136 bytes.
  static constexpr size_t kInboxBytes = 4096;
  // Rows of a reply that go to places apart are received so many at a time: more would be copied into the kernel over and over.
  static constexpr size_t kPiecesPerReceive = 256;
  // What a large push grew is not kept for ever.
  static constexpr size_t kOutgoingBytesKept = 1 << 20;

  int socket_;
  std::unique_ptr<transport::RdmaPeer> rdma_;  // null: over the socket
  int either_ = -1;                            // epoll of the socket and of rdma's completions
  std::string peer_;
  bool broken_ = false;
  bool lost_ = false;    // closed or reset by the other side
  bool reused_ = false;  // since begin_use
  bool heard_ = false;   // bytes have come since begin_use
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
