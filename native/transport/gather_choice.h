// The choice of how the rows of a reply are sent. The server asks whether to copy the rows during
// the lookup or to list them as pieces. The tcp transport asks how to send the pieces.
//
// ASSUMPTIONS: publish() is called at most once, by one thread; any thread may call the rest.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "transport/transport.h"

namespace petps::transport {

// Return "auto", "copy", "sendmsg" or "zerocopy".
const char* gather_mode_name(GatherMode mode);
// Set `mode` to the mode called `name`. Return false if no mode has that name.
bool parse_gather_mode(std::string_view name, GatherMode& mode);

inline constexpr std::array<GatherMode, 3> kGatherModes{GatherMode::kCopy, GatherMode::kSendmsg,
                                                        GatherMode::kZerocopy};

// Costs measured at start-up: of sending one reply of `kBatches[b]` rows of `kRowBytes[r]` bytes.
struct GatherCosts {
  static constexpr std::array<size_t, 7> kRowBytes{64, 128, 256, 512, 1024, 2048, 4096};
  static constexpr std::array<size_t, 3> kBatches{100, 500, 2000};
  static size_t row_class(size_t piece_bytes);
  static size_t batch_class(size_t pieces);

  struct Cell {
    // 0: not measured, because the time limit was reached.
    std::array<uint64_t, kGatherModes.size()> ns{};
    bool zerocopy_copied = false;  // the kernel copied although MSG_ZEROCOPY was set
    // Return the cheapest mode. Never choose a mode that was not measured, or zero-copy that
    // copied. Without costs, and where the gain is below the noise, return the usual mode: copy up
    // to the class of 1 KiB, sendmsg above.
    GatherMode cheapest(size_t row_class) const;
  };
  std::array<std::array<Cell, kBatches.size()>, kRowBytes.size()> cells{};
  double milliseconds = 0;  // duration of the measurement
  bool complete = false;    // false: the measurement reached its time limit
};

class GatherChoice {
 public:
  // Unless `configured` is kAuto, use it for every reply, whatever the measured costs are.
  explicit GatherChoice(GatherMode configured = GatherMode::kAuto);

  // Return how to send `pieces` pieces of `piece_bytes` bytes on average. Never returns kAuto.
  GatherMode mode_for(size_t piece_bytes, size_t pieces) const {
    if (configured_ != GatherMode::kAuto) return configured_;
    return modes_[GatherCosts::row_class(piece_bytes)][GatherCosts::batch_class(pieces)].load(
        std::memory_order_relaxed);
  }
  GatherMode configured() const { return configured_; }
  void publish(const GatherCosts& costs);
  // Return the published costs, or null before publish().
  const GatherCosts* costs() const {
    return published_.load(std::memory_order_acquire) ? &costs_ : nullptr;
  }

 private:
  const GatherMode configured_;
  std::array<std::array<std::atomic<GatherMode>, GatherCosts::kBatches.size()>,
             GatherCosts::kRowBytes.size()>
      modes_;
  GatherCosts costs_;
  std::atomic<bool> published_{false};
};

}  // namespace petps::transport
