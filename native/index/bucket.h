// The bucket: 256 bytes, four cache lines, 14 entries. FORMAT.md gives the fields, INDEX.md the
// reasons. Internal to room index and to the walk and verify of room table.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/atomics.h"
#include "pool/pool.h"

namespace petps::index {

using pool::SlotRef;

inline constexpr uint32_t kEntries = 14;
inline constexpr uint32_t kAllEntries = (1u << kEntries) - 1;
// An overflow counter that reached this value stays there until a recount.
inline constexpr uint8_t kSaturated = 255;

struct Entry {
  uint64_t key;
  uint64_t ref;  // 0: empty; the store of the ref publishes the entry
};
static_assert(sizeof(Entry) == 16, "an entry must not straddle a cache line");

struct alignas(256) Bucket {
  uint8_t tags[kEntries];  // hints: trusted only in the current generation
  // How many entries passed this bucket because it was full. May be too high, never too low.
  uint8_t overflow;
  uint8_t reserved;
  uint64_t word;  // {generation 32, count 30, state 2}
  uint64_t reserved2;
  Entry entries[kEntries];
};
static_assert(sizeof(Bucket) == 256, "the block size of persistent memory");
static_assert(offsetof(Bucket, word) % 8 == 0, "the word is read and swapped whole");
static_assert(offsetof(Bucket, entries) % 16 == 0, "an entry must not straddle a cache line");

// States of a bucket's lock: the low two bits of its word.
inline constexpr uint64_t kFree = 0;
inline constexpr uint64_t kLocked = 1;
// Locked, and the holder is recomputing the tags: readers ignore them.
inline constexpr uint64_t kHealing = 2;
inline constexpr uint64_t kStateMask = 3;
inline constexpr uint64_t kCountStep = 4;
inline constexpr uint64_t kCountMask = 0xFFFFFFFC;

inline uint32_t generation_of(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
inline bool same_count(uint64_t a, uint64_t b) { return ((a ^ b) & ~kStateMask) == 0; }
inline uint64_t next_count(uint64_t word) {
  return (word & ~kCountMask) | ((word + kCountStep) & kCountMask);
}

// Every access to the shared bytes of a bucket uses these functions.
using base::load64;
using base::load8;
using base::store64;
using base::store8;

// Return the entries whose tag equals `tag`, as a bit mask.
uint32_t match_tags(const Bucket& bucket, uint8_t tag);

}  // namespace petps::index
