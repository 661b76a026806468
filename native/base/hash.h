// The two hashes of a key, and that of a row. Those of a key are XXH3-64 of its 8 little-endian
// bytes; only the seed differs. The keys of one partition agree in partition_hash mod P, so those
// bits must not also choose the bucket: buckets would fill unevenly (native/index/FORMAT.md).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#ifndef XXH_INLINE_ALL
#define XXH_INLINE_ALL
#endif
// Read the key by memcpy. For gcc on ARM, xxhash 0.8.1 would read it through a pointer of another
// type, which strict aliasing does not allow: the optimizer then drops the store of the key, and
// the hash is that of another key.
#undef XXH_FORCE_MEMORY_ACCESS
#define XXH_FORCE_MEMORY_ACCESS 0
#include <xxhash.h>

namespace petps::base {

static_assert(std::endian::native == std::endian::little,
              "keys are hashed as little-endian bytes straight from memory");

// Never change: delta logs and shard maps hold partition numbers computed with seed 0.
inline constexpr uint64_t kPartitionSeed = 0;
// Never change: pools hold buckets computed with it (2^64 divided by the golden ratio).
inline constexpr uint64_t kIndexSeed = 0x9E3779B97F4A7C15u;

// Return the hash that gives a key's partition: partition = partition_hash(key) mod P.
inline uint64_t partition_hash(uint64_t key) {
  return XXH3_64bits_withSeed(&key, sizeof key, kPartitionSeed);
}

// Return the hash by which a backup knows whether a row has changed (petps/pool/BACKUP.md).
inline uint64_t row_hash(const void* row, size_t bytes) { return XXH3_64bits(row, bytes); }

// Return the hash that gives a key's home bucket, tag and probe step.
inline uint64_t index_hash(uint64_t key) {
  return XXH3_64bits_withSeed(&key, sizeof key, kIndexSeed);
}

}  // namespace petps::base
