// The five verbs over some keys of a batch. Internal to room table: batch.cc divides a batch,
// apply.cc applies a slice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "table/impl.h"

namespace petps::table {

// What apply did with a key.
enum class Outcome : uint8_t { kSuperseded, kInserted, kUpdated, kDeleted, kAbsent, kRefused };

// Several batches that are applied as one (Table::apply_together).
struct Group {
  std::span<const std::byte* const> rows;  // the address of each key's row; null for a deletion
  std::span<Outcome> outcomes;             // receives what became of each key
};

// A slice of a batch: some of its keys.
struct Slice {
  std::span<const uint64_t> keys;
  const std::byte* rows;   // the batch's rows, or those from the slice's first on
  const uint32_t* places;  // keys[i] has row places[i]; null: row i
  const uint8_t* deleted;  // one mark per key, or null
  // If not null, keys[i] has stamps[places[i]]; without places stamps[i].
  const uint32_t* stamps = nullptr;
  bool only_of_stamp = false;  // as in Batch
  // As in Batch; indexed as stamps are. Null: no condition.
  const DamagedRow* only_damaged = nullptr;
  bool only_missing = false;
  // If not null, receives the row numbers of new keys that found no room.
  std::vector<uint32_t>* refused = nullptr;
  const Group* group = nullptr;  // if not null, it has the rows, and the slice is all of it
};

// Replaced slots that a writer has not given to epoch yet. It does so once for several slices,
// because epoch has one lock for all writers. It keeps none back while it waits for a range of keys
// or for other threads, which may wait for these slots.
class Retiring {
 public:
  explicit Retiring(Table::Impl& table) : table_(table) {}
  ~Retiring() { flush(); }
  Retiring(const Retiring&) = delete;
  Retiring& operator=(const Retiring&) = delete;

  // The refs have left the index, durably.
  void add(std::span<const pool::SlotRef> refs);
  // Give them to epoch, and take back what no reader holds. Return how many slots came back.
  size_t flush();

 private:
  Table::Impl& table_;
  std::vector<pool::SlotRef> refs_;
};

// Allocate, fill, persist, publish, retire. The caller holds the locks of the keys' ranges
// (RangeLocks).
base::Status apply_slice(Table::Impl& table, const Slice& slice, uint32_t stamp,
                         Table::Impl::Scratch& scratch, Retiring& retiring, ApplyReport* report);

// Refuse a batch whose arrays do not fit together.
base::Status check_batch(const Batch& batch);
// Apply a checked batch; with a group, as one slice.
base::Result<ApplyReport> apply_batch(Table::Impl& table, const Batch& batch, const Group* group);

}  // namespace petps::table
