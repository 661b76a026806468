#include "petps_client/dedup.h"

#include <bit>
#include <cstring>

#include "base/hash.h"

namespace petps::client {
namespace {

// Measured over loopback (EPYC 9005) as CPU time of client and server together: the cost
// of the search per key, and the saving per repeated key, net of copying its row here. A
// real network saves more.
constexpr double kDedupNsPerKey = 4.0;
constexpr double kSavedNs = 30.0;
constexpr double kSavedNsPerByte = 0.03;
// One call in this number is searched even if that does not pay, to notice a change of the traffic.
constexpr uint32_t kLookEvery = 32;
// Smaller pulls save nothing that can be measured.
constexpr size_t kFewestKeys = 16;

}  // namespace

void Distinct::build(std::span<const uint64_t> keys) {
  const size_t cells = std::bit_ceil(keys.size() * 2 + 1);
  const size_t mask = cells - 1;
  cells_.assign(cells, 0);
  keys_.resize(keys.size());
  positions_.resize(keys.size());
  uint32_t distinct = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    const uint64_t key = keys[i];
    size_t at = base::index_hash(key) & mask;
    while (cells_[at] != 0 && keys_[cells_[at] - 1] != key) at = (at + 1) & mask;
    if (cells_[at] == 0) {
      keys_[distinct] = key;
      cells_[at] = ++distinct;
    }
    positions_[i] = cells_[at] - 1;
  }
  keys_.resize(distinct);
}

void spread(std::span<const uint32_t> positions, size_t row_bytes, std::byte* rows) {
  for (size_t i = positions.size(); i-- > 0;) {
    if (positions[i] != i)
      std::memcpy(rows + i * row_bytes, rows + positions[i] * row_bytes, row_bytes);
  }
}

bool DedupGauge::pays(size_t keys, size_t row_bytes) {
  if (keys < kFewestKeys) return false;
  if (calls_.fetch_add(1, std::memory_order_relaxed) % kLookEvery == 0) return true;
  const double share = repeated_.load(std::memory_order_relaxed) / 1024.0;
  return share * (kSavedNs + kSavedNsPerByte * static_cast<double>(row_bytes)) > kDedupNsPerKey;
}

void DedupGauge::saw(size_t keys, size_t distinct) {
  const uint32_t before = repeated_.load(std::memory_order_relaxed);
  const auto now = static_cast<uint32_t>((keys - distinct) * 1024 / keys);
  repeated_.store((before * 3 + now) / 4, std::memory_order_relaxed);
}

}  // namespace petps::client
