// What rdma uses of an RDMA device, and nothing else: the seam between the transport and libibverbs.
//
// Owns:        the handles. Every object here gives its device resource back when it goes.
// Never does:  decide anything; a limit is asked of the device and told, never assumed.
// Called by:   transport/rdma. open_verbs() is the real device; tests/contract has one in memory.
// Invariants:  when a QueuePair is gone, the device neither reads nor writes for it any more; objects go
//              before what they were made of (queue pair, completion queue, channel, Verbs).
// Threads:     a Verbs and what makes objects: any thread. A queue: one thread at a time.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"

namespace petps::transport {

// What a device says of itself and of the port that is used.
struct VerbsDevice {
  std::string name;
  uint32_t sge_max = 1;             // pieces of one work request
  uint32_t work_requests_max = 16;  // of one queue
  uint32_t completions_max = 16;    // of one completion queue
  uint64_t region_bytes_max = 0;    // of one registration
  uint16_t lid = 0;                 // 0 on Ethernet
  uint8_t mtu = IBV_MTU_1024;       // ibv_mtu that is active
  uint8_t gid_index = 0;
  bool ethernet = false;  // peers are reached by gid
  std::array<uint8_t, 16> gid{};
};

struct MemoryRegion {
  virtual ~MemoryRegion() = default;  // the device has no access any more
  uint32_t local_key = 0;
  uint32_t remote_key = 0;
};

struct CompletionChannel {
  virtual ~CompletionChannel() = default;
  int file = -1;             // readable when an armed queue has something
  virtual void drain() = 0;  // takes the events, so that the file is not readable any more
};

struct CompletionQueue {
  virtual ~CompletionQueue() = default;
  virtual int poll(std::span<ibv_wc> out) = 0;  // how many; negative: the queue is lost
  virtual int arm() = 0;                        // errno; the next completion makes one event
};

struct QueuePair {
  virtual ~QueuePair() = default;
  uint32_t number = 0;
  ibv_qp_cap cap{};  // what the device granted
  // errno, as in libibverbs.
  virtual int modify(ibv_qp_attr& attributes, int mask) = 0;
  virtual int post_send(ibv_send_wr* chain) = 0;
  virtual int post_receive(ibv_recv_wr* chain) = 0;
};

class Verbs {
 public:
  virtual ~Verbs() = default;
  const VerbsDevice& device() const { return device_; }
  // access: IBV_ACCESS_...; 0 lets the device read on our side only.
  // Errors: kFailedPrecondition (memory that no device may keep, such as an fsdax file), kResourceExhausted.
  virtual base::Result<std::unique_ptr<MemoryRegion>> register_memory(const void* address,
                                                                      size_t bytes, int access) = 0;
  virtual base::Result<std::unique_ptr<CompletionChannel>> make_channel() = 0;
  virtual base::Result<std::unique_ptr<CompletionQueue>> make_queue(uint32_t completions,
                                                                    CompletionChannel& channel) = 0;
  // A reliable connection. `wanted.max_inline_data` is lowered to what the device can do; the rest is
  // granted or refused.
  virtual base::Result<std::unique_ptr<QueuePair>> make_pair(const ibv_qp_cap& wanted,
                                                             CompletionQueue& queue) = 0;

 protected:
  VerbsDevice device_;
};

// Opens a device through libibverbs: the one called `device`, or the first with an active port.
// Errors: kFailedPrecondition (no device, no such device, no active port; names the remedy).
base::Result<std::unique_ptr<Verbs>> open_verbs(const std::string& device);

// How a peer's queue pair is reached; travels through the TCP port.
struct QueuePairAddress {
  uint32_t number = 0;
  uint32_t packet_number = 0;  // 24 bits: where its sends begin
  uint16_t lid = 0;
  uint8_t mtu = IBV_MTU_256;
  std::array<uint8_t, 16> gid{};
};

QueuePairAddress address_of(const VerbsDevice& device, const QueuePair& pair);
// Makes both ends one connection, ready to send. `writable`: the peer may write to our memory.
// Errors: kInvalidArgument (no address of a queue pair), kUnavailable (the device refused).
base::Status connect_pair(QueuePair& pair, const VerbsDevice& device, const QueuePairAddress& own,
                          const QueuePairAddress& peer, bool writable);

}  // namespace petps::transport
