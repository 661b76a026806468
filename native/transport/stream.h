// The part of an endpoint that is the same over every network: connections, each of which carries
// a stream of frames in both directions. Internal to transport.
//
// Owns:        the connections of an endpoint: slots, ids, input, output, limits, memory budget,
//              events, and the state from opening to closing.
// Never does:  touch a socket or a device; hold a posted list or its Pin (tcp/ and rdma/ do both).
// Called by:   TcpEndpoint and RdmaEndpoint, which derive from StreamEndpoint.
// Invariants:  an id is never reused. The object of a closed connection exists until its slot is
//              taken again, so a reference to a connection stays valid until the endpoint adopts
//              new peers. Every connection that was reported opened is reported closed once. A
//              connection is closed for a limit only after catch_up(), because its peer may have
//              done its part while the endpoint's thread did not run.
// Threads:     the endpoint's thread; any thread may call wake(), assigned() and open_count().
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/limits.h"
#include "transport/memory_budget.h"
#include "transport/receive_buffer.h"
#include "transport/send_buffer.h"
#include "transport/transport.h"

namespace petps::transport {

// A peer may take this long to read why its connection is closed; then the connection is destroyed.
inline constexpr uint64_t kLingerMs = 1'000;

struct StreamConnection {
  // kLingering: closed for the server, but the peer still receives its last output.
  // kSettling: closed for the peer too, but something still reads its rows (tcp only).
  enum class State : uint8_t { kFree, kOpen, kLingering, kSettling };

  virtual ~StreamConnection() = default;
  // Return the number of posted lists whose memory is still read.
  virtual size_t lists_in_flight() const = 0;
  // Return true if such a list was posted before `since_ns`. Each list is reported once.
  virtual bool take_overdue(uint64_t since_ns) = 0;

  ConnectionId id() const { return uint64_t{generation} << 32 | slot; }
  // Return whether the peer waits for the server, and not the server for the peer.
  bool is_awaited() const {
    return kept || paused || owed > 0 || out.bytes() > 0 || lists_in_flight() > 0;
  }

  uint32_t slot = 0;
  uint32_t generation = 1;
  State state = State::kFree;
  bool paused = false;
  bool ended = false;      // the peer sends no more
  bool left = false;       // the same, noticed while paused: input may still be waiting
  bool candidate = false;  // its slot is in candidates_
  bool broken = false;     // the connection failed or broke a limit: close it at once
  bool broken_for_cause = false;
  bool kept = false;  // keep(): never closed for being idle
  // TLS: the peer has sent a part of a record, which may be the first part of a frame.
  bool has_partial_record = false;
  int64_t owed = 0;  // frames consumed minus lists posted: replies that the peer may still expect
  ReceiveBuffer in;
  SendBuffer out;
  uint64_t out_since_ns = 0;  // when the peer last took some of the output
  FrameClock frame_clock;
  IdleClock idle_clock;
  size_t fixed_bytes = 0;  // memory besides `in` and `out`
  size_t counted = 0;      // bytes of this connection in the memory budget
  uint64_t linger_until_ns = 0;
  base::Status broken_reason;
  std::string address;
};

class StreamEndpoint : public Endpoint {
 public:
  StreamEndpoint(const Limits& limits, const FrameRules& rules,
                 std::shared_ptr<MemoryBudget> memory);
  ~StreamEndpoint() override;

  bool peek(ConnectionId connection, std::span<const std::byte>& frame) override;
  void consume(ConnectionId connection) override;
  void pause(ConnectionId connection) override;
  void resume(ConnectionId connection) override;
  void keep(ConnectionId connection) override;
  bool has_left(ConnectionId connection) const override {
    const StreamConnection* c = find(connection);
    return c != nullptr && c->left;
  }
  void close(ConnectionId connection, base::Status reason) override;
  size_t pending_posts() const override;
  std::vector<ConnectionId> connections() const override;
  std::string peer(ConnectionId connection) const override;
  void wake() override;

  // assigned() counts all peers, including those being closed or refused; open_count() counts
  // connections.
  uint32_t assigned() const { return assigned_.load(std::memory_order_relaxed); }
  uint32_t open_count() const { return open_.load(std::memory_order_relaxed); }

 protected:
  using State = StreamConnection::State;
  using Look = ReceiveBuffer::Look;

  // ---- What a network provides

  // Send as much of the output as the network takes. If the connection lingers and all output is
  // sent, also send that nothing follows.
  virtual void send_output(StreamConnection& c) = 0;
  // Move what has arrived into `in`, up to one whole frame.
  virtual void receive_waiting(StreamConnection& c) = 0;
  // Release the connection and, by free_slot(), its slot, as soon as nothing reads its rows.
  virtual void destroy(StreamConnection& c) = 0;

