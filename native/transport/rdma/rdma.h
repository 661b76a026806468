// The transport over RDMA (verbs, reliable connections). Requests arrive by SEND. Replies leave
// by RDMA_WRITE that gathers header and rows in place. RDMA.md beside this file is the essay: the
// life of a reply, who owns what, credits, how a connection is closed.
//
// A peer is introduced over a TCP connection: accept() takes what the peer reports about its queue
// pair and returns what the peer must receive. The two connections are a pairing. When the TCP
// connection closes, the peer is gone: call hang_up().
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>

#include "transport/memory_budget.h"
#include "transport/rdma/verbs.h"
#include "transport/transport.h"

namespace petps::transport {

// ---- What both sides of a connection agree on. RDMA.md describes every bit; never renumber.

// Replies begin in the peer's ring at multiples of this; each message takes at least one.
inline constexpr uint32_t kLineBytes = 64;
// The largest SEND: two pulls of 500 keys. A longer request takes several.
inline constexpr uint32_t kMessageBytes = 8192;
// SENDs with content that a peer may send before a credit returns; each is a registered buffer
// here.
inline constexpr uint32_t kCredits = 16;
// SENDs without content, outside the credits. A peer reports what it took at half of its ring and
// at half of its messages, so two of each kind may be in flight, and one for its end.
inline constexpr uint32_t kEmptySends = 5;
// Bounds of what a peer may offer: its ring in bytes, a multiple of kLineBytes, and the number of
// messages in it.
inline constexpr uint32_t kRingBytesMin = 64u << 10;
inline constexpr uint32_t kRingBytesMax = 64u << 20;
inline constexpr uint32_t kRingMessagesMin = 4;
inline constexpr uint32_t kRingMessagesMax = 1024;

// The immediate of a reply's last write, in network order: bytes of the message, credits given
// back, last.
inline constexpr uint32_t kReplyBytesBits = 25;
inline constexpr uint32_t kReplyBytesMax = (1u << kReplyBytesBits) - 1;
inline constexpr uint32_t kReplyCreditsMax = 63;
// In both directions: nothing follows. A SEND's other bits are the lines taken so far, modulo 2^31.
inline constexpr uint32_t kLastMessage = 1u << 31;
inline constexpr uint32_t kTakenMask = kLastMessage - 1;

// What a peer reports about itself, and what it receives.
struct RdmaHello {
  QueuePairAddress pair;
  uint64_t ring_address = 0;
  uint32_t ring_key = 0;
  uint32_t ring_bytes = 0;
  uint32_t ring_messages = 0;  // receive work requests that the peer keeps posted
};
struct RdmaWelcome {
  QueuePairAddress pair;
  uint32_t credits = 0;
  uint32_t message_bytes = 0;
  uint64_t pairing = 0;  // not for the peer: names the connection to hang_up()
};

// ---- The server's side

// Where the rows are. The memory may grow at its end; it never moves or shrinks.
struct RowMemory {
  const std::byte* address = nullptr;
  size_t bytes = 0;
};

struct RdmaOptions {
  size_t endpoints = 1;
  Limits limits;
  std::shared_ptr<MemoryBudget> budget = std::make_shared<MemoryBudget>();
  FrameRules rules;
  Admit admit;  // empty: this transport admits every peer
  // Called at the start, and again when a row lies outside of the memory last returned. Any thread.
  // Empty: every reply is copied.
  std::function<RowMemory()> memory;
};

class RdmaTransport : public Transport {
 public:
  // Make a connection for a peer. Any thread. Errors: kResourceExhausted (connections,
  // completions), kInvalidArgument (the hello), kUnavailable (not accepting, the device), and
  // those of `admit`.
  virtual base::Result<RdmaWelcome> accept(const Peer& peer, const RdmaHello& hello) = 0;
  // Report that the peer of `pairing` is gone. Any thread; an unknown pairing is no error.
  virtual void hang_up(uint64_t pairing) = 0;
  // Return the `pairing` of a connection (RdmaWelcome), or 0 if it is gone. Only the endpoint's
  // thread.
  virtual uint64_t pairing(size_t endpoint, ConnectionId connection) const = 0;
};

// Make the transport and register the memory that exists. `verbs` must outlive the transport.
// Errors: kFailedPrecondition (the device cannot keep the memory registered), kInvalidArgument.
base::Result<std::unique_ptr<RdmaTransport>> make_rdma(Verbs& verbs, const RdmaOptions& options);

}  // namespace petps::transport
