// Dedup of a pull: the client requests a repeated key once, and copies its row to every position.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace petps::client {

// The distinct keys of a list, in order of first occurrence, and the number of each position's key.
class Distinct {
 public:
  // Find the distinct keys. Keeps its memory for the next call.
  // ASSUMPTIONS: keys.size() < 2^32.
  void build(std::span<const uint64_t> keys);
  std::span<const uint64_t> keys() const { return keys_; }
  // positions()[i] is the number of key i: keys()[positions()[i]] == key i.
  std::span<const uint32_t> positions() const { return positions_; }

 private:
  std::vector<uint64_t> keys_;
  std::vector<uint32_t> positions_;
  std::vector<uint32_t> cells_;  // hash table: 1 + the number of a distinct key; 0 = free
};

// Copy the rows of the distinct keys, packed at the start of `rows`, to every position of each key.
// This works in place from the back, because a distinct key's number is never above a position of
// that key. So when position i is written, the rows that earlier positions still need are all
// below i.
void spread(std::span<const uint32_t> positions, size_t row_bytes, std::byte* rows);

// An estimate of whether dedup pays for one table.
// Threads: all methods from any. The atomics are relaxed: a race loses an update of the estimate,
// no more.
class DedupEstimate {
 public:
  bool pays(size_t keys, size_t row_bytes);
  // Record the result of a search.
  void record(size_t keys, size_t distinct);

 private:
  // Repeated keys per 1,024 keys of a pull (moving average). Starts at the optimistic end.
  std::atomic<uint32_t> repeated_{1024};
  std::atomic<uint32_t> calls_{0};
};

}  // namespace petps::client