  // ---- Opening

  base::Status open_wake();
  void clear_wake();  // wake_ is no longer readable afterwards
  // Give the connection a slot and an id. The caller must have counted it in assigned_ and open_.
  StreamConnection& take_slot(std::unique_ptr<StreamConnection> connection);
  void report_opened(const StreamConnection& c);

  // ---- Serving

  StreamConnection* find(ConnectionId id) const {
    const uint32_t slot = slot_of(id);
    if (slot >= slots_.size()) return nullptr;
    StreamConnection* c = slots_[slot].get();
    return c->state == State::kOpen && c->id() == id ? c : nullptr;
  }
  bool may_read(const StreamConnection& c) const {
    if (c.paused) return false;
    const size_t output = c.out.bytes();
    return output == 0 || (output < limits_.output_pause_bytes && !memory_->is_tight());
  }
  // Look at the front of the input. Return kNothing while the connection may not be read.
  Look look(StreamConnection& c, std::span<const std::byte>& frame, base::Status& reason) const;
  // Return whether a whole frame, or a broken one, is at the front. Return false while the
  // connection may not be read: resume(), or output that is taken, makes it a candidate again.
  bool has_frame(StreamConnection& c) const;
  // Make the next poll review the connection.
  void add_candidate(StreamConnection& c) {
    if (c.candidate) return;
    c.candidate = true;
    candidates_.push_back(c.slot);
  }
  // Report the frame at the front, or close the connection if its input is broken or at its end.
  // Return whether a frame was reported.
  bool report(StreamConnection& c);
  // Return whether the peer sends no more and has received everything. A connection that is
  // paused, or owed a reply, must stay, because the server still works for it.
  bool may_end(const StreamConnection& c) const;
  // Return whether the peer has stopped sending within a frame. Whole frames come first.
  bool is_truncated(StreamConnection& c) const;
  // Count a list that is posted to the connection. If the connection is gone or broken, clear the
  // list and return null.
  StreamConnection* begin_post(ConnectionId connection, gather::GatherList& list);
  // Return room for n bytes behind the waiting output. If a limit forbids them, return a scratch
  // buffer and break the connection.
  std::byte* grow_output(StreamConnection& c, size_t n);
  // Queue plain bytes behind the waiting output.
  virtual void append_output(StreamConnection& c, std::span<const std::byte> bytes);
  void consume_output(StreamConnection& c, size_t n);
  void count_memory(StreamConnection& c);

  // ---- Closing

  // Enforce the limits of every connection; report lists that hold their Pin for too long.
  void sweep(uint64_t now);
  // Send what the network takes and receive what waits in it, up to one frame.
  void catch_up(StreamConnection& c);
  // Return after how long an idle connection is closed; 0: never.
  uint64_t idle_limit_ms(const StreamConnection& c) const;
  // Return whether the peer has owed a whole frame for `ms`.
  bool is_idle(StreamConnection& c, uint64_t now, uint64_t ms) const;
  // Close the connection at the next poll, without an error frame.
  void break_connection(StreamConnection& c, base::Status reason, bool for_cause = false);
  void drop_broken(StreamConnection& c);
  // Send the reason behind the replies, and linger. The server gets kClosed at once.
  void fail(StreamConnection& c, base::Status reason);
  void keep_error(StreamConnection& c, const base::Status& reason);
  void close_quietly(StreamConnection& c);
  void report_closed(StreamConnection& c, base::Status reason, bool for_cause);
  void start_linger(StreamConnection& c);
  void release_buffers(StreamConnection& c);
  void free_slot(StreamConnection& c);

  const Limits limits_;
  const FrameRules rules_;
  const std::shared_ptr<MemoryBudget> memory_;
  int wake_ = -1;  // an eventfd
  // One object per slot; null never, but kFree if the slot is in free_slots_.
  std::vector<std::unique_ptr<StreamConnection>> slots_;
  std::vector<uint32_t> free_slots_;
  std::vector<uint32_t> candidates_;  // slots that the next poll reviews
  std::vector<uint32_t> reviewed_;    // the candidates of the current review
  std::vector<Event> events_;         // of the last poll
  std::vector<Event> next_events_;    // of the next one
  uint64_t next_sweep_ns_ = 0;
  std::atomic<uint32_t> assigned_{0};
  std::atomic<uint32_t> open_{0};

 private:
  enum class Limit : uint8_t { kNone, kStall, kIdle, kFrame };
  Limit exceeded_limit(StreamConnection& c, uint64_t now) const;
  void enforce_limits(StreamConnection& c, uint64_t now);

  std::vector<std::byte> waste_;  // receives the replies of broken connections
  const uint64_t sweep_ns_;
};

}  // namespace petps::transport
