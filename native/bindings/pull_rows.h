// The pull inside one process. For each batch: take a pin, look up, copy with prefetch, drop the
// pin.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "bindings/session.h"
#include "codec/codec.h"

namespace petps::bindings {

// Keys of a batch under one pin: enough for prefetching to pay off, and few enough for the row
// addresses to fit the first-level cache. A longer pull takes a pin per batch, so that no call
// delays reclaim.
inline constexpr size_t kPullBatch = 4096;

struct PullTarget {
  void* out;                        // n rows of float32[dim], or n stored rows
  bool stored;                      // out takes the stored bytes
  std::span<uint8_t> mask;          // empty, or n: 1 = the key was found
  std::span<uint32_t> stamps = {};  // empty, or n: the stamp of a row that was found
};

// Fill the target for every key; a missing key gets the table's default row. Return the number of
// rows found. Call `pin` once per batch; it returns an empty Pin if the caller holds one already.
uint64_t pull_rows(const std::function<epoch::Pin()>& pin, const table::Table& table,
                   std::span<const uint64_t> keys, const PullTarget& target);
uint64_t pull_rows(Session& session, const table::Table& table, std::span<const uint64_t> keys,
                   const PullTarget& target);

}  // namespace petps::bindings
