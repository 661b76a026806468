// A raw rdma client: a TCP connection, and the queue pair that it offered over this connection.
#pragma once

#include <poll.h>

#include "base/clock.h"
#include "raw_client.h"
#include "transport/rdma/peer.h"

namespace petps::server {

inline wire::RdmaRequest offer_of(const transport::RdmaHello& hello) {
  return {{hello.pair.number, hello.pair.packet_number, hello.pair.lid, hello.pair.mtu, 0,
           hello.pair.gid},
          hello.ring_key,
          hello.ring_address,
          hello.ring_bytes,
          hello.ring_messages};
}

class RdmaClient {
 public:
  RdmaClient(uint16_t port, transport::Verbs& device) : door(port) {
    auto opened = transport::RdmaPeer::open(device, {1u << 20, 32});
    EXPECT_TRUE(opened.ok());
    peer = std::move(opened.value());
    const Reply reply = offer();
    EXPECT_TRUE(reply.error().ok()) << reply.error().to_string();
    wire::RdmaReply accepted;
    EXPECT_TRUE(wire::decode_rdma_reply(reply.header, reply.body, accepted).ok());
    EXPECT_TRUE(peer->connect({{accepted.pair.number, accepted.pair.packet_number,
                                accepted.pair.lid, accepted.pair.mtu, accepted.pair.gid},
                               accepted.credits,
                               accepted.message_bytes,
                               0})
                    .ok());
  }
  Reply offer() {
    wire::Frame frame;
    wire::encode_rdma(1, offer_of(peer->hello()), frame);
    return door.call(frame);
  }
  bool send(const wire::Frame& frame) { return peer->send(frame).ok(); }
  Reply receive(int timeout_ms = 20'000) {
    Reply reply;
    std::vector<std::byte> head(wire::kHeaderBytes);
    until_ = base::monotonic_ns() + static_cast<uint64_t>(timeout_ms) * 1'000'000;
    reply.closed = !receive_exactly(head);
    if (reply.closed) return reply;
    EXPECT_TRUE(wire::decode_reply_header(head, reply.header).ok());
    reply.body.resize(reply.header.body_bytes);
    reply.closed = !receive_exactly(reply.body);
    return reply;
  }
  Reply call(const wire::Frame& frame) {
    EXPECT_TRUE(send(frame));
    return receive();
  }

  RawClient door;
  std::unique_ptr<transport::RdmaPeer> peer;

 private:
  bool receive_exactly(std::span<std::byte> out) {
    while (!out.empty()) {
      base::Status status = peer->arm();
      if (status.ok()) status = peer->progress();
      const size_t n = peer->receive(out);
      out = out.subspan(n);
      if (n > 0) continue;
      if (!status.ok() || peer->has_ended() || base::monotonic_ns() > until_) return false;
      pollfd waiting{peer->file(), POLLIN, 0};
      ::poll(&waiting, 1, 100);
    }
    return true;
  }
  uint64_t until_ = 0;
};

}  // namespace petps::server
