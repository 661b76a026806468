// One worker's share of the rdma transport. Internal to transport/rdma.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/rdma/chain.h"
#include "transport/rdma/rdma.h"
#include "transport/rdma/regions.h"
#include "transport/rdma/stage.h"
#include "transport/stream.h"

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

struct RdmaConnection final : StreamConnection {
  size_t lists_in_flight() const override { return sent.size(); }
  bool take_overdue(uint64_t since_ns) override;
  uint64_t room_bytes() const {
    if (untaken.size() >= ring_messages) return 0;
    return ring.bytes - (written_lines - taken_lines) * kLineBytes;
  }

  // Members that hold the device's memory come before its queue pair, so that they are destroyed
  // after it.
  std::unique_ptr<std::byte[]> receive_memory;
  std::unique_ptr<MemoryRegion> receive_region;
  std::deque<RdmaSent> sent;  // in order of posting, which is the order of completion
  std::unique_ptr<QueuePair> pair;
  RdmaQueue* queue = nullptr;
  uint64_t pairing = 0;  // names the connection in work request ids and to hang_up(); never reused

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
  uint32_t requests_in_flight = 0;
  bool last_sent = false;
};

class RdmaEndpoint final : public StreamEndpoint {
 public:
  RdmaEndpoint(Verbs& verbs, const RdmaOptions& options, Regions& regions);
  ~RdmaEndpoint() override;
  base::Status open();

  std::span<const Event> poll(int timeout_ms) override;
  bool peek(ConnectionId connection, std::span<const std::byte>& frame) override;
  void post(ConnectionId connection, gather::GatherList&& list, epoch::Pin&& pin) override;
  void flush() override {}  // post() sends each list at once

  // Make the queue pair and connect it to the peer; poll() then reports kOpened. Any thread.
  base::Result<RdmaWelcome> accept(const Peer& peer, const RdmaHello& hello, uint64_t pairing);
  void hang_up(uint64_t pairing);
  uint64_t pairing(ConnectionId connection) const;
  void end();

 private:
  using Connection = RdmaConnection;

  static Connection& rdma(StreamConnection& c) { return static_cast<Connection&>(c); }

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
  void receive_waiting(StreamConnection& c) override;
  int post_buffer(Connection& c, uint16_t buffer);
  void repost_buffer(Connection& c, uint16_t buffer);
  void review_candidates();
  void wait(uint64_t until_ns);

  // Send side: send.cc.
  bool send_list(Connection& c, const gather::GatherList& list, epoch::Pin& pin);
  bool chain_list(Connection& c, const gather::GatherList& list, RdmaSent& sent);
  bool chain_piece(const std::byte* address, size_t bytes, RdmaSent& sent);
  bool chain_copied(const std::byte* bytes, size_t n, RdmaSent& sent);
  bool chain_copy(Connection& c, const gather::GatherList& list, RdmaSent& sent);
  bool chain_output(Connection& c, size_t most, RdmaSent& sent, size_t& n);
  void post_message(Connection& c, size_t bytes, bool last, unsigned flags, RdmaSent sent);
  void post_empty_message(Connection& c, bool last);
  void send_output(StreamConnection& c) override;
  void send_credits(Connection& c);
  // Return whether the peer and the device take a message without content.
  bool has_room(const Connection& c) const {
    return c.room_bytes() > 0 && c.requests_in_flight < send_requests_;
  }

  void destroy(StreamConnection& c) override;

  Verbs& verbs_;
  Regions& regions_;
  const uint32_t send_requests_;
  const uint32_t pieces_max_;
  Stage stage_;
  Chain chain_;
  size_t stage_used_ = 0;  // bytes used in the current block of the message that is being chained
  bool in_place_ = false;  // the device reads rows of that message in place
  bool woken_ = false;
  std::unique_ptr<CompletionChannel> channel_;
  std::array<ibv_wc, kCompletionsAtOnce> completions_{};
  std::array<std::byte, kInlineBytes> inline_{};
  std::unordered_map<uint64_t, Connection*> by_pairing_;
  std::vector<RdmaQueue*> polled_;

  std::atomic<bool> has_new_{false};
  std::mutex mutex_;  // guards the members below, and each queue's room
  std::vector<std::unique_ptr<RdmaQueue>> queues_;
  std::vector<std::unique_ptr<Connection>> new_;
  std::vector<uint64_t> gone_;
};

}  // namespace petps::transport
