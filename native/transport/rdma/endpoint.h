// One worker's share of the rdma transport. Internal to transport/rdma.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/limits.h"
#include "transport/rdma/chain.h"
#include "transport/rdma/rdma.h"
#include "transport/rdma/regions.h"
#include "transport/rdma/stage.h"
#include "transport/receive_buffer.h"

namespace petps::transport {

// Send work requests of a connection, if the device allows that: 15 replies of 500 rows at 30
// pieces each. Longer chains are copied and then take one request per 16 KiB x pieces.
inline constexpr uint32_t kSendRequests = 256;
// The most pieces of a work request used, even if the device allows more: a queue's memory grows
// with them.
inline constexpr uint32_t kPiecesMax = 32;
// Requested from the device for small replies, whose pin then need not wait for a completion.
inline constexpr uint32_t kInlineBytes = 256;
inline constexpr uint32_t kReceiveRequests = kCredits + kEmptySends;
// Connections of one completion queue, if the device allows that many completions; the next
// connection gets another queue.
inline constexpr uint32_t kPairsPerQueue = 32;
inline constexpr size_t kCompletionsAtOnce = 64;
// The most bytes in one message of copied output: the peer should read these while the next follow.
inline constexpr size_t kPartBytes = size_t{1} << 20;
// The low bits of a work request id are a receive buffer's number, or this value.
inline constexpr uint16_t kSendId = 0xffff;
static_assert(kReceiveRequests < kSendId, "a buffer's number must not look like a send");
// A peer that receives the reason of its closing may take this long to read it.
inline constexpr uint64_t kRdmaLingerMs = 1'000;

struct RdmaQueue {
  std::unique_ptr<CompletionQueue> queue;
  uint32_t room = 0;  // further connections that it can hold; guarded by the endpoint's mutex
};

// A message that the device works on. The device has finished with its memory when the message
// completes, or when the queue pair is gone.
struct RdmaSent {
  epoch::Pin pin;
  uint32_t requests = 0;
  uint32_t block = kNoBlock;
  bool reported = false;  // as overdue
  uint64_t posted_ns = 0;
};

struct RdmaConnection {
  enum class State : uint8_t { kOpen, kLingering };
  // Members that hold the device's memory come before its queue pair, so that they are destroyed
  // after it.
  std::unique_ptr<std::byte[]> receive_memory;
  std::unique_ptr<MemoryRegion> receive_region;
  std::deque<RdmaSent> sent;  // in order of posting, which is the order of completion
  std::unique_ptr<QueuePair> pair;
  RdmaQueue* queue = nullptr;
  uint64_t pairing = 0;  // names the connection in work request ids and to hang_up(); never reused
  uint32_t slot = 0;
  uint32_t generation = 0;
  State state = State::kOpen;
  std::string address;

  Ring ring;
  uint32_t ring_messages = 0;
  uint64_t written_lines = 0;
  uint64_t taken_lines = 0;
  std::deque<uint64_t> untaken;  // the end, in lines, of each message that the peer has not taken

  struct Received {
    uint16_t buffer;
    uint32_t begin;
    uint32_t end;
  };
  std::deque<Received> received;  // not yet in `in`
  uint32_t credits_owed = 0;      // buffers that the peer may use again but does not know of yet
  ReceiveBuffer in;
  bool ended = false;  // the peer sends no more

  uint32_t requests_in_flight = 0;
  std::vector<std::byte> out;  // out[out_at, end) waits for room in the ring or for the device
  size_t out_at = 0;
  uint64_t out_since_ns = 0;
  bool last_sent = false;

  bool paused = false;
  bool candidate = false;
  bool broken = false;
  bool broken_for_cause = false;
  base::Status broken_reason;
  int64_t owed = 0;  // frames consumed minus lists posted
  FrameClock frame_clock;
  IdleClock idle_clock;
  size_t counted = 0;  // bytes of this connection in the memory budget
  uint64_t linger_until_ns = 0;

  size_t output() const { return out.size() - out_at; }
  // The peer waits for the server, not the server for the peer.
  bool is_awaited() const {
    return paused || owed > 0 || output() > 0 || !sent.empty() || !received.empty();
  }
  uint64_t room_bytes() const {
    if (untaken.size() >= ring_messages) return 0;
    return ring.bytes - (written_lines - taken_lines) * kLineBytes;
  }
};

class RdmaEndpoint final : public Endpoint {
 public:
  RdmaEndpoint(Verbs& verbs, const RdmaOptions& options, Regions& regions);
  ~RdmaEndpoint() override;
  base::Status open();

