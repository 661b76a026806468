#include "petps_client/hedge.h"

#include <algorithm>
#include <bit>

namespace petps::client {

namespace {

size_t bucket_of(uint64_t latency_ns) {
  const uint64_t ns = std::max<uint64_t>(latency_ns, 4);
  const auto width = static_cast<size_t>(std::bit_width(ns));  // at least 3
  return (width - 3) * 4 + ((ns >> (width - 3)) & 3);
}

// Return the first latency above the bucket.
uint64_t limit_of(size_t bucket) { return (5 + uint64_t{bucket % 4}) << (bucket / 4); }

}  // namespace

size_t Latencies::kind_of(uint64_t keys) {
  return std::min<size_t>(static_cast<size_t>(std::bit_width(keys)), kKinds - 1);
}

void Latencies::update(Kind& kind) {
  uint64_t all = 0;
  for (const auto& count : kind.counts) all += count.load(std::memory_order_relaxed);
  if (all < kFewestSamples) return;
  uint64_t above = all / 20;  // 5 %
  size_t bucket = kBuckets - 1;
  for (; bucket > 0; --bucket) {
    const uint32_t count = kind.counts[bucket].load(std::memory_order_relaxed);
    if (count > above) break;
    above -= count;
  }
  kind.p95_ns.store(limit_of(bucket), std::memory_order_relaxed);
  if (all < kMostSamples) return;
  for (auto& count : kind.counts)
    count.store(count.load(std::memory_order_relaxed) / 2, std::memory_order_relaxed);
}

void Latencies::record(uint64_t keys, uint64_t latency_ns) {
  Kind& kind = kinds_[kind_of(keys)];
  kind.counts[std::min(bucket_of(latency_ns), kBuckets - 1)].fetch_add(1,
                                                                       std::memory_order_relaxed);
  const uint32_t samples = kind.samples.fetch_add(1, std::memory_order_relaxed) + 1;
  if (samples % kSamplesPerUpdate == 0) update(kind);
}

uint64_t Latencies::p95_ns(uint64_t keys) const {
  const size_t kind = kind_of(keys);
  uint64_t p95_ns = 0;
  for (size_t i = kind; i < kKinds && p95_ns == 0; ++i)
    p95_ns = kinds_[i].p95_ns.load(std::memory_order_relaxed);
  for (size_t i = kind; i > 0 && p95_ns == 0; --i)
    p95_ns = kinds_[i - 1].p95_ns.load(std::memory_order_relaxed);
  return p95_ns;
}

}  // namespace petps::client
