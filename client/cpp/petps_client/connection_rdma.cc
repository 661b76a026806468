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
int poll_both(int socket, int completions) {
  const int both = epoll_create1(EPOLL_CLOEXEC);
  if (both < 0) return -1;
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  if (epoll_ctl(both, EPOLL_CTL_ADD, socket, &event) == 0) {
    event.events = EPOLLIN;
    if (epoll_ctl(both, EPOLL_CTL_ADD, completions, &event) == 0) return both;
  }
  const int error = errno;
  close(both);
  errno = error;
  return -1;
}

}  // namespace

Status Connection::move_to_rdma(transport::Verbs& verbs, const Deadline& deadline) {
  auto opened = transport::RdmaPeer::open(verbs, {});
  if (!opened.ok()) return opened.status();
  const int either = poll_both(socket_, opened.value()->file());
  if (either < 0) return base::errno_status(Code::kIoError, "epoll", errno);
  either_ = either;
  wire::encode_rdma(next_request_id(), offer_of(opened.value()->hello()), frame_);
  wire::FrameHeader header;
  const auto body = ask(frame_, header, deadline);
  if (!body.ok()) return body.status();
  wire::RdmaReply reply;
  const Status decoded = wire::decode_rdma_reply(header, body.value(), reply);
  if (!decoded.ok()) return distrust(decoded.message());
  const Status connected = opened.value()->connect(welcome_of(reply));
  if (!connected.ok()) return break_with(connected.code(), connected.message());
  rdma_ = std::move(opened.value());
  return {};
}

// Wait until bytes have arrived. No wake-up is lost: arm() precedes the last progress(), so a
// completion after that progress() wakes the poll.
Status Connection::wait_rdma(const Deadline& deadline) {
  Status status = rdma_->arm();
  if (status.ok()) status = rdma_->progress();
  if (rdma_->has_bytes()) return {};
  if (!status.ok()) return break_with(status.code(), status.message());
  if (rdma_->has_ended() || !is_quiet()) {
    return closed_by_server();
  }
  pollfd entry{either_, POLLIN, 0};
  const timespec limit = timespec_of(deadline.left_ns());
  const int count = ppoll(&entry, 1, &limit, nullptr);
  if (count < 0 && errno != EINTR) return lost("poll", errno);
  if (count != 0) return {};
  return time_out(deadline);
}

pollfd Connection::wish() {
  if (rdma_ == nullptr) {
    const bool sending = outgoing_sent_ < outgoing_.size();
    return {socket_, static_cast<short>(sending ? POLLIN | POLLOUT : POLLIN), 0};
  }
  // A connection that fails here reports the error when its reply is read.
  if (rdma_->arm().ok()) (void)rdma_->progress();
  return {either_, POLLIN, 0};
}

bool Connection::has_arrived(short events) {
  if (rdma_ == nullptr) return (events & ~POLLOUT) != 0;
  if (events == 0) return false;
  return !rdma_->progress().ok() || rdma_->has_bytes() || rdma_->has_ended() || !is_quiet();
}

}  // namespace petps::client
