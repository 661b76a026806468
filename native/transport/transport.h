// Room transport: frames in, gather lists out. One contract, several implementations: tcp/, rdma/,
// loopback/.
//
// Owns:        connections, receive buffers, output that a peer has not taken yet, accepting and
//              refusing peers.
// Never does:  know rows, tables or opcodes (the rules that tell where a frame ends are handed in);
//              call up.
// Called by:   server: one Endpoint per worker. tests/contract runs one suite over every
//              implementation.
// Invariants:  frames of a connection come in order; lists of a connection leave in the order they
//              were posted; the Pin of a list is dropped when nothing reads its rows any more, and
//              never by closing alone; a peer that misbehaves loses its own connection and nothing
//              else; memory per connection is bounded by Limits, and that of all of them by
//              memory_budget.h.
// Threads:     an Endpoint belongs to one thread, except wake(); Transport's methods may be called
//              by any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "epoch/epoch.h"
#include "gather/gather.h"

namespace petps::transport {

// Slot of the connection in its endpoint (low 32 bits) and the slot's generation: an id is never
// reused.
using ConnectionId = uint64_t;
inline uint32_t slot_of(ConnectionId id) { return static_cast<uint32_t>(id); }

// How a transport finds frames without knowing them.
struct FrameRules {
  size_t header_bytes = 0;     // what must be there before frame_length may be asked
  size_t frame_bytes_max = 0;  // of a whole frame; also bounds the receive buffer
  // Length of the whole frame that starts with `bytes` (at least header_bytes). An error closes the
  // connection.
  base::Status (*frame_length)(std::span<const std::byte> bytes, size_t& length) = nullptr;
  // The frame that tells a peer why it is being closed.
  void (*encode_error)(const base::Status& reason, std::vector<std::byte>& frame) = nullptr;
};

struct Limits {
  // A file descriptor and a receive buffer each.
  uint32_t connections = 4096;
  // Output that a connection may leave unread before its requests wait: what a pipelining client
  // takes in one go.
  size_t output_pause_bytes = size_t{1} << 20;
  // Output above which it is closed: two frames of the largest size.
  size_t output_close_bytes = size_t{33} << 20;
  // A peer that takes nothing of its output for so long is closed.
  uint64_t output_stall_ms = 10'000;
  // A frame must be complete so long after its first byte (slow loris); 16 MiB in 30 s is 5 Mbit/s.
  uint64_t frame_ms = 30'000;
  // A connection that sent no whole frame for so long, while nothing was owed to it, is closed
  // without a word; 0: never. Clients connect again by themselves.
  uint64_t idle_ms = 300'000;
  // A posted list that holds its Pin longer than this is reported, so that its connection can be
  // closed.
  uint64_t pin_ms = 5'000;
};

enum class GatherMode : uint8_t {
  kAuto,      // whichever of the others is cheapest for such a list: see gather_choice.h
  kCopy,      // rows are copied, prefetched, into one buffer and sent from there
  kSendmsg,   // the kernel gathers the rows; what the socket does not take at once is copied out
  kZerocopy,  // the network card gathers the rows; the pin waits for the completion
};

// Called once where a peer becomes known, before its first byte is read. Not OK: the peer is told
// why, and refused.
struct Peer {
  std::string address;  // "127.0.0.1:52133"
};
using Admit = std::function<base::Status(const Peer&)>;

struct Event {
  enum class Kind : uint8_t {
    kOpened,  // a connection became this endpoint's
    kFrames,  // at least one complete frame waits: peek() and consume() them
    // the connection is gone; `reason` says why (OK: the peer closed it, or close() was called)
    kClosed,
    // A posted list has held its Pin longer than Limits::pin_ms: the connection wants closing. With
    // a `reason`: it is closed already, and the hardware still reads its rows.
    kOverdue,
  };
  Kind kind;
  ConnectionId connection;
  base::Status reason;
};

// Written by one thread, read by any.
struct Counters {
  std::atomic<uint64_t> bytes_received{0};
  std::atomic<uint64_t> bytes_sent{0};
  std::atomic<uint64_t> frames_received{0};
  std::atomic<uint64_t> lists_posted{0};
  // Of those, by the way their rows went out; without rows: copied.
  std::atomic<uint64_t> lists_copied{0};
  std::atomic<uint64_t> lists_gathered{0};  // by the kernel
  std::atomic<uint64_t> lists_zerocopy{0};
  std::atomic<uint64_t> zerocopy_sends{0};
  std::atomic<uint64_t> zerocopy_copied{0};   // of those: the kernel copied nevertheless
  std::atomic<uint64_t> zerocopy_refused{0};  // it had no memory for it, and sent in the usual way
  std::atomic<uint64_t> opened{0};
  std::atomic<uint64_t> closed{0};
  // of those: a broken rule or limit, not the peer's or our own wish
  std::atomic<uint64_t> closed_for_cause{0};
  std::atomic<uint64_t> closed_idle{0};      // after Limits::idle_ms
  std::atomic<uint64_t> closed_for_room{0};  // idle, and a new peer needed the place
  static void add(std::atomic<uint64_t>& counter, uint64_t n) {
    counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
};

// One worker's share of a transport.
class Endpoint {
 public:
  virtual ~Endpoint() = default;

