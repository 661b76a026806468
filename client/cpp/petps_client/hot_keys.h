// Which keys of a table are pulled most, in bounded memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

namespace petps::client {

// Space-saving (Metwally et al.) in sets of eight cells, so that one key costs one set: a new key takes over the cell with the
// lowest count of its set and inherits that count plus one. A key that is pulled often is never lost to rare ones.
// Threads: from any; a sample that meets another one under way is dropped, because a pull must not wait for statistics.
class HotKeys {
 public:
  // Cells: four times the longest hot set, so that its tail is more than chance.
  explicit HotKeys(size_t hot_keys);
  void sample(std::span<const uint64_t> keys);
  // The most sampled keys, most first, seen at least twice; starts anew.
  std::vector<uint64_t> take();

 private:
  struct Cell {
    uint64_t key;
    uint64_t count;  // 0: free
  };
  static constexpr size_t kWays = 8;

  const size_t hot_keys_;
  std::mutex mutex_;
  std::vector<Cell> cells_;
};

}  // namespace petps::client
