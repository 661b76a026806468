// Scrubbing: compares rows with their headers while the table serves, and takes damaged rows out of
// service. SCRUB.md explains why no whole row is removed, and why a restored row is never an old
// one.
#include <chrono>
#include <shared_mutex>

#include "base/crc32c.h"
#include "base/prefetch.h"
#include "table/pinned.h"
#include "table/slice.h"

namespace petps::table {

using base::Code;
using base::Result;
using base::Status;
using pool::SlotHeader;
using pool::SlotRef;

namespace {

constexpr size_t kKeysAtOnce = 512;  // that are looked up while writers wait

Status no_reader(const std::string& table) {
  return Status(Code::kUnavailable, "table '" + table +
                                        "': no reader place is free to check its rows; close some "
                                        "connections");
}

}  // namespace

std::optional<DamagedRow> Table::Impl::examine(uint64_t key, SlotRef ref) const {
  if (!slots.is_slot(ref)) return DamagedRow{key, ref, 0, 0, Fault::kNoSlot};
  const SlotHeader header = *slots.header(ref);
  if (header.key != key) return DamagedRow{key, ref, header.stamp, header.crc, Fault::kOtherKey};
  if (header.crc != base::crc32c(slots.row(ref), record.spec.row_bytes))
    return DamagedRow{key, ref, header.stamp, header.crc, Fault::kChecksum};
  return std::nullopt;
}

Result<ScrubStep> Table::scrub(ScrubCursor* cursor, uint64_t bytes) {
  Impl& table = *impl_;
  const uint64_t row_bytes = table.record.spec.row_bytes + sizeof(SlotHeader);
  epoch::Reader* const reader = table.epochs.lease();
  if (reader == nullptr) return no_reader(table.record.spec.name);
  ScrubStep step;
  while (!step.complete && step.bytes < bytes) {
    const epoch::Pin pin = reader->pin();
    const auto until = std::chrono::steady_clock::now() + kPinned;
    const index::Index& array = table.index();
    if (cursor->array != &array) *cursor = {&array, 0};  // each key has another bucket
    step.bucket_count = array.bucket_count();
    while (cursor->bucket < step.bucket_count && step.bytes < bytes &&
           std::chrono::steady_clock::now() < until) {
      table.read_ahead(cursor->bucket);
      const index::Index::LiveEntries live = array.read_bucket(cursor->bucket);
      for (size_t i = 0; i < live.count; ++i) {
        const std::byte* const row = array.row_of(live.entries[i].ref);
        if (row != nullptr) base::prefetch(row, table.record.spec.row_bytes);
      }
      for (size_t i = 0; i < live.count; ++i) {
        const index::Entry& entry = live.entries[i];
        if (const auto found = table.examine(entry.key, entry.ref)) step.damaged.push_back(*found);
      }
      step.rows += live.count;
      step.bytes += live.count * row_bytes;
      cursor->bucket += 1;
    }
    step.buckets = cursor->bucket;
    step.complete = cursor->bucket == step.bucket_count;
  }
  if (const SlotRef ref = table.record.default_row; step.complete && ref != 0) {
    step.default_row_damaged = table.slots.header(ref)->crc !=
                               base::crc32c(table.slots.row(ref), table.record.spec.row_bytes);
  }
  table.epochs.release(reader);
  return step;
}

Result<uint64_t> Table::remove_damaged(std::span<const DamagedRow> rows) {
  PETPS_RETURN_IF_ERROR(impl_->check_writable());
  if (rows.empty()) return uint64_t{0};
  std::vector<uint64_t> keys;
  for (const DamagedRow& row : rows) keys.push_back(row.key);
  const std::vector<uint8_t> all(keys.size(), 1);
  Batch batch;
  batch.keys = keys;
  batch.deleted = all;
  batch.only_damaged = rows;
  const Result<ApplyReport> report = apply_batch(*impl_, batch, nullptr);
  if (!report.ok()) return report.status();
  return report.value().deleted;
}

Result<ApplyReport> Table::restore(std::span<const uint64_t> keys, const std::byte* rows,
                                   std::span<const uint32_t> stamps) {
  Batch batch;
  batch.keys = keys;
  batch.rows = rows;
  batch.stamps = stamps;
  batch.only_missing = true;
  PETPS_RETURN_IF_ERROR(check_batch(batch));
  PETPS_RETURN_IF_ERROR(impl_->check_writable());
  return apply_batch(*impl_, batch, nullptr);
}

Status Table::note_missing(std::span<const uint64_t> keys) {
  std::array<SlotRef, kKeysAtOnce> refs{};
  for (size_t from = 0; from < keys.size(); from += kKeysAtOnce) {
    const auto page = keys.subspan(from, std::min(kKeysAtOnce, keys.size() - from));
    impl_->range_locks.take_all();  // not for all keys: each may wait for the disk
    const bool exists = !impl_->dropped;
    if (exists) {
      std::shared_lock moves(impl_->moves_gate);
      impl_->index().find_refs(page, refs.data());
      for (size_t i = 0; i < page.size(); ++i) {
        if (refs[i] == 0) impl_->add_missing(page[i]);
      }
    }
    impl_->range_locks.give(kAllRanges);
    if (!exists)
      return Status(Code::kNotFound, "table '" + impl_->record.spec.name + "' has been dropped");
  }
  return Status();
}

std::vector<uint64_t> Table::missing_keys() const {
  const std::lock_guard lock(impl_->missing_mutex);
  return {impl_->missing.begin(), impl_->missing.end()};
}

Status Table::find_damaged(std::span<const uint64_t> keys, std::span<uint8_t> damaged) {
  epoch::Reader* const reader = impl_->epochs.lease();
  if (reader == nullptr) return no_reader(impl_->record.spec.name);
  {
    const epoch::Pin pin = reader->pin();
    std::vector<SlotRef> refs(keys.size());
    impl_->index().find_refs(keys, refs.data());
    for (size_t i = 0; i < keys.size(); ++i)
      damaged[i] = refs[i] != 0 && impl_->examine(keys[i], refs[i]) ? 1 : 0;
  }
  impl_->epochs.release(reader);
  return Status();
}

bool Table::Impl::is_missing(uint64_t key) const {
  const std::lock_guard lock(missing_mutex);
  return missing.contains(key);
}

void Table::Impl::add_missing(uint64_t key) {
  const std::lock_guard lock(missing_mutex);
  missing.insert(key);
  missing_rows.store(missing.size(), std::memory_order_relaxed);
}

void Table::Impl::erase_missing(uint64_t key) {
  const std::lock_guard lock(missing_mutex);
  missing.erase(key);
  missing_rows.store(missing.size(), std::memory_order_relaxed);
}

}  // namespace petps::table
