// Extents: claimed from free ones or appended, freed, and given back to the disk.
#include <algorithm>
#include <chrono>
#include <thread>

#include "pool/catalogue.h"

namespace petps::pool {

using base::Code;
using base::Result;
using base::Status;
using media::Flusher;
using media::Site;

namespace {
// Bytes that shrink() gives back with one call, which the file system completes as a whole.
constexpr uint64_t kShrunkBytes = uint64_t{64} << 20;
}  // namespace

// Give blocks to everything but free extents, which shrink() may have given back.
Status Pool::own_used_blocks() {
  uint64_t from = 0;
  for (const ExtentPlace& place : catalogue_->extents) {
    if (place.table != 0) continue;
    PETPS_RETURN_IF_ERROR(media_->own_blocks(from, place.offset));
    from = place.offset + place.bytes;
  }
  return media_->own_blocks(from, media_->size());
}

uint64_t Pool::free_bytes() const {
  const std::lock_guard state(state_mutex_);
  uint64_t bytes = 0;
  for (const ExtentPlace& place : catalogue_->extents) bytes += place.table == 0 ? place.bytes : 0;
  return bytes;
}

void Pool::keep_blocks() {
  std::unique_lock state(state_mutex_);
  blocks_kept_ = true;
  const auto shrinks = [](const ExtentPlace& place) { return place.shrinks; };
  while (std::any_of(catalogue_->extents.begin(), catalogue_->extents.end(), shrinks)) {
    state.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    state.lock();
  }
}

// Return why no free extent may be given back now. The caller holds state_mutex_.
Status Pool::check_shrinkable() const {
  // Also between two extents: what a failed change of the catalogue set free may be in use for the
  // next open.
  PETPS_RETURN_IF_ERROR(check_writable());
  if (blocks_kept_) {
    return Status(Code::kFailedPrecondition,
                  "pool '" + media_->path() +
                      "' cannot shrink, because a network card keeps its pages: stop the server, "
                      "or set server.rdma = \"off\", and open the pool again");
  }
  if (!extents_held_.load(std::memory_order_acquire)) return Status();
  return Status(Code::kFailedPrecondition,
                "pool '" + media_->path() +
                    "' cannot shrink while a process that read it before the last restart may "
                    "still read free space: try again when that has ended");
}

Result<uint64_t> Pool::shrink(const std::function<bool(uint64_t, uint64_t)>& progress) {
  const uint64_t all = free_bytes();
  std::vector<ExtentPlace>& extents = catalogue_->extents;
  uint64_t done = 0;
  for (size_t i = 0;; ++i) {
    ExtentPlace place;
    {
      const std::lock_guard state(state_mutex_);
      PETPS_RETURN_IF_ERROR(check_shrinkable());
      while (i < extents.size() && (extents[i].table != 0 || extents[i].shrinks)) ++i;
      if (i == extents.size()) return done;
      extents[i].shrinks = true;
      extents[i].is_hole = true;
      place = extents[i];
    }
    Status status;
    bool goes_on = true;
    for (uint64_t at = 0; at < place.bytes && status.ok() && goes_on; at += kShrunkBytes) {
      const uint64_t bytes = std::min(kShrunkBytes, place.bytes - at);
      status = media_->free_blocks(place.offset + at, place.offset + at + bytes);
      if (status.ok()) done += bytes;
      goes_on = progress == nullptr || progress(done, std::max(all, done));
    }
    const std::lock_guard state(state_mutex_);
    extents[i].shrinks = false;
    PETPS_RETURN_IF_ERROR(status);
    if (!goes_on) return done;
  }
}

Status Pool::swap_buckets(uint32_t table, const BucketArray& array) {
  size_t records = 0;
  {
    const std::lock_guard state(state_mutex_);
    records = catalogue_->extents.size();
  }
  PETPS_RETURN_IF_ERROR(media_->sync_range(base_ + map_->extents(), records * 8, Site::kGrownSync));
  PETPS_RETURN_IF_ERROR(media_->sync_range(base_ + array.offset, array.count * layout::kBucketBytes,
                                           Site::kGrownSync));
  std::lock_guard lock(mutex_);
  TableRecord* record = catalogue_->table(table);
  if (record == nullptr)
    return Status(Code::kNotFound, "table id " + std::to_string(table) + " was dropped");
  const TableRecord before = *record;
  record->bucket_offset = array.offset;
  record->bucket_count = array.count;
  record->spec.capacity = array.capacity;
  if (Status status = write_superblock(); !status.ok()) {
    *record = before;
    return status;
  }
  const std::lock_guard state(state_mutex_);
  catalogue_->slots.at(table)->set_capacity(array.capacity);
  return Status();
}

void Pool::free_buckets(const BucketArray& array) {
  const std::lock_guard state(state_mutex_);
  for (ExtentPlace& place : catalogue_->extents) {
    if (place.offset == array.offset) place.table = 0;
  }
}

void Pool::free_table(uint32_t table) {
  decltype(catalogue_->slots)::node_type slots;  // destroyed after the lock is released
  const std::lock_guard state(state_mutex_);
  slots = catalogue_->slots.extract(table);
  catalogue_->clocks.erase(table);
  for (ExtentPlace& place : catalogue_->extents) {
    if (place.table == table) place.table = 0;
  }
}

// Claim the smallest free extent of `wanted` to `most` bytes; if there is none, the largest of
// `least` to `wanted`; the first of equals. Those that may lack blocks come last. Return its record
// number, or the number of extents if none fits.
size_t Pool::claim_free_extent(uint32_t table, const Length& length) {
  const std::lock_guard state(state_mutex_);
  std::vector<ExtentPlace>& extents = catalogue_->extents;
  size_t chosen = extents.size();
  for (size_t i = 0; i < extents.size(); ++i) {
    const ExtentPlace& place = extents[i];
    if (place.table != 0 || place.shrinks || extents_held_.load(std::memory_order_acquire))
      continue;
    if (place.bytes < length.least || place.bytes > length.most) continue;
    const auto is_better = [&](const ExtentPlace& than) {
      if (place.is_hole != than.is_hole) return than.is_hole;
      const bool is_enough = place.bytes >= length.wanted;
      if (is_enough != (than.bytes >= length.wanted)) return is_enough;
      return is_enough ? place.bytes < than.bytes : place.bytes > than.bytes;
    };
    if (chosen == extents.size() || is_better(extents[chosen])) chosen = i;
  }
  if (chosen < extents.size()) extents[chosen].table = table;
  return chosen;
}

// Claim a free extent if one fits. Its record still names its old table, or a table that was never
// completed. Neither is in the superblock.
Result<Pool::Extent> Pool::add_extent(uint32_t kind, uint32_t table, const Length& length) {
  std::unique_lock lock(extents_mutex_);
  for (;;) {
    PETPS_RETURN_IF_ERROR(check_writable());
    const size_t chosen = claim_free_extent(table, length);
    if (chosen == catalogue_->extents.size())
      return append_extent(kind, table, length.wanted / unit_bytes_);
    const ExtentPlace place = catalogue_->extents[chosen];
    // The extent belongs to this table alone now, so the lock is not needed for the long work.
    lock.unlock();
    Flusher flusher(*media_);
    Status status = prepare_extent(kind, place.offset, place.offset + place.bytes, flusher);
    lock.lock();
    if (status.ok())
      status = store_extent_record(chosen, kind, table, place.bytes / unit_bytes_, flusher);
    const std::lock_guard state(state_mutex_);
    ExtentPlace& claimed = catalogue_->extents[chosen];
    if (status.ok()) {
      claimed.kind = kind;
      claimed.is_hole = false;
      return Extent{place.offset, place.bytes, true};
    }
    claimed.table = 0;
    // The disk is full, but another free extent may have blocks.
    if (status.code() != Code::kResourceExhausted || place.is_hole) return status;
    claimed.is_hole = true;
  }
}

// Give a claimed extent blocks, and zeros if it will hold buckets or clocks: the superblock names a
// table only after that is durable.
Status Pool::prepare_extent(uint32_t kind, uint64_t from, uint64_t to, Flusher& flusher) {
  const bool is_zero = kind != static_cast<uint32_t>(layout::ExtentKind::kSlots);
  PETPS_RETURN_IF_ERROR(media_->claim_blocks(from, to));
  if (is_zero) zero(from, to, Site::kReusedExtent, flusher);
  PETPS_RETURN_IF_ERROR(flusher.drain(Site::kExtentRecordDrain));
  return is_zero ? media_->sync_range(base_ + from, to - from, Site::kReusedSync) : Status();
}

void Pool::zero(uint64_t from, uint64_t to, Site site, Flusher& flusher) {
  static constexpr std::byte kZeros[4096] = {};
  for (uint64_t at = from; at < to; at += sizeof kZeros)
    flusher.copy(base_ + at, kZeros, std::min<uint64_t>(sizeof kZeros, to - at), site);
}

// Append an extent behind the last one. The space is zero, because nothing was ever written
// there.
Result<Pool::Extent> Pool::append_extent(uint32_t kind, uint32_t table, uint64_t units) {
  if (catalogue_->extents.size() >= map_->max_extents()) {
    return Status(Code::kResourceExhausted,
                  "pool '" + media_->path() + "' has no extent record left");
  }
  const Extent extent{end_, units * unit_bytes_};
  if (media_->size() < extent.offset + extent.bytes)
    PETPS_RETURN_IF_ERROR(media_->grow(extent.offset + extent.bytes));
  Flusher flusher(*media_);
  PETPS_RETURN_IF_ERROR(
      store_extent_record(catalogue_->extents.size(), kind, table, units, flusher));
  end_ = extent.offset + extent.bytes;
  const std::lock_guard state(state_mutex_);
  catalogue_->extents.push_back({table, kind, extent.offset, extent.bytes});
  return extent;
}

Status Pool::store_extent_record(uint64_t position, uint32_t kind, uint32_t table, uint64_t units,
                                 Flusher& flusher) {
  const uint64_t word = layout::pack_extent({kind, table, static_cast<uint32_t>(units)}, position);
  auto* record = reinterpret_cast<uint64_t*>(base_ + map_->extents()) + position;
  std::atomic_ref<uint64_t>(*record).store(word, std::memory_order_release);
  media_->report_store(record, sizeof *record);
  flusher.flush(record, sizeof *record, Site::kExtentRecord);
  return flusher.drain(Site::kExtentRecordDrain);
}

}  // namespace petps::pool
