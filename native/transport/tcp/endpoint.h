// One epoll with its connections. Internal to transport/tcp.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/limits.h"
#include "transport/receive_buffer.h"
#include "transport/tcp/flights.h"
#include "transport/tcp/tcp.h"

namespace petps::transport {

// Replies are staged up to this size before a send. A send wakes the peer and costs about 10 us
// beside its bytes, so small replies share one; the peer of a large reply should start to read
// while the next is gathered.
inline constexpr size_t kStageBytes = size_t{128} << 10;
// A longer reply is staged and sent in parts of this size. It bounds the buffer and fits a
// second-level cache.
inline constexpr size_t kStageBytesMax = size_t{1} << 20;
// A peer may read the reason of its closing for this long; then its socket is closed.
inline constexpr uint64_t kLingerMs = 1'000;
// The socket is closed earlier if more than this arrives from such a peer and is discarded.
inline constexpr size_t kLingerBytes = size_t{1} << 20;
// Zero-copy may hold this many lists of one connection; further lists are copied. So a slow peer
// holds few of its worker's pins.
inline constexpr size_t kZerocopyListsPerConnection = 16;
// The same for all connections together: half of a worker's pins stay for lists that are copied.
inline constexpr size_t kZerocopyListsMax = epoch::kPinsPerReader / 2;
// How long end() waits for the kernel to release rows.
inline constexpr uint64_t kSettleMs = 1'000;
inline constexpr int kEpollEvents = 256;
// Before it polls epoll, the endpoint reads at most this many connections again, and it may skip
// epoll for at most kLookEveryNs. That is a few short pulls but not one long pull; otherwise a
// client with long pulls would delay the others.
inline constexpr size_t kReceiveTries = 4;
inline constexpr uint64_t kLookEveryNs = 50'000;

// A peer that the acceptor hands over. If `refusal` is an error, send it to the peer and close.
struct NewPeer {
  int fd = -1;
  std::string address;
  base::Status refusal;
  // All places are taken: close an idle connection to make room, or refuse the peer.
  bool needs_room = false;
};

class TcpEndpoint final : public Endpoint {
 public:
  explicit TcpEndpoint(const TcpOptions& options);
  ~TcpEndpoint() override;
  base::Status open();

  std::span<const Event> poll(int timeout_ms) override;
  bool peek(ConnectionId connection, std::span<const std::byte>& frame) override;
  void consume(ConnectionId connection) override;
  void post(ConnectionId connection, gather::GatherList&& list, epoch::Pin&& pin) override;
  void flush() override;
  void pause(ConnectionId connection) override;
  void resume(ConnectionId connection) override;
  void keep(ConnectionId connection) override;
  void close(ConnectionId connection, base::Status reason) override;
  size_t pending_posts() const override { return with_output_ + in_flight_; }
  std::vector<ConnectionId> connections() const override;
  std::string peer(ConnectionId connection) const override;
  void wake() override;

  // Called by the acceptor's thread.
  void adopt(NewPeer peer);
  // assigned() counts sockets, including those being closed or refused; open_count() counts
  // connections.
  uint32_t assigned() const { return assigned_.load(std::memory_order_relaxed); }
  uint32_t open_count() const { return open_.load(std::memory_order_relaxed); }
  // Start of the longest idleness of a connection, as of the last sweep; ~0: none is idle.
  uint64_t idle_since_ns() const { return idle_since_ns_.load(std::memory_order_relaxed); }
  // Close that connection soon, so that a new peer finds a place.
  void ask_for_room();
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }
  // See Transport::end(). Call it when the endpoint's thread has stopped polling.
  void end();

 private:
  // kSettling: closed and reset. The socket stays until the kernel has reported for every
  // zero-copy send that nothing reads its rows (GATHER.md).
  enum class State : uint8_t { kFree, kOpen, kLingering, kSettling };
  struct Connection {
    int fd = -1;
    uint32_t slot = 0;
    uint32_t generation = 1;
    State state = State::kFree;
    bool paused = false;
    bool ended = false;      // the peer sends no more
    bool candidate = false;  // its slot is in candidates_
    bool broken = false;     // the socket failed or broke a limit: close it at once
    bool broken_for_cause = false;
    bool zerocopy = false;   // the socket supports zero-copy
    bool reported = false;   // reported for settling too long
    bool kept = false;       // keep(): never closed for being idle
    uint32_t next_send = 0;  // number of the next zero-copy send
    uint32_t interest = 0;   // epoll mask
    Flights flights;
    int64_t owed = 0;  // frames consumed minus lists posted: replies that the peer may still expect
    ReceiveBuffer in;
    std::vector<std::byte> out;  // what the socket did not take; out[out_at, end)
    size_t out_at = 0;
    uint64_t out_since_ns = 0;  // when the socket last took some of it
    FrameClock frame_clock;
    IdleClock idle_clock;
    size_t counted = 0;  // bytes of this connection in the memory budget
    uint64_t linger_until_ns = 0;
    uint64_t settling_since_ns = 0;
    size_t linger_bytes = 0;
    base::Status broken_reason;
    std::string address;
    size_t output() const { return out.size() - out_at; }
    // The peer waits for the server, not the server for the peer.
    bool is_awaited() const {
      return kept || paused || owed > 0 || output() > 0 || !flights.empty();
    }
  };

