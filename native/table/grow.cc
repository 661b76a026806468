// Growing a table while it is read and written. GROW.md explains the steps and proves them.
#include <algorithm>
#include <chrono>

#include "table/impl.h"

namespace petps::table {

using base::Code;
using base::Status;
using media::Flusher;
using media::Site;
using Clock = std::chrono::steady_clock;

namespace {

// How often growing looks whether a scan or the last reader of an array has ended.
constexpr auto kLook = std::chrono::milliseconds(1);

Status cancelled(const std::string& table) {
  return Status(Code::kFailedPrecondition,
                "table '" + table + "' keeps its capacity: growing was cancelled");
}

Status dropped_error(const std::string& table) {
  return Status(Code::kNotFound, "table '" + table + "' has been dropped");
}

uint64_t array_bytes(const index::Index& index) {
  return index.bucket_count() * sizeof(index::Bucket);
}

bool goes_on(const GrowOptions& options, uint64_t copied, uint64_t all) {
  return options.progress == nullptr || options.progress(copied, all);
}

}  // namespace

Status Table::grow(const GrowOptions& options) { return impl_->grow(options); }

index::Index& Table::Impl::add_array(const pool::BucketArray& array) {
  arrays.push_back(
      std::make_unique<index::Index>(pool, array.offset, array.count, record.spec.row_bytes));
  if (current.load() == nullptr) current.store(arrays.back().get(), std::memory_order_release);
  return *arrays.back();
}

Status Table::Impl::grow(const GrowOptions& options) {
  PETPS_RETURN_IF_ERROR(check_writable());
  if (!walked()) owner.walk();
  if (!walked()) {
    return Status(Code::kUnavailable, "table '" + record.spec.name +
                                          "' cannot grow before the pool has found its free slots: "
                                          "try again");
  }
  PETPS_RETURN_IF_ERROR(begin_growing());
  const Status status = copy_and_swap(options);
  if (!status.ok()) {
    const std::lock_guard moves(owner.moves_mutex);
    grows = false;
    return status;
  }
  // The growth is durable. If a reader stays longer, the background thread frees the array.
  const auto deadline = Clock::now() + std::chrono::milliseconds(kReclaimPatienceMs);
  const uint64_t all = index().bucket_count();
  for (epochs.reclaim(); !outgrown.unread.load(); epochs.reclaim()) {
    if (Clock::now() > deadline || !goes_on(options, all, all)) break;
    std::this_thread::sleep_for(kLook);
  }
  finish_growing();
  return Status();
}

Status Table::Impl::begin_growing() {
  finish_growing();
  const std::lock_guard moves(owner.moves_mutex);
  if (grows) {
    const char* const why = outgrown.retired.load()
                                ? "' has grown, and a reader still holds its index of before: try "
                                  "again when that read has ended"
                                : "' grows already: wait until that has ended";
    return Status(Code::kFailedPrecondition, "table '" + record.spec.name + why);
  }
  if (recount != Recount::kNone) {  // of an array that will not stay; if it does, once more
    range_locks.take_all();
    index().end_recount();
    range_locks.give(kAllRanges);
    recount = Recount::kNone;
    index().request_recount();
  }
  grows = true;
  lacks_keys.store(false);
  return Status();
}

Status Table::Impl::copy_and_swap(const GrowOptions& options) {
  const auto reserved = pool.reserve_buckets(record.id, options.capacity);
  if (!reserved.ok()) return reserved.status();
  index::Index* copy = nullptr;
  {
    const std::lock_guard moves(owner.moves_mutex);
    copy = &add_array(reserved.value());
  }
  copy->set_walked(0, 0);
  second_index_bytes.store(array_bytes(*copy), std::memory_order_relaxed);
  range_locks.take_all();
  mirrored = copy;
  range_locks.give(kAllRanges);
  Status status = copy_buckets(*copy, options);
  if (status.ok()) status = swap_array(reserved.value(), copy, options);
  if (status.ok()) return status;
  range_locks.take_all();
  mirrored = nullptr;
  range_locks.give(kAllRanges);
  second_index_bytes.store(0, std::memory_order_relaxed);
  {
    const std::lock_guard moves(owner.moves_mutex);
    arrays.pop_back();
  }
  pool.free_buckets(reserved.value());
  return status;
}

Status Table::Impl::copy_buckets(const index::Index& copy, const GrowOptions& options) {
  const index::Index& first = index();
  const uint64_t count = first.bucket_count();
  Flusher flusher(pool.medium());
  std::vector<uint64_t> keys;
  const uint64_t step = options.paced ? kBucketsCopiedPaced : kBucketsCopied;
  for (uint64_t number = 0; number < count; number += step) {
    if (!goes_on(options, number, count)) return cancelled(record.spec.name);
    const auto begin = Clock::now();
    read_ahead(number);
    keys.clear();
    range_locks.take_all();
    const bool exists = !dropped;
    if (exists) {
      for (uint64_t i = number; i < std::min(count, number + step); ++i) {
        const index::Index::LiveEntries live = first.read_bucket(i);
        for (size_t e = 0; e < live.count; ++e) keys.push_back(live.entries[e].key);
      }
      mirror(keys, flusher);
    }
    range_locks.give(kAllRanges);
    if (!exists) return dropped_error(record.spec.name);
    if (!synced()) PETPS_RETURN_IF_ERROR(flusher.drain(Site::kCopiedDrain));
    if (options.paced) std::this_thread::sleep_for(kPace * (Clock::now() - begin));
  }
  if (!synced()) return flusher.drain(Site::kCopiedDrain);
  const std::byte* const array = pool.at(copy.bucket_offset());
  pool.medium().expect_sync(array, array_bytes(copy));
  PETPS_RETURN_IF_ERROR(flusher.drain(Site::kCopiedDrain));
  pool.medium().expect_reads(array, array_bytes(copy));
  return Status();
}

Status Table::Impl::swap_array(const pool::BucketArray& array, index::Index* copy,
                               const GrowOptions& options) {
  const uint64_t count = index().bucket_count();
  renew_heat(array.capacity);
  for (bool is_swapped = false; !is_swapped;) {
    while (moves_gate.has_scan()) {
      if (!goes_on(options, count, count)) return cancelled(record.spec.name);
      std::this_thread::sleep_for(kLook);
    }
    // Most of it while writers go on; the rest within swap_buckets().
    PETPS_RETURN_IF_ERROR(pool.medium().sync_range(
        pool.at(array.offset), array.count * sizeof(index::Bucket), Site::kGrownSync));
    const std::lock_guard moves(owner.moves_mutex);
    range_locks.take_all();
    const Status status = swap_locked(array, copy, &is_swapped);
    range_locks.give(kAllRanges);
    PETPS_RETURN_IF_ERROR(status);
  }
  epochs.retire(outgrown, {&outgrown.array.offset, 1});
  return Status();
}

// Swap, unless a scan is open. The caller holds all ranges.
Status Table::Impl::swap_locked(const pool::BucketArray& array, index::Index* copy,
                                bool* is_swapped) {
  std::unique_lock gate(moves_gate, std::try_to_lock);
  if (!gate.owns_lock()) return Status();
  if (dropped) return dropped_error(record.spec.name);
  if (lacks_keys.load()) {  // a larger array has room for all, so this is a fault
    return Status(Code::kInternal, "table '" + record.spec.name +
                                       "' keeps its capacity: its copied index had no room");
  }
  PETPS_RETURN_IF_ERROR(pool.swap_buckets(record.id, array));
  outgrown.array = {index().bucket_offset(), index().bucket_count(), capacity.load()};
  outgrown.retired.store(true);
  mirrored = &index();
  second_index_bytes.store(array_bytes(index()), std::memory_order_relaxed);
  current.store(copy, std::memory_order_release);
  capacity.store(array.capacity, std::memory_order_relaxed);
  *is_swapped = true;
  return Status();
}

void Table::Impl::finish_growing() {
  if (!outgrown.unread.load()) return;
  const std::lock_guard moves(owner.moves_mutex);
  if (!outgrown.unread.load()) return;
  range_locks.take_all();
  mirrored = nullptr;
  range_locks.give(kAllRanges);
  pool.free_buckets(outgrown.array);
  second_index_bytes.store(0, std::memory_order_relaxed);
  outgrown.retired.store(false);
  outgrown.unread.store(false);
  grows = false;
}

// No op needs a drain of its own: no superblock names the array before everything in it is
// durable, or none does any more.
void Table::Impl::mirror(std::span<const uint64_t> keys, Flusher& flusher) {
  if (mirrored == nullptr) [[likely]]
    return;
  std::vector<uint64_t> distinct(keys.begin(), keys.end());
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  // After the swap, a key that the array of before lacks is new: no search there has to find it.
  const bool is_swapped = outgrown.retired.load();
  if (!mirrored->mirror(index(), distinct, is_swapped, flusher)) lacks_keys.store(true);
}

}  // namespace petps::table
