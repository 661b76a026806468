#include "petps_client/dedup.h"

#include <bit>
#include <cstring>
#include <random>

#include "base/hash.h"

namespace petps::client {
namespace {

// The cost of the search per key, and the saving per repeated key after the copy of its row. Both
// are CPU time of client and server together, measured over loopback (EPYC 9005). A real network
// saves more.
constexpr double kDedupNsPerKey = 4.0;
constexpr double kSavedNs = 30.0;
constexpr double kSavedNsPerByte = 0.03;
// One call in this number searches even if that does not pay, to notice a change of the traffic.
constexpr uint32_t kSampleEvery = 32;
// Smaller pulls save nothing that can be measured.
constexpr size_t kFewestKeys = 16;

// Keys come from strangers, who must not be able to choose many that fall into one cell.
uint64_t random_seed() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

}  // namespace

void Distinct::build(std::span<const uint64_t> keys) {
  const size_t cells = std::bit_ceil(keys.size() * 2 + 1);
  const size_t mask = cells - 1;
  cells_.assign(cells, 0);
  keys_.resize(keys.size());
  positions_.resize(keys.size());
  static const uint64_t seed = random_seed();
  uint32_t distinct = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    const uint64_t key = keys[i];
    size_t cell = base::index_hash(key ^ seed) & mask;
    while (cells_[cell] != 0 && keys_[cells_[cell] - 1] != key) cell = (cell + 1) & mask;
    if (cells_[cell] == 0) {
      keys_[distinct] = key;
      cells_[cell] = ++distinct;
    }
    positions_[i] = cells_[cell] - 1;
  }
  keys_.resize(distinct);
}

void spread(std::span<const uint32_t> positions, size_t row_bytes, std::byte* rows) {
  for (size_t i = positions.size(); i-- > 0;) {
    if (positions[i] != i)
      std::memcpy(rows + i * row_bytes, rows + positions[i] * row_bytes, row_bytes);
  }
}

bool DedupEstimate::pays(size_t keys, size_t row_bytes) {
  if (keys < kFewestKeys) return false;
  if (calls_.fetch_add(1, std::memory_order_relaxed) % kSampleEvery == 0) return true;
  const double share = repeated_.load(std::memory_order_relaxed) / 1024.0;
  return share * (kSavedNs + kSavedNsPerByte * static_cast<double>(row_bytes)) > kDedupNsPerKey;
}

void DedupEstimate::record(size_t keys, size_t distinct) {
  const uint32_t before = repeated_.load(std::memory_order_relaxed);
  const auto now = static_cast<uint32_t>((keys - distinct) * 1024 / keys);
  repeated_.store((before * 3 + now) / 4, std::memory_order_relaxed);
}

}  // namespace petps::client
