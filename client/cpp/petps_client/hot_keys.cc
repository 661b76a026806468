#include "petps_client/hot_keys.h"

#include <algorithm>
#include <bit>

#include "base/hash.h"

namespace petps::client {
namespace {

// Limit of keys sampled per pull, so that a bulk read does not pay for statistics.
constexpr size_t kMaxSampledKeys = 1024;

}  // namespace

HotKeys::HotKeys(size_t hot_keys)
    : hot_keys_(hot_keys), most_cells_(std::bit_ceil(std::max(hot_keys * kCellsPerKey, kWays))) {}

void HotKeys::sample(std::span<const uint64_t> keys) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  if (cells_.empty()) cells_.resize(std::min(most_cells_, kFirstCells));
  const size_t sets = cells_.size() / kWays;
  const size_t step = keys.size() / kMaxSampledKeys + 1;
  for (size_t i = 0; i < keys.size(); i += step) {
    Cell* const set = cells_.data() + (base::index_hash(keys[i]) & (sets - 1)) * kWays;
    Cell* const end = set + kWays;
    Cell* cell = std::find_if(
        set, end, [&](const Cell& other) { return other.count != 0 && other.key == keys[i]; });
    if (cell == end) {
      cell = std::min_element(set, end,
                              [](const Cell& a, const Cell& b) { return a.count < b.count; });
      cell->key = keys[i];
    }
    cell->count += 1;
  }
}

std::vector<uint64_t> HotKeys::take() {
  std::vector<Cell> repeated;
  size_t count = hot_keys_;
  {
    const std::lock_guard lock(mutex_);
    count = std::min(count, cells_.size() / kCellsPerKey);
    std::copy_if(cells_.begin(), cells_.end(), std::back_inserter(repeated),
                 [](const Cell& cell) { return cell.count > 1; });
    const bool is_filled = repeated.size() >= count && cells_.size() < most_cells_;
    cells_.assign(is_filled ? cells_.size() * 2 : cells_.size(), Cell{});
  }
  count = std::min(count, repeated.size());
  std::partial_sort(repeated.begin(), repeated.begin() + static_cast<ptrdiff_t>(count),
                    repeated.end(), [](const Cell& a, const Cell& b) { return a.count > b.count; });
  std::vector<uint64_t> keys;
  for (size_t i = 0; i < count; ++i) keys.push_back(repeated[i].key);
  return keys;
}

size_t HotKeys::memory_bytes() {
  const std::lock_guard lock(mutex_);
  return cells_.size() * sizeof(Cell);
}

}  // namespace petps::client
