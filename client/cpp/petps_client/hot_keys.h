// The keys of a table that are pulled most, in bounded memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

namespace petps::client {

// Space-saving (Metwally et al.) in sets of eight cells, so that a key touches one set only. A
// new key takes the cell with the lowest count of its set, and inherits that count plus one. A
// key with more than an eighth of its set's samples is therefore always present. There are four
// cells per key of the longest hot set: with fewer, its tail would be random. A table with few hot
// keys takes little memory: there are no cells before the first sample, and few at first, which
// double when a hot set fills them.
// Threads: all methods from any. If another thread is sampling, sample() does nothing, because a
// pull must not wait for statistics.
class HotKeys {
 public:
  explicit HotKeys(size_t hot_keys);  // of the longest hot set
  void sample(std::span<const uint64_t> keys);
  // Return the keys with the highest counts, highest first, without those counted once. Clear the
  // counts.
  std::vector<uint64_t> take();
  size_t memory_bytes();

 private:
  struct Cell {
    uint64_t key;
    uint64_t count;  // 0: free
  };
  static constexpr size_t kWays = 8;
  static constexpr size_t kCellsPerKey = 4;
  static constexpr size_t kFirstCells = 16384;

  const size_t hot_keys_;
  const size_t most_cells_;
  std::mutex mutex_;
  std::vector<Cell> cells_;  // empty before the first sample
};

}  // namespace petps::client
