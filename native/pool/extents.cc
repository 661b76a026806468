// Extents: claimed from free ones or appended, freed, and given back to the disk.
#include <algorithm>

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

Result<uint64_t> Pool::shrink(const std::function<bool(uint64_t, uint64_t)>& progress) {
  PETPS_RETURN_IF_ERROR(check_writable());
  if (blocks_kept_.load(std::memory_order_acquire)) {
    return Status(Code::kFailedPrecondition,
                  "pool '" + media_->path() +
                      "' cannot shrink while a network card keeps its pages: stop the server, or "
                      "set server.rdma = \"off\"");
  }
  if (extents_held_.load(std::memory_order_acquire)) {
    return Status(Code::kFailedPrecondition,
                  "pool '" + media_->path() +
                      "' cannot shrink while a process that read it before the last restart may "
                      "still read free space: try again when that has ended");
  }
  const uint64_t all = free_bytes();
  std::vector<ExtentPlace>& extents = catalogue_->extents;
  uint64_t done = 0;
  Status status;
  for (size_t i = 0; status.ok(); ++i) {
    ExtentPlace place;
    {
      const std::lock_guard state(state_mutex_);
      while (i < extents.size() && (extents[i].table != 0 || extents[i].shrinks)) ++i;
      if (i == extents.size()) return done;
      extents[i].shrinks = true;
      place = extents[i];
    }
    bool goes_on = true;
    for (uint64_t at = 0; at < place.bytes && status.ok() && goes_on; at += kShrunkBytes) {
      const uint64_t bytes = std::min(kShrunkBytes, place.bytes - at);
      status = media_->free_blocks(place.offset + at, place.offset + at + bytes);
      if (status.ok()) done += bytes;
      goes_on = progress == nullptr || progress(done, std::max(all, done));
    }
    const std::lock_guard state(state_mutex_);
    extents[i].shrinks = false;
    if (!goes_on && status.ok()) return done;
  }
  return status;
}

void Pool::free_table(uint32_t table) {
  decltype(catalogue_->slots)::node_type slots;  // destroyed after the lock is released
  const std::lock_guard state(state_mutex_);
  slots = catalogue_->slots.extract(table);
  for (ExtentPlace& place : catalogue_->extents) {
    if (place.table == table) place.table = 0;
  }
}

// Claim the smallest free extent of `wanted` to `most` bytes; if there is none, the largest of
// `least` to `wanted`. The first of equals. Return its record number, or the number of extents if
// none fits.
size_t Pool::claim_free_extent(uint32_t table, const Length& length) {
  const std::lock_guard state(state_mutex_);
  std::vector<ExtentPlace>& extents = catalogue_->extents;
  size_t chosen = extents.size();
  for (size_t i = 0; i < extents.size(); ++i) {
    const ExtentPlace& place = extents[i];
    if (place.table != 0 || place.shrinks || extents_held_.load(std::memory_order_acquire))
      continue;
    if (place.bytes < length.least || place.bytes > length.most) continue;
    const auto is_better = [&](uint64_t than) {
      const bool is_enough = place.bytes >= length.wanted;
      if (is_enough != (than >= length.wanted)) return is_enough;
      return is_enough ? place.bytes < than : place.bytes > than;
    };
    if (chosen == extents.size() || is_better(extents[chosen].bytes)) chosen = i;
  }
  if (chosen < extents.size()) extents[chosen].table = table;
  return chosen;
}

// Claim a free extent if one fits. Its record still names its old table, or a table that was never
// completed. Neither is in the superblock.
Result<Pool::Extent> Pool::add_extent(uint32_t kind, uint32_t table, const Length& length) {
  std::unique_lock lock(extents_mutex_);
  PETPS_RETURN_IF_ERROR(check_writable());
  const size_t chosen = claim_free_extent(table, length);
  if (chosen == catalogue_->extents.size())
    return append_extent(kind, table, length.wanted / unit_bytes_);
  const Extent extent{catalogue_->extents[chosen].offset, catalogue_->extents[chosen].bytes, true};
  lock.unlock();
  // The extent belongs to this table alone now; the superblock names the table only after the
  // drain below.
  Flusher flusher(*media_);
  const uint64_t end = extent.offset + extent.bytes;
  const bool has_buckets = kind == static_cast<uint32_t>(layout::ExtentKind::kBuckets);
  Status status = media_->own_blocks(extent.offset, end);
  if (status.ok() && has_buckets) zero(extent.offset, end, Site::kReusedExtent, flusher);
  // Drain here, so that the long write-back happens without the lock.
  if (status.ok()) status = flusher.drain(Site::kExtentRecordDrain);
  if (status.ok() && has_buckets)
    status = media_->sync_range(base_ + extent.offset, extent.bytes, Site::kReusedSync);
  lock.lock();
  if (status.ok())
    status = store_extent_record(chosen, kind, table, extent.bytes / unit_bytes_, flusher);
  const std::lock_guard state(state_mutex_);
  if (!status.ok()) {
    catalogue_->extents[chosen].table = 0;
    return status;
  }
  catalogue_->extents[chosen].kind = kind;
  return extent;
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
