// A connection over RDMA: the same frames, as messages that arrive in this process's memory.
#include <sys/epoll.h>

#include <cerrno>

#include "petps_client/connection.h"

namespace petps::client {

using base::Code;
using base::Status;

namespace {

wire::RdmaRequest offer_of(const transport::RdmaHello& hello) {
  const transport::QueuePairAddress& pair = hello.pair;
  return {{pair.number, pair.packet_number, pair.lid, pair.mtu, 0, pair.gid},
          hello.ring_key,
          hello.ring_address,
          hello.ring_bytes,
          hello.ring_messages};
}

transport::RdmaWelcome welcome_of(const wire::RdmaReply& reply) {
  const wire::QueuePair& pair = reply.pair;
  return {{pair.number, pair.packet_number, pair.lid, pair.mtu, pair.gid},
          reply.credits,
          reply.message_bytes,
          0};
}

// Return an epoll of both files, or -1 with errno set.
int open_epoll(int socket, int completions) {
  const int poll_file = epoll_create1(EPOLL_CLOEXEC);
  if (poll_file < 0) return -1;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  if (epoll_ctl(poll_file, EPOLL_CTL_ADD, socket, &event) == 0) {
    event.events = EPOLLIN;
    if (epoll_ctl(poll_file, EPOLL_CTL_ADD, completions, &event) == 0) return poll_file;
  }
  const int error = errno;
  close(poll_file);
  errno = error;
  return -1;
}

}  // namespace

Status Connection::move_to_rdma(transport::Verbs& verbs, const Deadline& deadline) {
  auto opened = transport::RdmaPeer::open(verbs, {});
  if (!opened.ok()) return opened.status();
  poll_file_ = open_epoll(socket_, opened.value()->file());
  if (poll_file_ < 0) return base::errno_status(Code::kIoError, "epoll", errno);
  wire::encode_rdma(next_request_id(), offer_of(opened.value()->hello()), frame_);
  wire::RdmaReply reply;
  PETPS_RETURN_IF_ERROR(exchange(deadline, [&](const wire::FrameHeader& header, auto body) {
    return wire::decode_rdma_reply(header, body, reply);
  }));
  const Status connected = opened.value()->connect(welcome_of(reply));
  if (!connected.ok()) return break_with(connected.code(), connected.message());
  rdma_ = std::move(opened.value());
  return {};
}

// Wait until bytes arrive. No completion is missed: arm() precedes the last progress(), so a
// completion after that progress() wakes the poll.
Status Connection::wait_rdma(const Deadline& deadline) {
  Status status = rdma_->arm();
  if (status.ok()) status = rdma_->progress();
  if (rdma_->has_bytes()) return {};
  if (!status.ok()) return break_with(status.code(), status.message());
  if (rdma_->has_ended() || !is_quiet()) return break_by_close();
  pollfd entry{poll_file_, POLLIN, 0};
  const timespec limit = timespec_of(deadline.left_ns());
  const int count = ppoll(&entry, 1, &limit, nullptr);
  if (count < 0 && errno != EINTR) return break_by_errno("poll", errno);
  if (count != 0) return {};
  return break_by_timeout(deadline);
}

pollfd Connection::poll_entry() {
  if (rdma_ == nullptr) {
    const bool sending = outgoing_sent_ < outgoing_.size();
    return {socket_, static_cast<short>(sending ? POLLIN | POLLOUT : POLLIN), 0};
  }
  // A connection that fails here reports the error when its reply is read.
  if (rdma_->arm().ok()) (void)rdma_->progress();
  return {poll_file_, POLLIN, 0};
}

bool Connection::has_arrived(short events) {
  if (rdma_ == nullptr) return (events & ~POLLOUT) != 0;
  if (events == 0) return false;
  return !rdma_->progress().ok() || rdma_->has_bytes() || rdma_->has_ended() || !is_quiet();
}

}  // namespace petps::client
