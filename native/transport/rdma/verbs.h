// The part of an RDMA device that rdma uses: the interface between the transport and libibverbs.
//
// Owns:        the handles. Every object releases its device resource in its destructor.
// Never does:  decide anything; limits are queried from the device and reported, never assumed.
// Called by:   transport/rdma. open_verbs() opens a real device; tests/contract has one in memory.
// Invariants:  after the destructor of a QueuePair, the device neither reads nor writes for it; an
//              object is destroyed before the objects that it was made from (queue pair, completion
//              queue, channel, Verbs).
// Threads:     a Verbs and its make_... functions: any thread. A queue: one thread at a time.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"

namespace petps::transport {

// What a device reports about itself and about the port that is used.
struct VerbsDevice {
  std::string name;
  uint32_t sge_max = 1;             // pieces of one work request
  uint32_t work_requests_max = 16;  // of one queue
  uint32_t completions_max = 16;    // of one completion queue
  uint64_t region_bytes_max = 0;    // of one registration
  uint16_t lid = 0;                 // 0 on Ethernet
  uint8_t mtu = IBV_MTU_1024;       // the active ibv_mtu
  uint8_t gid_index = 0;
  bool ethernet = false;  // peers are addressed by gid
  std::array<uint8_t, 16> gid{};
};

struct MemoryRegion {
  virtual ~MemoryRegion() = default;  // afterwards the device has no access
  uint32_t local_key = 0;
  uint32_t remote_key = 0;
};

struct CompletionChannel {
  virtual ~CompletionChannel() = default;
  int file = -1;  // readable when an armed queue has a completion
  // Take the events, so that the file is no longer readable.
  virtual void drain() = 0;
};

struct CompletionQueue {
  virtual ~CompletionQueue() = default;
  // Return the number of completions moved to `out`. A negative number: the queue is lost.
  virtual int poll(std::span<ibv_wc> out) = 0;
  // Let the next completion raise one event. Return an errno.
  virtual int arm() = 0;
};

struct QueuePair {
  virtual ~QueuePair() = default;
  uint32_t number = 0;
  ibv_qp_cap cap{};  // what the device granted
  // Return an errno, as libibverbs does.
  virtual int modify(ibv_qp_attr& attributes, int mask) = 0;
  virtual int post_send(ibv_send_wr* chain) = 0;
  virtual int post_receive(ibv_recv_wr* chain) = 0;
};

class Verbs {
 public:
  virtual ~Verbs() = default;
  const VerbsDevice& device() const { return device_; }
  // Register memory. `access` is IBV_ACCESS_...; 0 lets only the local device read.
  // Errors: kFailedPrecondition (memory that no device may keep, such as an fsdax file),
  // kResourceExhausted.
  virtual base::Result<std::unique_ptr<MemoryRegion>> register_memory(const void* address,
                                                                      size_t bytes, int access) = 0;
  virtual base::Result<std::unique_ptr<CompletionChannel>> make_channel() = 0;
  virtual base::Result<std::unique_ptr<CompletionQueue>> make_queue(uint32_t completions,
                                                                    CompletionChannel& channel) = 0;
  // Make a queue pair for a reliable connection. `wanted.max_inline_data` is lowered to what the
  // device can do; the other values are granted or refused.
  virtual base::Result<std::unique_ptr<QueuePair>> make_pair(const ibv_qp_cap& wanted,
                                                             CompletionQueue& queue) = 0;

 protected:
  VerbsDevice device_;
};

// Load libibverbs, once. Errors: kFailedPrecondition (it cannot be loaded; the text names the
// remedy).
base::Status load_verbs_library();

// Open a device through libibverbs: the one called `device`, or the first with an active port.
// Errors: kFailedPrecondition (no library, no device, no such device, no active port; the text
// names the remedy).
base::Result<std::unique_ptr<Verbs>> open_verbs(const std::string& device);

// How to reach a peer's queue pair; travels through the TCP port.
struct QueuePairAddress {
  uint32_t number = 0;
  uint32_t packet_number = 0;  // 24 bits: number of its first send
  uint16_t lid = 0;
  uint8_t mtu = IBV_MTU_256;
  std::array<uint8_t, 16> gid{};
};

QueuePairAddress address_of(const VerbsDevice& device, const QueuePair& pair);
// Connect `pair` to the peer's and make it ready to send. `is_writable`: the peer may write to our
// memory.
// Errors: kInvalidArgument (no address of a queue pair), kUnavailable (the device refused).
base::Status connect_pair(QueuePair& pair, const VerbsDevice& device, const QueuePairAddress& own,
                          const QueuePairAddress& peer, bool is_writable);

}  // namespace petps::transport
