// The five verbs over some keys of a batch. Internal to room table: batch.cc divides a batch,
// apply.cc applies a slice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "table/impl.h"

namespace petps::table {

// A slice of a batch: some of its keys.
struct Slice {
  std::span<const uint64_t> keys;
  const std::byte* rows;   // the batch's rows, or those from the slice's first on
  const uint32_t* places;  // keys[i] has row places[i]; null: row i
  const uint8_t* deleted;  // one mark per key, or null
  // If not null, receives the row numbers of new keys that found no room.
  std::vector<uint32_t>* refused = nullptr;
};

// Allocate, fill, persist, publish, retire. The caller holds the locks of the keys' ranges
// (RangeLocks).
base::Status apply_slice(Table::Impl& table, const Slice& slice, uint32_t stamp,
                         Table::Impl::Scratch& scratch, ApplyReport* report);

}  // namespace petps::table
