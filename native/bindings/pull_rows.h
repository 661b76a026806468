// The in-process pull: pin, lookup in batches, gather with prefetch, drop the pin.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "bindings/session.h"
#include "codec/codec.h"

namespace petps::bindings {

// Keys whose rows are pinned and gathered together: one lookup's prefetching pays off, and 4096 row
// addresses stay in the first-level cache. A longer pull takes a pin per batch, so that no call
// holds up reclaim.
inline constexpr size_t kPullBatch = 4096;

struct PullTarget {
  void* out;                // n rows of float32[dim], or n stored rows
  bool stored;              // out takes the stored bytes
  std::span<uint8_t> mask;  // empty, or n: 1 = the key is there
};

// Fills the target for every key; a missing one gets the table's default row. Returns how many were
// found. pin: an empty Pin where the caller holds one already.
uint64_t pull_rows(const std::function<epoch::Pin()>& pin, const table::Table& table,
                   std::span<const uint64_t> keys, const PullTarget& target);
uint64_t pull_rows(Session& session, const table::Table& table, std::span<const uint64_t> keys,
                   const PullTarget& target);

}  // namespace petps::bindings
