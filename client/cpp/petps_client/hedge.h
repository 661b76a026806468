// Hedges: when a call asks a second server for the same keys, and how often all calls may do so.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace petps::client {

// Recent latencies of first replies, by the number of keys of the request. Threads: any.
class Latencies {
 public:
  void record(uint64_t keys, uint64_t latency_ns);
  // Return a time that at most about 5 % of recent requests of a similar size have exceeded; if too
  // few are known, of larger ones, else of smaller ones; 0: none.
  uint64_t p95_ns(uint64_t keys) const;

 private:
  // Requests with 0, 1, 2-3, 4-7, ... keys: at most 16,384 keys differ.
  static constexpr size_t kKinds = 16;
  // Four buckets for each power of two: a limit is at most a quarter above the latency.
  static constexpr size_t kBuckets = 160;
  static constexpr uint32_t kFewestSamples = 64;
  // Then all counts are halved, so that older latencies count less.
  static constexpr uint32_t kMostSamples = 4096;
  static constexpr uint32_t kSamplesPerUpdate = 32;

  struct Kind {
    std::array<std::atomic<uint32_t>, kBuckets> counts{};
    std::atomic<uint32_t> samples{0};
    std::atomic<uint64_t> p95_ns{0};
  };
  static size_t kind_of(uint64_t keys);
  static void update(Kind& kind);

  std::array<Kind, kKinds> kinds_;
};

// Lets hedges be at most 5 % of all other requests. Threads: any.
class HedgeBudget {
 public:
  void record_request() {
    const uint64_t now = tokens_.load(std::memory_order_relaxed);
    // A race may lose a token: hedges then stay below their share.
    if (now < kMostTokens) tokens_.store(now + 1, std::memory_order_relaxed);
  }
  // Return whether `hedges` further requests are allowed, and count them if they are. Half of what
  // can be saved is kept for those that are very late: one in twenty is late, so that late ones
  // alone would use all.
  bool take(uint64_t hedges, bool is_very_late) {
    const uint64_t kept = is_very_late ? 0 : kMostTokens / 2;
    uint64_t now = tokens_.load(std::memory_order_relaxed);
    while (now >= hedges * kRequestsPerHedge + kept) {
      if (tokens_.compare_exchange_weak(now, now - hedges * kRequestsPerHedge,
                                        std::memory_order_relaxed))
        return true;
    }
    return false;
  }

 private:
  static constexpr uint64_t kRequestsPerHedge = 20;
  // A server that becomes slow meets at most this many hedges at once.
  static constexpr uint64_t kMostTokens = 10 * kRequestsPerHedge;
  std::atomic<uint64_t> tokens_{0};
};

}  // namespace petps::client