  // Waits for at most timeout_ms (0: does not wait), receives, sends what waits, runs completions,
  // closes what broke a limit. The events are valid until the next poll. A connection whose frames
  // were not all consumed is reported again, unless it is paused or its output is above
  // Limits::output_pause_bytes.
  virtual std::span<const Event> poll(int timeout_ms) = 0;

  // The next complete frame, in place and 8-byte aligned (as long as frame lengths are multiples of
  // 8); valid until consume() or poll(). False: none is complete, the connection is closed, or its
  // output is above Limits::output_pause_bytes.
  virtual bool peek(ConnectionId connection, std::span<const std::byte>& frame) = 0;
  // A peer that has ended its side lives until as many lists were posted to it as frames were
  // consumed.
  virtual void consume(ConnectionId connection) = 0;

  // Queues a list behind the connection's earlier ones. The list is taken or copied out; what is
  // left in `list` is empty but keeps its memory where it can. A list for a connection that is gone
  // is dropped, pin and all.
  virtual void post(ConnectionId connection, gather::GatherList&& list, epoch::Pin&& pin) = 0;
  // Sends what was posted. Call after the frames of a connection were handled; lists of one
  // connection share a send.
  virtual void flush() = 0;

  // A paused connection is neither read nor reported.
  virtual void pause(ConnectionId connection) = 0;
  virtual void resume(ConnectionId connection) = 0;
  // Something else depends on this connection: its idleness is no reason to close it.
  virtual void keep(ConnectionId /*connection*/) {}
  // Sends what it can of the output, then closes; kClosed follows in the next poll.
  virtual void close(ConnectionId connection, base::Status reason) = 0;

  // Posted lists that still hold their Pin or wait for their peer.
  virtual size_t pending_posts() const = 0;
  virtual std::vector<ConnectionId> connections() const = 0;
  virtual std::string peer(ConnectionId connection) const = 0;  // "" when it is gone
  const Counters& counters() const { return counters_; }

  // Ends a poll that is waiting. Any thread.
  virtual void wake() = 0;

 protected:
  Counters counters_;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual size_t endpoints() const = 0;
  virtual Endpoint& endpoint(size_t worker) = 0;
  // Begins to accept peers; each becomes the connection of the endpoint that has the fewest.
  virtual base::Status start() = 0;
  // Accepts no more. Connections live on.
  virtual void stop_accepting() = 0;
  // Ends every connection and drops every Pin: from here on nothing of it reads a row. Nothing is
  // accepted and no endpoint is polled any more.
  virtual void end() = 0;
  virtual uint16_t port() const = 0;     // 0: none
  virtual uint64_t refused() const = 0;  // peers turned away: limit, admission, no file descriptor
  virtual const char* name() const = 0;  // "tcp"
};

}  // namespace petps::transport
