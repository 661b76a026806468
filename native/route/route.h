// Room route: which worker a training batch's keys go to, and which of its rows they then are
// (NestPipe IV.A: key routing with dedup and bucketing; the owner's second dedup).
//
// Owns:        ask (what a worker wants of all), merge (what all want of this one).
// Never does:  rows; talk to other workers; know tables by name.
// Called by:   bindings (petps.train.routing).
// Invariants:  a key crosses once for each micro-batch that has it; what is asked stands in the
//              order (owner, micro-batch, table, key), what is owned in the order (asking rank,
//              micro-batch, table, key), so that sums have a fixed order.
// Threads:     pure functions; time and memory O(keys).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "unique/pages.h"

namespace petps::route {

using unique::Block;

// Ids of a batch, each with its position as int32: half of what int64 would take to write, hold and
// copy to a device. PyTorch takes either.
inline constexpr size_t kBatchIdsMax = (size_t{1} << 31) - 1;

// Tables in an order in which those of one block (their rows share a buffer) are neighbours.
struct Shape {
  uint32_t world = 1;
  uint32_t micros = 1;
  std::span<const uint64_t> block_of;  // by table, from 0, rising by at most one
  [[nodiscard]] size_t tables() const { return block_of.size(); }
  [[nodiscard]] size_t blocks() const { return block_of.empty() ? 0 : block_of.back() + 1; }
};

struct Asked {
  Block<uint64_t> keys;          // (owner, micro-batch, table, key), each once in its part
  Block<uint64_t> seen;          // of each, how often its part has it; empty unless asked for
  std::vector<uint64_t> counts;  // [world][micro-batches][tables] of keys
  // Of each value, its row among those of its micro-batch and block, which come from rank 0, then
  // 1, ..., from each by table and key.
  Block<uint32_t> position;
};

// values: the keys of each (micro-batch, table), micros * tables parts; they are numbered through
// all of them. owner: partition * world / partitions, partition as wire says.
// INVALID_ARGUMENT: a shape that is none, another number of parts, more than kBatchIdsMax.
base::Result<Asked> ask(std::span<const std::span<const uint64_t>> values, const Shape& shape,
                        uint32_t partitions, bool seen);

struct Owned {
  Block<uint64_t> keys;     // of table 0, ascending, each once; then of table 1, ...
  Block<uint64_t> offsets;  // uint64[tables + 1]
  Block<uint64_t> seen;     // of each key, the sum of `seen`; empty if that is
  Block<int64_t> position;  // (micro-batch, block, rank, table, key): the row in its block
};

// keys: (rank, micro-batch, table, key), wanted: [world][micro-batches][tables] of them; seen: of
// each, or empty. INVALID_ARGUMENT: numbers that do not add up.
base::Result<Owned> merge(std::span<const uint64_t> keys, std::span<const uint64_t> seen,
                          std::span<const uint64_t> wanted, const Shape& shape);

}  // namespace petps::route
