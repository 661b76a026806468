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

// Replies staged before a send. A send wakes the peer and costs about 10 us beside its bytes, so
// small replies share one; and the peer of a large one should start to read while the next is
// gathered.
inline constexpr size_t kStageBytes = size_t{128} << 10;
// A longer reply is staged and sent in parts of this: it bounds the buffer and stays within a
// second-level cache.
inline constexpr size_t kStageBytesMax = size_t{1} << 20;
// A peer that is told why it is closed may read so long; then its socket goes.
inline constexpr uint64_t kLingerMs = 1'000;
// What is thrown away from such a peer before its socket goes earlier.
inline constexpr size_t kLingerBytes = size_t{1} << 20;
// Lists of one connection that zero-copy may hold; more are copied. A slow peer then holds few of
// its worker's pins.
inline constexpr size_t kZerocopyListsPerConnection = 16;
// Of all connections: half of a worker's pins stay for lists that are copied.
inline constexpr size_t kZerocopyListsMax = epoch::kPinsPerReader / 2;
// How long an endpoint that ends waits for the kernel to let go of rows.
inline constexpr uint64_t kSettleMs = 1'000;
inline constexpr int kEpollEvents = 256;
// Connections that are read once more before epoll is asked; and how long that may do without asking
// it: a few short pulls, not one long one, or a client with long pulls would keep the others waiting.
inline constexpr size_t kReceiveTries = 4;
inline constexpr uint64_t kLookEveryNs = 50'000;

// What the acceptor hands over. refusal not OK: tell the peer and close.
struct NewPeer {
  int fd = -1;
  std::string address;
  base::Status refusal;
  bool needs_room = false;  // all places are taken: in that of an idle connection, or it is refused
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

  // Acceptor's thread.
  void adopt(NewPeer peer);
  // Sockets, those that are being closed or refused too; and connections.
  uint32_t assigned() const { return assigned_.load(std::memory_order_relaxed); }
  uint32_t open_count() const { return open_.load(std::memory_order_relaxed); }
  // Of the connection that has been idle longest, when last looked; ~0: none is.
  uint64_t idle_since_ns() const { return idle_since_ns_.load(std::memory_order_relaxed); }
  // Closes that one soon, for a peer to come.
  void ask_for_room();
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }
  // See Transport::end(). Its thread has ended.
  void end();

 private:
  // kSettling: closed and reset; the socket stays until the kernel has said of every zero-copy send
  // that nothing reads its rows (GATHER.md).
  enum class State : uint8_t { kFree, kOpen, kLingering, kSettling };
  struct Connection {
    int fd = -1;
    uint32_t slot = 0;
    uint32_t generation = 1;
    State state = State::kFree;
    bool paused = false;
    bool ended = false;      // the peer sends no more
    bool candidate = false;  // stands in candidates_
    bool broken = false;     // the socket failed or a limit broke: to be closed at once
    bool broken_for_cause = false;
    bool zerocopy = false;   // the socket can
    bool reported = false;   // it settles too long
    bool kept = false;       // idle or not
    uint32_t next_send = 0;  // number of the next zero-copy send
    uint32_t interest = 0;   // epoll mask
    Flights flights;
    int64_t owed = 0;  // frames consumed less lists posted: replies that the peer may still expect
    ReceiveBuffer in;
    std::vector<std::byte> out;  // what the socket did not take; out[out_at, end)
    size_t out_at = 0;
    uint64_t out_since_ns = 0;  // last time it took something
    FrameClock frame_clock;
    IdleClock idle_clock;
    size_t counted = 0;  // of it in the budget
    uint64_t linger_until_ns = 0;
    uint64_t settling_since_ns = 0;
    size_t linger_bytes = 0;
    base::Status broken_reason;
    std::string address;
    size_t output() const { return out.size() - out_at; }
    // The peer waits for us, not we for it.
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
  bool make_room();
  void count_memory(Connection& c);

  void send_staged();
  // Sends as much as the socket takes; false: the connection is broken.
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

  // Tells the peer why, stops reading, closes after a while. The server learns of it at once.
  void fail(Connection& c, base::Status reason);
  void abort_connection(Connection& c, base::Status reason, bool for_cause);
  void start_linger(Connection& c);
  // Closes the socket and frees the slot, once nothing reads rows for it.
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
  std::vector<uint32_t> candidates_;  // may have complete frames
  std::vector<uint32_t> scratch_;
  std::vector<Event> events_;       // of the last poll
  std::vector<Event> next_events_;  // of the next one
  std::array<epoll_event, kEpollEvents> ready_{};
  std::vector<std::byte> stage_;
  size_t staged_ = 0;
  Connection* staged_for_ = nullptr;
  uint64_t looked_ns_ = 0;                  // when epoll was last asked
  size_t with_output_ = 0;                  // connections whose output waits
  size_t in_flight_ = 0;                    // lists of all connections that the kernel reads
  std::vector<gather::GatherList> landed_;  // empty lists whose memory is used again
  uint64_t next_sweep_ns_ = 0;
  uint64_t sweep_ns_ = 0;

  std::vector<std::byte> waste_;  // for replies of connections that are broken

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
