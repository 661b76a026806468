// Which way the rows of a reply go out: one decision, asked by the server (copy the rows while it
// looks them up, or make pieces of them) and by tcp (what to do with pieces).
//
// ASSUMPTIONS: publish() is called once at most, by one thread; everything else by any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "transport/transport.h"

namespace petps::transport {

// "auto", "copy", "sendmsg", "zerocopy".
const char* gather_mode_name(GatherMode mode);
// False: there is no mode of that name.
bool parse_gather_mode(std::string_view name, GatherMode& mode);

inline constexpr std::array<GatherMode, 3> kGatherModes{GatherMode::kCopy, GatherMode::kSendmsg,
                                                        GatherMode::kZerocopy};

// What was measured at start-up: sending one reply of `kBatches[b]` rows of `kRowBytes[r]` bytes.
struct GatherCosts {
  static constexpr std::array<size_t, 7> kRowBytes{64, 128, 256, 512, 1024, 2048, 4096};
  static constexpr std::array<size_t, 3> kBatches{100, 500, 2000};
  static size_t row_class(size_t piece_bytes);
  static size_t batch_class(size_t pieces);

  struct Cell {
    std::array<uint64_t, kGatherModes.size()> ns{};  // 0: not measured, the time was over
    bool zerocopy_copied = false;  // the kernel copied in spite of being asked not to
    // The cheapest. A way that was not measured, or zero-copy that copied, never is. Without figures,
    // and where they hardly differ, rows are copied up to the class of 1 KiB.
    GatherMode cheapest(size_t row_class) const;
  };
  std::array<std::array<Cell, kBatches.size()>, kRowBytes.size()> cells{};
  double milliseconds = 0;  // that the measurement took
  bool complete = false;    // false: it ran into its limit
};

class GatherChoice {
 public:
  // Anything but kAuto is obeyed whatever the figures say.
  explicit GatherChoice(GatherMode wish = GatherMode::kAuto);

  // How to send `pieces` pieces of `piece_bytes` bytes on average. Never kAuto.
  GatherMode of(size_t piece_bytes, size_t pieces) const {
    if (wish_ != GatherMode::kAuto) return wish_;
    return modes_[GatherCosts::row_class(piece_bytes)][GatherCosts::batch_class(pieces)].load(
        std::memory_order_relaxed);
  }
  GatherMode wish() const { return wish_; }
  void publish(const GatherCosts& costs);
  // Null until published.
  const GatherCosts* costs() const {
    return published_.load(std::memory_order_acquire) ? &costs_ : nullptr;
  }

 private:
  const GatherMode wish_;
  std::array<std::array<std::atomic<GatherMode>, GatherCosts::kBatches.size()>,
             GatherCosts::kRowBytes.size()>
      modes_;
  GatherCosts costs_;
  std::atomic<bool> published_{false};
};

}  // namespace petps::transport
