// Room buffer: rows of a training batch moved by position, in memory: gathered for who asked,
// gradients added where they belong, fresher rows copied over (NestPipe IV.B).
//
// Owns:        gather, add, copy, common (positions of the keys that two lists share).
// Never does:  know tables, keys' owners or transfers; allocate rows.
// Called by:   bindings (petps.train.rows, petps.train.kernels).
// Invariants:  a position beyond its rows is refused before anything is written; sums are made in
//              the order given.
// Threads:     pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"

namespace petps::buffer {

// n rows of `width` values, one behind the other.
template <typename T>
struct Block {
  T* data = nullptr;
  size_t n = 0;
  size_t width = 0;
  [[nodiscard]] T* row(size_t i) const { return data + i * width; }
};
using Positions = std::span<const int64_t>;

// out row i = the first out.width values of rows' row at[i]. INVALID_ARGUMENT: shapes, a position.
base::Status gather(Block<const float> rows, Positions at, Block<float> out);
// into row at[i] += rows' row i, for i = 0, 1, ...
base::Status add(Block<float> into, Positions at, Block<const float> rows);
// into row to[i] = rows' row from[i].
base::Status copy(Block<float> into, Positions to, Block<const float> rows, Positions from);

// Positions of the keys that are in both, each list ascending: in left, in right.
std::pair<std::vector<int64_t>, std::vector<int64_t>> common(std::span<const uint64_t> left,
                                                             std::span<const uint64_t> right);

}  // namespace petps::buffer
