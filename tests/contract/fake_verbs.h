// RDMA devices in memory. Two devices on one fabric move bytes between their queue pairs, enforce
// the rules of verbs that a program can break, and fail where a test requests it.
//
// Enforced: limits are refused as a device does (pieces, inline bytes, work requests until a
// later signaled completion is read), keys cover the memory they are used for, a write needs the
// peer's permission, a SEND or a write with immediate needs a receive, work requests of a queue
// pair complete in order, only signaled or failed ones complete, everything flushes after an
// error, an armed queue raises one event.
// Not modelled: packets, timing, loss.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>

#include "transport/rdma/verbs.h"

namespace petps::transport {

struct FakePair;
struct FakeQueue;

struct FakeLimits {
  uint32_t sge_max = 30;
  uint32_t inline_max = 256;
  uint32_t work_requests_max = 4096;
  uint32_t completions_max = 1u << 16;
};

// When a device executes its work requests.
enum class Work : uint8_t { kAtOnce, kHeld, kShuffled };  // as loopback's Completions

class FakeFabric {
 public:
  // Number of messages that found no receive. The credits keep it at 0.
  uint64_t not_ready() const { return not_ready_; }
  // Completions that found their queue full. Must stay 0.
  uint64_t overflows() const { return overflows_; }
  uint64_t writes() const { return writes_; }        // RDMA writes that were executed
  uint64_t doorbells() const { return doorbells_; }  // posts of sends

 private:
  friend class FakeVerbs;
  friend struct FakePair;
  friend struct FakeQueue;
  friend struct FakeRegion;
  struct Registered {
    const std::byte* begin;
    size_t bytes;
    int access;
    const void* device;
  };
  FakePair* pair(uint32_t number) const;  // null: it was destroyed
  std::mutex mutex_;                      // guards everything, so this device is slow
  std::map<uint32_t, FakePair*> pairs_;
  std::map<uint32_t, Registered> regions_;
  uint32_t next_pair_ = 1;
  uint32_t next_key_ = 0x1000;
  std::atomic<uint64_t> not_ready_{0};
  std::atomic<uint64_t> overflows_{0};
  std::atomic<uint64_t> writes_{0};
  std::atomic<uint64_t> doorbells_{0};
};

class FakeVerbs final : public Verbs {
 public:
  FakeVerbs(FakeFabric& fabric, const FakeLimits& limits);

  base::Result<std::unique_ptr<MemoryRegion>> register_memory(const void* address, size_t bytes,
                                                              int access) override;
  base::Result<std::unique_ptr<CompletionChannel>> make_channel() override;
  base::Result<std::unique_ptr<CompletionQueue>> make_queue(uint32_t completions,
                                                            CompletionChannel& channel) override;
  base::Result<std::unique_ptr<QueuePair>> make_pair(const ibv_qp_cap& wanted,
                                                     CompletionQueue& queue) override;

  // Control by the test, from any thread. Pairs of this device are numbered in the order of their
  // creation, from 0.
  void set_work(Work work, uint64_t seed = 0);
  // Return the number of signaled work requests that wait.
  size_t held() const;
  // Run up to the pair's next signaled work request. Return false if none waits.
  bool run_one(size_t pair);
  void run_all();
  bool has_pair(size_t pair) const;
  // Fail the oldest waiting work request of the pair with `status`; the others flush.
  void fail(size_t pair, ibv_wc_status status);
  // Called on the thread that destroys a pair, after the device has released it.
  std::function<void()> on_pair_gone;
  // Refuse every further registration with this errno; 0: accept again.
  void refuse_registration(int error) { refusal_ = error; }

 private:
  friend struct FakePair;
  friend struct FakeQueue;
  FakeFabric& fabric_;
  const FakeLimits limits_;
  std::vector<uint32_t> pairs_;  // their numbers in the fabric
  Work work_ = Work::kAtOnce;
  std::mt19937_64 random_;
  std::atomic<int> refusal_{0};
};

}  // namespace petps::transport
