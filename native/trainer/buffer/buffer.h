// Room buffer: moves rows of a training batch by position, in memory. It gathers rows for the rank
// that requested them, adds gradients to rows, and replaces rows by newer ones (NestPipe IV.B).
//
// Owns:        gather, add, copy, common (positions of the keys that two lists share).
// Never does:  know tables, owners of keys or transfers; allocate rows.
// Called by:   bindings (petps.train.rows, petps.train.kernels).
// Invariants:  A position beyond the rows is refused before anything is written. Sums are computed
//              in the order of the positions.
// Threads:     pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"

namespace petps::buffer {

// n contiguous rows of `width` values.
template <typename T>
struct Block {
  T* data = nullptr;
  size_t n = 0;
  size_t width = 0;
  [[nodiscard]] T* row(size_t i) const { return data + i * width; }
};
using Positions = std::span<const int64_t>;

// Errors of the three functions below: INVALID_ARGUMENT for shapes that do not match, and for a
// position beyond the rows.
//
// Set row i of `out` to the first out.width values of row at[i] of `rows`.
base::Status gather(Block<const float> rows, Positions at, Block<float> out);
// Add row i of `rows` to row at[i] of `into`, for i = 0, 1, ...
base::Status add(Block<float> into, Positions at, Block<const float> rows);
// Set row to[i] of `into` to row from[i] of `rows`.
base::Status copy(Block<float> into, Positions to, Block<const float> rows, Positions from);

// Return the positions, in `left` and in `right`, of the keys that are in both. Each list is
// ascending.
std::pair<std::vector<int64_t>, std::vector<int64_t>> common(std::span<const uint64_t> left,
                                                             std::span<const uint64_t> right);

}  // namespace petps::buffer
