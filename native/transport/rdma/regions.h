// The row memory that the device may read, registered piece by piece as it grows. Internal to
// transport/rdma.
//
// Threads: any thread may call find() and request_check(). A thread of this class registers memory,
// because that takes milliseconds per GiB and a worker must not wait for it.
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
  // Register the existing memory and start the thread that follows its growth. Errors: the
  // device's.
  base::Status start();
  // Deregister everything: find() finds nothing and the device has no access. The caller must
  // have stopped polling the endpoints.
  void end();

  // Set `key` to the key of the registration that contains `address`. Return the bytes from there
  // to the registration's end; 0: not registered (yet).
  size_t find(const std::byte* address, uint32_t& key) const;
  // Request a check whether the memory has grown, because a row lay outside. Costs one load if a
  // check is already requested.
  void request_check() {
    if (is_requested_.load(std::memory_order_relaxed) || is_requested_.exchange(true)) return;
    { const std::lock_guard lock(mutex_); }  // the thread now sleeps, or it will see is_requested_
    changed_.notify_one();
  }
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  struct Region {
    const std::byte* begin = nullptr;
    const std::byte* end = nullptr;
    uint32_t key = 0;
    std::unique_ptr<MemoryRegion> registered;
  };
  // All growth between two checks becomes one registration. When all are used, later rows are
  // copied.
  static constexpr size_t kRegionsMax = 1024;

  base::Status register_growth();
  void run();

  Verbs& verbs_;
  const std::function<RowMemory()> memory_;
  std::array<Region, kRegionsMax> regions_;  // by address; [0, count_) never change
  std::atomic<size_t> count_{0};
  std::atomic<uint64_t> bytes_{0};
  const std::byte* end_ = nullptr;  // end of the registered memory
  std::atomic<bool> is_requested_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace petps::transport
