// Room transport: frames in, gather lists out. One contract, two implementations: tcp/ and rdma/,
// which share stream.h. (tests/support/loopback is a third one, in memory, for tests.)
//
// Owns:        connections, their encryption, receive buffers, output that a peer has not taken
//              yet, accepting and refusing peers.
// Never does:  know rows, tables or opcodes (the caller hands in the rules that find the end of a
//              frame); call into the server.
// Called by:   server: one Endpoint per worker. tests/contract runs one suite over every
//              implementation.
// Invariants:  frames of a connection arrive in order; lists of a connection leave in the order of
//              their posts; the Pin of a list is dropped when nothing reads its rows any more, and
//              never by closing alone; a peer that breaks the rules loses its own connection and
//              nothing else; Limits bounds the memory of each connection, and memory_budget.h that
//              of all connections together.
// Threads:     an Endpoint belongs to one thread, except wake(); any thread may call Transport's
//              methods.
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

// The connection's slot in its endpoint (low 32 bits) and the slot's generation (high 32 bits).
// An id is never reused.
using ConnectionId = uint64_t;
inline uint32_t slot_of(ConnectionId id) { return static_cast<uint32_t>(id); }

// How a transport finds the frames, whose content it does not know.
struct FrameRules {
  size_t header_bytes = 0;     // bytes that must have arrived before frame_length may be called
  size_t frame_bytes_max = 0;  // of a whole frame; also bounds the receive buffer
  size_t first_bytes_max = 0;  // of the first frame of a connection, if not 0
  // Set `length` to the length of the whole frame that starts with `bytes` (at least
  // header_bytes). An error closes the connection.
  base::Status (*frame_length)(std::span<const std::byte> bytes, size_t& length) = nullptr;
  // Build the frame that reports to the peer why its connection is closed.
  void (*encode_error)(const base::Status& reason, std::vector<std::byte>& frame) = nullptr;
};

struct Limits {
  // Each connection costs a file descriptor and a receive buffer.
  uint32_t connections = 4096;
  // Of one peer, by its address without the port; 0: no limit. Only tcp.
  uint32_t connections_per_peer = 1024;
  // A connection's requests wait while it leaves more output than this unread: about what a
  // pipelining client takes in one go.
  size_t output_pause_bytes = size_t{1} << 20;
  // A connection with more unread output than this is closed: two frames of the largest size.
  size_t output_close_bytes = size_t{33} << 20;
  // A peer that reads nothing of its output for this long is closed.
  uint64_t output_stall_ms = 10'000;
  // A frame must be complete this long after its first byte (slow loris); 16 MiB in 30 s is 5
  // Mbit/s.
  uint64_t frame_ms = 30'000;
  // A connection that sends no whole frame for this long, while nothing is owed to it, is closed
  // without an error frame; 0: never. Clients reconnect automatically. One that has never sent a
  // byte is closed after frame_ms already.
  uint64_t idle_ms = 300'000;
  // A posted list that holds its Pin longer than this is reported, so that the server can close
  // its connection.
  uint64_t pin_ms = 5'000;
};

enum class GatherMode : uint8_t {
  kAuto,      // whichever of the other modes is cheapest for the list: see gather_choice.h
  kCopy,      // rows are copied, prefetched, into one buffer and sent from there
  kSendmsg,   // the kernel gathers the rows; what the socket does not take at once is copied out
  kZerocopy,  // the network card gathers the rows; the pin waits for the completion
};

struct Peer {
  std::string address;  // "127.0.0.1:52133"
};

// What TLS has proved about a connection's peer.
struct PeerIdentity {
  bool encrypted = false;
  // Of the client certificate, which was verified: its DNS names and URIs, else its common name.
  std::vector<std::string> certificate_names;
};
// Called once per new peer, before its first byte is read. An error refuses the peer, which then
// receives the error's text.
using Admit = std::function<base::Status(const Peer&)>;

struct Event {
  enum class Kind : uint8_t {
    kOpened,  // this endpoint got a new connection
    kFrames,  // at least one complete frame waits: peek() and consume() it
    // The connection is gone; `reason` says why (OK: the peer closed it, or close() was called).
    kClosed,
    // A posted list has held its Pin longer than Limits::pin_ms: the server should close the
    // connection. With a `reason`, the connection is already closed and the hardware still reads
    // its rows.
    kOverdue,
  };
  Kind kind;
  ConnectionId connection;
  base::Status reason;
};

