// The row memory that the device may read, registered piece by piece as it grows. Internal to
// transport/rdma.
//
// Threads: find() and ask() any thread; registering is done by one thread of its own, because it takes
// milliseconds a GiB and a worker must not wait for it.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "transport/rdma/rdma.h"

namespace petps::transport {

class Regions {
 public:
  Regions(Verbs& verbs, std::function<RowMemory()> memory);
  ~Regions();
  // Registers what there is and starts to follow. Errors: the device's.
  base::Status start();
  // Nothing is found any more, and the device has no access. No endpoint is polled any more.
  void end();

  // The key of the registration that [address, ...) begins in, and how far it goes from there; 0 bytes:
  // none (yet).
  size_t find(const std::byte* address, uint32_t& key) const;
  // A row lay outside: looks whether the memory has grown. Costs a load when that is known already.
  void ask() {
    if (asked_.load(std::memory_order_relaxed) || asked_.exchange(true)) return;
    { const std::lock_guard lock(mutex_); }  // the thread sleeps, or will see it
    wanted_.notify_one();
  }
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  struct Region {
    const std::byte* begin = nullptr;
    const std::byte* end = nullptr;
    uint32_t key = 0;
    std::unique_ptr<MemoryRegion> registered;
  };
  // Growths between two looks become one registration; when all are used, rows beyond are copied.
  static constexpr size_t kRegionsMax = 1024;

  base::Status follow();
  void run();

  Verbs& verbs_;
  const std::function<RowMemory()> memory_;
  std::array<Region, kRegionsMax> regions_;  // by address; [0, count_) never change
  std::atomic<size_t> count_{0};
  std::atomic<uint64_t> bytes_{0};
  const std::byte* end_ = nullptr;  // of what is registered
  std::atomic<bool> asked_{false};
  std::mutex mutex_;
  std::condition_variable wanted_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace petps::transport
