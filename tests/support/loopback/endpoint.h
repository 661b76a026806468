// One worker's share of the loopback transport. Internal to tests/support/loopback.
#pragma once

#include <deque>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/loopback/loopback.h"
#include "transport/limits.h"
#include "transport/receive_buffer.h"

namespace petps::transport {

class LoopbackEndpoint final : public Endpoint {
 public:
  explicit LoopbackEndpoint(LoopbackTransport& transport) : transport_(transport) {}

  std::span<const Event> poll(int timeout_ms) override;
  bool peek(ConnectionId connection, std::span<const std::byte>& frame) override;
  void consume(ConnectionId connection) override;
  void post(ConnectionId connection, gather::GatherList&& list, epoch::Pin&& pin) override;
  void flush() override {}
  void pause(ConnectionId connection) override;
  void resume(ConnectionId connection) override;
  void close(ConnectionId connection, base::Status reason) override;
  size_t pending_posts() const override;
  std::vector<ConnectionId> connections() const override;
  std::string peer(ConnectionId connection) const override;
  void wake() override;

 private:
  friend class LoopbackTransport;

  // A list in flight. It outlives its connection, because only completion drops the pin.
  struct Posted {
    uint64_t number = 0;
    ConnectionId connection = 0;
    gather::GatherList list;
    epoch::Pin pin;
    uint64_t posted_ns = 0;
    bool reported = false;
    bool complete = false;
    std::vector<std::byte> bytes;  // of a complete list, until the lists before it are complete
  };
  struct Connection {
    std::shared_ptr<Pipe> pipe;
    uint32_t slot = 0;
    uint32_t generation = 1;
    bool open = false;
    bool paused = false;
    int64_t owed = 0;  // frames consumed minus lists posted
    ReceiveBuffer in;
    FrameClock frame_clock;
    std::string address;
  };

  // The caller of every method below must hold transport_.mutex_.
  ConnectionId id_of(const Connection& c) const { return uint64_t{c.generation} << 32 | c.slot; }
  Connection* find(ConnectionId id) const;
  bool may_read(const Connection& c) const;
  void adopt(std::shared_ptr<Pipe> pipe, std::string address);
  size_t open_connections() const;
  void collect(uint64_t now);
  void collect_connection(Connection& c, uint64_t now);
  void take_input(Connection& c);
  void complete(Posted& posted);
  void deliver();
  void complete_some();
  void check_pins(uint64_t now);
  void close_connection(Connection& c, base::Status reason, bool for_cause, bool sends_error);

  LoopbackTransport& transport_;
  std::vector<std::unique_ptr<Connection>> slots_;
  std::list<Posted> posted_;  // in order of posting
  std::vector<Event> events_;
  std::vector<Event> next_events_;
  bool woken_ = false;
};

}  // namespace petps::transport
