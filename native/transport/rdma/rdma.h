// transport over RDMA (verbs, reliable connections): requests come by SEND, replies leave by RDMA_WRITE
// that gathers header and rows where they lie. RDMA.md beside this file is the essay: the life of a
// reply, who owns what, credits, how a connection ends.
//
// A peer is introduced through a door of its own (the TCP port): accept() is handed what the peer said of
// its queue pair and gives what it must be told. The line it came by tells of its death: hang_up().
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>

#include "transport/memory_budget.h"
#include "transport/rdma/verbs.h"
#include "transport/transport.h"

namespace petps::transport {

// ---- What both sides of a connection agree on. RDMA.md gives every bit; never renumber.

// Replies lie in the peer's ring at multiples of this, each message at least one.
inline constexpr uint32_t kLineBytes = 64;
// One SEND at most: two pulls of 500 keys. A longer request takes several.
inline constexpr uint32_t kMessageBytes = 8192;
// SENDs with content that a peer may have unanswered by a credit; each is a registered buffer here.
inline constexpr uint32_t kCredits = 16;
// SENDs without content, outside the credits: a peer tells what it took at half of its ring and at half of
// its messages, so two of each kind may be under way, and its end.
inline constexpr uint32_t kEmptySends = 5;
// Bounds of what a peer may offer: its ring in bytes, a multiple of kLineBytes, and messages that may lie
// in it.
inline constexpr uint32_t kRingBytesMin = 64u << 10;
inline constexpr uint32_t kRingBytesMax = 64u << 20;
inline constexpr uint32_t kRingMessagesMin = 4;
inline constexpr uint32_t kRingMessagesMax = 1024;

// Immediate of a reply's last write, in network order: bytes of the message, credits given back, last.
inline constexpr uint32_t kReplyBytesBits = 25;
inline constexpr uint32_t kReplyBytesMax = (1u << kReplyBytesBits) - 1;
inline constexpr uint32_t kReplyCreditsMax = 63;
// Of both directions: nothing follows. A SEND's other bits are the lines taken so far, modulo 2^31.
inline constexpr uint32_t kLastMessage = 1u << 31;
inline constexpr uint32_t kTakenMask = kLastMessage - 1;

// What a peer says of itself, and what it is told.
struct RdmaHello {
  QueuePairAddress pair;
  uint64_t ring_address = 0;
  uint32_t ring_key = 0;
  uint32_t ring_bytes = 0;
  uint32_t ring_messages = 0;  // receive work requests that it keeps posted
};
struct RdmaWelcome {
  QueuePairAddress pair;
  uint32_t credits = 0;
  uint32_t message_bytes = 0;
  uint64_t line = 0;  // not for the peer: names the connection to hang_up()
};

// ---- The server's side

// Where rows lie. It may grow at its end, never move or shrink.
struct RowMemory {
  const std::byte* address = nullptr;
  size_t bytes = 0;
};

struct RdmaOptions {
  size_t endpoints = 1;
  Limits limits;
  std::shared_ptr<MemoryBudget> budget = std::make_shared<MemoryBudget>();
  FrameRules rules;
  Admit admit;  // empty: everyone, as far as this transport is concerned
  // Asked at the start, and again when a row lies outside of what was told before. Any thread. Empty:
  // every reply is copied.
  std::function<RowMemory()> memory;
};

class RdmaTransport : public Transport {
 public:
  // Any thread. Errors: kResourceExhausted (connections, completions), kInvalidArgument (the hello),
  // kUnavailable (not accepting, the device), what admission said.
  virtual base::Result<RdmaWelcome> accept(const Peer& peer, const RdmaHello& hello) = 0;
  // The peer of that line is gone. Any thread; an unknown line is no error.
  virtual void hang_up(uint64_t line) = 0;
  // By which line a connection came; 0: it is gone. Only the endpoint's thread.
  virtual uint64_t line(size_t endpoint, ConnectionId connection) const = 0;
};

// `verbs` outlives the transport. Registers the memory that is there at once.
// Errors: kFailedPrecondition (memory that the device cannot keep), kInvalidArgument.
base::Result<std::unique_ptr<RdmaTransport>> make_rdma(Verbs& verbs, const RdmaOptions& options);

}  // namespace petps::transport
