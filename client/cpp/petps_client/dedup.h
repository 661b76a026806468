// Repeated keys of a pull: asked for once, answered everywhere.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace petps::client {

// The distinct keys of a list, in order of first occurrence, and which of them stands where.
class Distinct {
 public:
  // ASSUMPTIONS: keys.size() < 2^32. Keeps its memory for the next call.
  void build(std::span<const uint64_t> keys);
  std::span<const uint64_t> keys() const { return keys_; }
  std::span<const uint32_t> positions() const {
    return positions_;
  }  // keys()[positions()[i]] == key i

 private:
  std::vector<uint64_t> keys_;
  std::vector<uint32_t> positions_;
  std::vector<uint32_t> cells_;  // 1 + number of a distinct key; 0 = free
};

// Rows of the distinct keys stand packed at the start of `rows`; afterwards each position has its row. In place: a distinct
// key's number is never above any position it stands at, so going from the back nothing is overwritten that is still needed.
void spread(std::span<const uint32_t> positions, size_t row_bytes, std::byte* rows);

// Whether asking for distinct keys pays for one table, from what was seen. A relaxed guess: races lose an update, no more.
class DedupGauge {
 public:
  bool pays(size_t keys, size_t row_bytes);
  void saw(size_t keys, size_t distinct);

 private:
  // Of 1024 keys, how many repeat an earlier one of their pull (moving average). Starts hopeful.
  std::atomic<uint32_t> repeated_{1024};
  std::atomic<uint32_t> calls_{0};
};

}  // namespace petps::client
