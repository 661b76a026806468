// How often the keys of a table are pulled: a sample of the pulls, counted in DRAM. EVICTION.md
// explains the sizes. Part of room table.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

namespace petps::table {

class Heat {
 public:
  static constexpr uint32_t kStride = 16;         // pulled keys for each sample, on average
  static constexpr size_t kShards = 16;           // of the samples that are not counted yet
  static constexpr size_t kSamples = 2048;        // in a shard; beyond that the oldest are lost
  static constexpr uint64_t kCountersPerRow = 4;  // of 4 bits each
  static constexpr uint32_t kCounterMax = 15;
  static constexpr uint32_t kHashes = 4;
  // Samples for each row of the capacity after which all counters are halved.
  static constexpr uint64_t kSamplesPerRow = 4;

  explicit Heat(uint64_t capacity);

  // Sample some of the keys that a pull looked up. Any thread; no lock.
  void sample(std::span<const uint64_t> keys) {
    Shard& shard = own_shard();
    uint64_t skip = shard.skip.load(std::memory_order_relaxed);
    while (skip < keys.size()) {
      const uint64_t at = shard.next.load(std::memory_order_relaxed);
      shard.keys[at % kSamples].store(keys[skip], std::memory_order_relaxed);
      shard.next.store(at + 1, std::memory_order_release);
      skip += next_skip(shard);
    }
    shard.skip.store(skip - keys.size(), std::memory_order_relaxed);
  }
  // Count what was sampled.
  void settle();
  // Count one key, as a sample of it.
  void add(uint64_t key);
  // Return how hot the key is, 0 to kCounterMax. It may be hotter than it was pulled, if keys share
  // counters, but not colder, except for the halving.
  uint32_t of(uint64_t key) const;
  uint64_t bytes() const { return words_.size() * 8 + sizeof shards_; }

 private:
  // Threads that share a shard may lose a sample of each other; that costs accuracy only.
  struct alignas(64) Shard {
    std::atomic<uint64_t> skip{0};  // keys until the next sample
    std::atomic<uint64_t> next{0};
    std::atomic<uint64_t> random{0x9E3779B97F4A7C15};
    uint64_t counted = 0;  // under mutex_
    std::array<std::atomic<uint64_t>, kSamples> keys{};
  };
  Shard& own_shard();
  static uint64_t next_skip(Shard& shard) {
    uint64_t x = shard.random.load(std::memory_order_relaxed);
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    shard.random.store(x, std::memory_order_relaxed);
    return 1 + x % (2 * kStride - 1);
  }
  void add_locked(uint64_t key);

  std::array<Shard, kShards> shards_;
  mutable std::mutex mutex_;  // guards the counters
  uint64_t capacity_;
  uint64_t added_ = 0;           // since the last halving
  std::vector<uint64_t> words_;  // 16 counters each; the counters of a key are in one line of 8
};

}  // namespace petps::table