  ConnectionId id_of(const Connection& c) const { return uint64_t{c.generation} << 32 | c.slot; }
  Connection* find(ConnectionId id) const;
  bool may_read(const Connection& c) const;
  void add_candidate(Connection& c);
  void set_interest(Connection& c);

  void adopt_new();
  bool review_candidates();
  bool has_frame(Connection& c);
  bool may_end(const Connection& c) const;
  void report_candidates();
  void handle(Connection& c, uint32_t events);
  void receive(Connection& c);
  void discard(Connection& c);
  void sweep(uint64_t now);
  void sweep_connection(Connection& c, uint64_t now);
  enum class Limit : uint8_t { kNone, kStall, kIdle, kFrame };
  Limit broken_limit(Connection& c, uint64_t now);
  bool is_idle(Connection& c, uint64_t now, uint64_t ms);
  void catch_up(Connection& c);
  bool make_room();
  void count_memory(Connection& c);

  void send_staged();
  // Send as much as the socket takes. Return false if the connection is broken.
  bool send_some(Connection& c, const std::byte* bytes, size_t n, size_t& sent);
  void send_whole(Connection& c, std::span<const std::byte> bytes);
  void stage_list(Connection& c, const gather::GatherList& list);
  GatherMode mode_of(Connection& c, const gather::GatherList& list);
  void send_list(Connection& c, gather::GatherList& list, epoch::Pin& pin, bool zerocopy);
  void take_flight(Connection& c, gather::GatherList& list, epoch::Pin& pin, uint32_t first);
  void collect_completions(Connection& c);
  void send_output(Connection& c);
  void keep_output(Connection& c, const std::byte* bytes, size_t n);
  std::byte* grow_output(Connection& c, size_t n);
  void break_connection(Connection& c, base::Status reason, bool for_cause = false);

  // Send the reason to the peer, stop reading, close after a while. The server gets kClosed at
  // once.
  void fail(Connection& c, base::Status reason);
  void abort_connection(Connection& c, base::Status reason, bool for_cause);
  void start_linger(Connection& c);
  // Close the socket and free the slot, once nothing reads rows for it.
  void destroy(Connection& c);
  void settle(Connection& c);
  void settle_all();
  void check_flights(Connection& c, uint64_t now);
  void finish(Connection& c, base::Status reason, bool for_cause);  // kClosed event

  const TcpOptions options_;
  int epoll_ = -1;
  int wake_ = -1;
  std::vector<std::unique_ptr<Connection>> slots_;
  std::vector<uint32_t> free_slots_;
  std::vector<uint32_t> candidates_;  // slots that may have complete frames
  std::vector<uint32_t> scratch_;
  std::vector<Event> events_;       // of the last poll
  std::vector<Event> next_events_;  // of the next one
  std::array<epoll_event, kEpollEvents> ready_{};
  std::vector<std::byte> stage_;
  size_t staged_ = 0;
  Connection* staged_for_ = nullptr;
  uint64_t looked_ns_ = 0;                  // when epoll was last polled
  size_t with_output_ = 0;                  // connections with waiting output
  size_t in_flight_ = 0;                    // lists of all connections that the kernel reads
  std::vector<gather::GatherList> landed_;  // empty lists whose memory is reused
  uint64_t next_sweep_ns_ = 0;
  uint64_t sweep_ns_ = 0;

  std::vector<std::byte> waste_;  // receives the replies of broken connections

  std::atomic<uint32_t> assigned_{0};
  std::atomic<uint32_t> open_{0};
  std::atomic<uint64_t> idle_since_ns_{~uint64_t{0}};
  std::atomic<uint64_t> refused_{0};
  std::atomic<bool> wants_room_{false};
  std::atomic<bool> has_new_{false};
  std::mutex mutex_;  // guards new_
  std::vector<NewPeer> new_;
};

}  // namespace petps::transport