// Written by one thread, read by any thread.
struct Counters {
  std::atomic<uint64_t> bytes_received{0};
  std::atomic<uint64_t> bytes_sent{0};
  std::atomic<uint64_t> frames_received{0};
  std::atomic<uint64_t> lists_posted{0};
  // Of lists_posted, by the way their rows were sent. A list without rows counts as copied.
  std::atomic<uint64_t> lists_copied{0};
  std::atomic<uint64_t> lists_gathered{0};  // by the kernel
  std::atomic<uint64_t> lists_zerocopy{0};
  std::atomic<uint64_t> zerocopy_sends{0};
  std::atomic<uint64_t> zerocopy_copied{0};   // of zerocopy_sends: the kernel copied after all
  std::atomic<uint64_t> zerocopy_refused{0};  // the kernel had no memory for it: sent without it
  std::atomic<uint64_t> opened{0};
  std::atomic<uint64_t> opened_kernel_tls{0};  // of opened: the kernel encrypts
  std::atomic<uint64_t> closed{0};
  // Of closed: for a broken rule or limit, not because the peer or the server wanted it.
  std::atomic<uint64_t> closed_for_cause{0};
  std::atomic<uint64_t> closed_idle{0};      // after Limits::idle_ms
  std::atomic<uint64_t> closed_for_room{0};  // idle, and a new peer needed its place
  static void add(std::atomic<uint64_t>& counter, uint64_t n) {
    counter.store(counter.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
};

// One worker's share of a transport.
class Endpoint {
 public:
  virtual ~Endpoint() = default;

  // Wait for at most timeout_ms (0: do not wait), receive, send waiting output, run completions,
  // and close connections that broke a limit. The events are valid until the next poll. A
  // connection with frames left unconsumed is reported again, unless it is paused or its output
  // is above Limits::output_pause_bytes.
  virtual std::span<const Event> poll(int timeout_ms) = 0;

  // View the next complete frame, in place and 8-byte aligned (as long as frame lengths are
  // multiples of 8); it is valid until consume() or poll(). Return false if no frame is complete,
  // the connection is closed, or its output is above Limits::output_pause_bytes.
  virtual bool peek(ConnectionId connection, std::span<const std::byte>& frame) = 0;
  // Remove that frame. The connection of a peer that has stopped sending stays open until as many
  // lists were posted to it as frames were consumed.
  virtual void consume(ConnectionId connection) = 0;

  // Queue a list behind the connection's earlier lists. The list is taken or copied out; `list`
  // is left empty but keeps its memory where possible. A list for a connection that is gone is
  // dropped, including its pin.
  virtual void post(ConnectionId connection, gather::GatherList&& list, epoch::Pin&& pin) = 0;
  // Send what was posted. Call it after handling the frames of a connection; lists of one
  // connection share a send.
  virtual void flush() = 0;

  // Stop reading and reporting the connection until resume().
  virtual void pause(ConnectionId connection) = 0;
  virtual void resume(ConnectionId connection) = 0;
  // Mark that something else depends on this connection: it is never closed for being idle.
  virtual void keep(ConnectionId /*connection*/) {}
  // Return whether the peer of a paused connection has left, or sends no more.
  virtual bool has_left(ConnectionId /*connection*/) const { return false; }
  // Send as much of the output as possible, then close; the next poll reports kClosed.
  virtual void close(ConnectionId connection, base::Status reason) = 0;

  // Return the number of posted lists that still hold their Pin or wait for their peer.
  virtual size_t pending_posts() const = 0;
  virtual std::vector<ConnectionId> connections() const = 0;
  virtual std::string peer(ConnectionId connection) const = 0;  // "" if the connection is gone
  // Return what TLS has proved about the peer; nothing over plain connections.
  virtual PeerIdentity identity(ConnectionId /*connection*/) const { return {}; }
  const Counters& counters() const { return counters_; }

  // Interrupt a poll that is waiting. Any thread may call it.
  virtual void wake() = 0;
  // Let polls return when this file is readable too. The caller reads what waits in it, because a
  // poll returns at once until then. Errors: kUnimplemented (only tcp does), kIoError.
  virtual base::Status watch(int /*file*/) {
    return base::Status(base::Code::kUnimplemented, "this transport watches no other files");
  }

 protected:
  Counters counters_;
};

// TLS handshakes that a transport has run.
struct Handshakes {
  uint64_t finished = 0;
  uint64_t failed = 0;   // including those that took too long, and peers that speak no TLS
  uint64_t refused = 0;  // too many at once, of all peers or of one, or no memory
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual size_t endpoints() const = 0;
  virtual Endpoint& endpoint(size_t worker) = 0;
  // Begin to accept peers. Each becomes a connection of the endpoint that has the fewest
  // connections.
  virtual base::Status start() = 0;
  // Accept no more peers. Existing connections stay open.
  virtual void stop_accepting() = 0;
  // Close every connection and drop every Pin: afterwards nothing of this transport reads a row.
  // The caller must have stopped accepting and polling.
  virtual void end() = 0;
  virtual uint16_t port() const = 0;     // 0: none
  virtual uint64_t refused() const = 0;  // peers refused: limit, admission, no file descriptor
  virtual Handshakes handshakes() const { return {}; }
  virtual const char* name() const = 0;  // "tcp"
  // Return how many peers were refused for each reason, in words; any number of refusals has few
  // lines.
  virtual std::vector<std::string> refusals() const { return {}; }
};

}  // namespace petps::transport