  std::span<const Event> poll(int timeout_ms) override;
  bool peek(ConnectionId connection, std::span<const std::byte>& frame) override;
  void consume(ConnectionId connection) override;
  void post(ConnectionId connection, gather::GatherList&& list, epoch::Pin&& pin) override;
  void flush() override;
  void pause(ConnectionId connection) override;
  void resume(ConnectionId connection) override;
  void close(ConnectionId connection, base::Status reason) override;
  size_t pending_posts() const override;
  std::vector<ConnectionId> connections() const override;
  std::string peer(ConnectionId connection) const override;
  void wake() override;

  // Make the queue pair and connect it to the peer; poll() then reports kOpened. Any thread.
  base::Result<RdmaWelcome> accept(const Peer& peer, const RdmaHello& hello, uint64_t pairing);
  void hang_up(uint64_t pairing);
  uint64_t pairing(ConnectionId connection) const;
  void end();
  uint32_t assigned() const { return assigned_.load(std::memory_order_relaxed); }

 private:
  using Connection = RdmaConnection;

  ConnectionId id_of(const Connection& c) const { return uint64_t{c.generation} << 32 | c.slot; }
  Connection* find(ConnectionId id) const;
  bool may_read(const Connection& c) const;
  void add_candidate(Connection& c);

  // Set-up: accept.cc.
  base::Status prepare(Connection& c);
  base::Result<RdmaQueue*> queue_with_room();
  void give_up(Connection& c);
  void adopt_new();
  uint32_t completions_of_pair() const { return send_requests_ + kReceiveRequests; }

  // Receive side: endpoint.cc.
  bool run_completions();
  void complete(const ibv_wc& completion);
  void receive(Connection& c, uint16_t buffer, const ibv_wc& completion);
  void take(Connection& c, uint32_t lines);
  void take_input(Connection& c);
  int post_buffer(Connection& c, uint16_t buffer);
  void review_candidates();
  void report(Connection& c);
  bool may_end(const Connection& c) const;
  void wait(uint64_t until_ns);

  // Send side: send.cc.
  bool send_list(Connection& c, const gather::GatherList& list, epoch::Pin& pin);
  bool chain_list(Connection& c, const gather::GatherList& list, RdmaSent& sent);
  bool chain_piece(const std::byte* address, size_t bytes, RdmaSent& sent);
  bool chain_copied(const std::byte* bytes, size_t n, RdmaSent& sent);
  bool chain_copy(Connection& c, const gather::GatherList& list, RdmaSent& sent);
  bool chain_output(Connection& c, size_t most, RdmaSent& sent, size_t& n);
  void post_message(Connection& c, size_t bytes, bool last, unsigned flags, RdmaSent sent);
  void send_output(Connection& c);
  void send_credits(Connection& c);
  std::byte* grow_output(Connection& c, size_t n);
  void count_memory(Connection& c);

  // Closing: close.cc.
  void sweep(uint64_t now);
  void sweep_connection(Connection& c, uint64_t now);
  void break_connection(Connection& c, base::Status reason, bool for_cause = false);
  void fail(Connection& c, base::Status reason);
  void abort_connection(Connection& c, base::Status reason, bool for_cause);
  void finish(Connection& c, base::Status reason, bool for_cause);
  void start_linger(Connection& c);
  void destroy(Connection& c);

  Verbs& verbs_;
  const RdmaOptions& options_;
  Regions& regions_;
  const uint32_t send_requests_;
  const uint32_t pieces_max_;
  Stage stage_;
  Chain chain_;
  size_t stage_used_ = 0;  // bytes used in the current block of the message that is being chained
  bool in_place_ = false;  // the device reads rows of that message in place
  int wake_ = -1;
  bool woken_ = false;
  std::unique_ptr<CompletionChannel> channel_;
  std::array<ibv_wc, kCompletionsAtOnce> completions_{};
  std::array<std::byte, kInlineBytes> inline_{};

  std::vector<std::unique_ptr<Connection>> slots_;  // null: free
  std::vector<uint32_t> generations_;
  std::vector<uint32_t> free_slots_;
  std::unordered_map<uint64_t, Connection*> by_pairing_;
  std::vector<uint32_t> candidates_;
  std::vector<uint32_t> scratch_;
  std::vector<Event> events_;
  std::vector<Event> next_events_;
  std::vector<RdmaQueue*> polled_;
  std::vector<std::byte> waste_;  // receives the replies of broken connections
  uint64_t next_sweep_ns_ = 0;
  uint64_t sweep_ns_ = 0;

  std::atomic<uint32_t> assigned_{0};
  std::atomic<bool> has_new_{false};
  std::mutex mutex_;  // guards the members below, and each queue's room
  std::vector<std::unique_ptr<RdmaQueue>> queues_;
  std::vector<std::unique_ptr<Connection>> new_;
  std::vector<uint64_t> gone_;
};

}  // namespace petps::transport
