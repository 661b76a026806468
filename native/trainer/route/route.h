// Room route: assigns the keys of a training batch to the ranks that own them, and positions to the
// rows that come back (NestPipe IV.A: key routing with dedup and bucketing; the owner's second
// dedup).
//
// Owns:        ask (the keys that this rank requests from each rank), merge (the keys that all
//              ranks request from this one).
// Never does:  touch rows; communicate with other ranks; know tables by name.
// Called by:   bindings (petps.train.routing).
// Invariants:  A key is sent once for each micro-batch that has it. Requested keys are in the order
//              (owner, micro-batch, table, key). Keys that an owner receives are in the order
//              (requesting rank, micro-batch, table, key), so that sums have a fixed order.
// Threads:     pure functions; time and memory O(keys).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "trainer/unique/pages.h"

namespace petps::route {

using unique::Block;

// Ids of one batch, at most, because a position must fit an int32. An int64 would double the bytes
// to write, hold and copy to a device; PyTorch accepts both.
inline constexpr size_t kBatchIdsMax = (size_t{1} << 31) - 1;

// The numbers of ranks, micro-batches and tables. Tables of one block have neighbouring numbers;
// their rows share a buffer.
struct Shape {
  uint32_t world = 1;                  // ranks
  uint32_t micros = 1;                 // micro-batches
  std::span<const uint64_t> block_of;  // the block of each table: from 0, rising by at most 1
  [[nodiscard]] size_t tables() const { return block_of.size(); }
  [[nodiscard]] size_t blocks() const { return block_of.empty() ? 0 : block_of.back() + 1; }
};

// The keys that a rank requests. A part is one (micro-batch, table).
struct Requested {
  // In the order (owner, micro-batch, table, key); each key once in its part.
  Block<uint64_t> keys;
  // For each key, how often it occurs in its part; empty if the caller does not want it.
  Block<uint64_t> seen;
  std::vector<uint64_t> counts;  // [world][micro-batches][tables]: number of keys
  // For each value, its row among the rows of its micro-batch and block. Those rows come from rank
  // 0, then rank 1, ...; the rows from one rank are in the order (table, key).
  Block<uint32_t> position;
};

// Return the keys to request from each rank. values: the keys of each (micro-batch, table), in
// micros * tables parts. Requested::position has one element for each value, part after part. The
// owner of a key is rank partition * world / partitions, with the partition of room wire. seen:
// whether to fill Requested::seen. Errors: INVALID_ARGUMENT for an invalid shape, another number of
// parts, fewer partitions than ranks, or more than kBatchIdsMax ids.
base::Result<Requested> ask(std::span<const std::span<const uint64_t>> values, const Shape& shape,
                            uint32_t partitions, bool seen);

// The keys that all ranks request from this one.
struct Owned {
  Block<uint64_t> keys;     // of table 0, ascending, each once; then of table 1, ...
  Block<uint64_t> offsets;  // uint64[tables + 1], into keys
  Block<uint64_t> seen;     // for each key, the sum of merge's `seen`; empty if that is empty
  // For each received key, in the order (micro-batch, block, rank, table, key), its row in its
  // block.
  Block<int64_t> position;
};

// Merge the keys that this rank received from all ranks. keys: in the order (rank, micro-batch,
// table, key). seen: how often each key occurs, or empty. counts: [world][micro-batches][tables],
// the number of keys in each part.
// Errors: INVALID_ARGUMENT for an invalid shape, or if the counts do not sum to the number of keys.
base::Result<Owned> merge(std::span<const uint64_t> keys, std::span<const uint64_t> seen,
                          std::span<const uint64_t> counts, const Shape& shape);

}  // namespace petps::route
