#include "transport/gather_choice.h"

namespace petps::transport {

namespace {

constexpr std::array<const char*, 4> kNames{"auto", "copy", "sendmsg", "zerocopy"};
// Used without measured costs. On every machine tried so far, the kernel's walk over the pieces
// costs more than a copy up to this row size, and less from twice this size on.
constexpr size_t kCopyRowBytes = 1024;
// A gain below a tenth of the cost may be chance.
constexpr uint64_t kNoiseShare = 10;

}  // namespace

const char* gather_mode_name(GatherMode mode) { return kNames[static_cast<size_t>(mode)]; }

bool parse_gather_mode(std::string_view name, GatherMode& mode) {
  for (size_t i = 0; i < kNames.size(); ++i) {
    if (name != kNames[i]) continue;
    mode = static_cast<GatherMode>(i);
    return true;
  }
  return false;
}

// Return the nearest class on a logarithmic scale; larger sizes belong to the last class.
size_t GatherCosts::row_class(size_t piece_bytes) {
  size_t i = 0;
  while (i + 1 < kRowBytes.size() && piece_bytes > kRowBytes[i] + kRowBytes[i] / 2) ++i;
  return i;
}

size_t GatherCosts::batch_class(size_t pieces) {
  constexpr std::array<size_t, kBatches.size() - 1> kUpTo{224, 1000};  // geometric means
  return pieces <= kUpTo[0] ? 0 : pieces <= kUpTo[1] ? 1 : 2;
}

GatherMode GatherCosts::Cell::cheapest(size_t row_class) const {
  const size_t usual = kRowBytes[row_class] <= kCopyRowBytes ? 0 : 1;
  size_t best = usual;
  for (size_t i = 0; i < kGatherModes.size(); ++i) {
    const bool is_valid =
        ns[i] > 0 && !(kGatherModes[i] == GatherMode::kZerocopy && zerocopy_copied);
    if (is_valid && (ns[best] == 0 || ns[i] < ns[best])) best = i;
  }
  return kGatherModes[ns[best] < ns[usual] - ns[usual] / kNoiseShare ? best : usual];
}

GatherChoice::GatherChoice(GatherMode configured) : configured_(configured) {
  for (size_t r = 0; r < modes_.size(); ++r) {
    for (auto& mode : modes_[r]) mode.store(GatherCosts::Cell{}.cheapest(r));
  }
}

void GatherChoice::publish(const GatherCosts& costs) {
  costs_ = costs;
  for (size_t r = 0; r < modes_.size(); ++r) {
    for (size_t b = 0; b < modes_[r].size(); ++b) {
      modes_[r][b].store(costs.cells[r][b].cheapest(r), std::memory_order_relaxed);
    }
  }
  published_.store(true, std::memory_order_release);
}

}  // namespace petps::transport
