#include "table/heat.h"

#include <algorithm>
#include <bit>

#include "base/hash.h"

namespace petps::table {

namespace {

constexpr uint64_t kLineWords = 8;
constexpr uint64_t kCountersOfLine = kLineWords * 16;
constexpr uint64_t kHalfMask = 0x7777777777777777;

// The counters of a key: `line` of all lines, and four of the 128 counters in it.
struct Counters {
  uint64_t line;
  std::array<uint32_t, Heat::kHashes> at;
};

Counters counters_of(uint64_t key, uint64_t lines) {
  uint64_t hash = base::index_hash(key);
  Counters counters;
  __extension__ typedef unsigned __int128 Wide;
  counters.line = static_cast<uint64_t>((Wide{hash} * lines) >> 64);
  hash *= 0xC2B2AE3D27D4EB4F;
  for (uint32_t i = 0; i < Heat::kHashes; ++i)
    counters.at[i] = static_cast<uint32_t>((hash >> (16 * i)) % kCountersOfLine);
  return counters;
}

}  // namespace

Heat::Heat(uint64_t capacity) : capacity_(capacity) {
  const uint64_t lines =
      std::max<uint64_t>(1, (capacity * kCountersPerRow + kCountersOfLine - 1) / kCountersOfLine);
  words_.assign(lines * kLineWords, 0);
  for (size_t i = 0; i < kShards; ++i) shards_[i].random.store(0x9E3779B97F4A7C15 * (i + 1));
}

Heat::Shard& Heat::own_shard() {
  static std::atomic<size_t> threads{0};
  thread_local const size_t number = threads.fetch_add(1, std::memory_order_relaxed) % kShards;
  return shards_[number];
}

void Heat::settle() {
  const std::lock_guard lock(mutex_);
  for (Shard& shard : shards_) {
    const uint64_t end = shard.next.load(std::memory_order_acquire);
    shard.counted = std::min(shard.counted, end);  // threads that share it may go back
    if (end - shard.counted > kSamples) shard.counted = end - kSamples;
    for (; shard.counted < end; ++shard.counted)
      add_locked(shard.keys[shard.counted % kSamples].load(std::memory_order_relaxed));
  }
}

void Heat::add(uint64_t key) {
  const std::lock_guard lock(mutex_);
  add_locked(key);
}

// Raise only the lowest counters of the key: the other ones are high because of other keys.
void Heat::add_locked(uint64_t key) {
  const Counters counters = counters_of(key, words_.size() / kLineWords);
  uint64_t* const line = words_.data() + counters.line * kLineWords;
  const auto count = [&](uint32_t at) { return (line[at / 16] >> (at % 16 * 4)) & kCounterMax; };
  uint64_t lowest = kCounterMax;
  for (const uint32_t at : counters.at) lowest = std::min(lowest, count(at));
  if (lowest < kCounterMax) {
    for (const uint32_t at : counters.at) {
      if (count(at) == lowest) line[at / 16] += uint64_t{1} << (at % 16 * 4);
    }
  }
  if (++added_ < capacity_ * kSamplesPerRow) return;
  added_ = 0;
  for (uint64_t& word : words_) word = (word >> 1) & kHalfMask;
}

uint32_t Heat::of(uint64_t key) const {
  const std::lock_guard lock(mutex_);
  const Counters counters = counters_of(key, words_.size() / kLineWords);
  const uint64_t* const line = words_.data() + counters.line * kLineWords;
  uint64_t lowest = kCounterMax;
  for (const uint32_t at : counters.at)
    lowest = std::min(lowest, (line[at / 16] >> (at % 16 * 4)) & kCounterMax);
  return static_cast<uint32_t>(lowest);
}

}  // namespace petps::table
