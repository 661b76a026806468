#include "pool/slots.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "base/checksum.h"
#include "pool/layout.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define PETPS_POISON(at, bytes) ASAN_POISON_MEMORY_REGION(at, bytes)
#define PETPS_UNPOISON(at, bytes) ASAN_UNPOISON_MEMORY_REGION(at, bytes)
#else
#define PETPS_POISON(at, bytes) static_cast<void>(at)
#define PETPS_UNPOISON(at, bytes) static_cast<void>(at)
#endif

namespace petps::pool {

using base::Code;
using base::Status;
using media::Site;

namespace {
constexpr uint64_t kRowAlignment = 256;      // rows begin on a media block
constexpr uint64_t kMapHeaderBytes = 8;      // checksum in front of a stored free map
constexpr uint64_t kSpareShare = 8;          // 1/8 of the slots of a written table is kept free
constexpr uint64_t kRegionBytes = 64 << 10;  // the folio size of new file space (media.cc)
// A region is recent while at most 16 MiB of rows were written since its last. A larger number
// would save more as long as the kernel writes nothing back, but cost more after it did.
constexpr uint64_t kPartBytes = 1 << 20;
constexpr uint16_t kRecentParts = 16;
constexpr size_t kMaxRecent = 16384;  // more than a batch leaves
constexpr uint64_t kMostExtentBytes = (uint64_t{1} << 32) - 1;
constexpr uint64_t kSkippedWords = 8;  // of sparse groups, at most, for each slot that is wanted
__extension__ typedef unsigned __int128 Wide;

uint64_t words_for(uint64_t slots) { return (slots + 63) / 64; }
uint64_t slots_for(uint64_t capacity) { return capacity + capacity / 8 + kSpareSlots; }

// The least that an extent may have.
uint64_t least_bytes(uint32_t row_bytes) { return row_bytes * uint64_t{4}; }

// The length of the next extent of a table that has `extents`.
uint64_t extent_bytes(size_t extents, uint32_t row_bytes, uint64_t unit_bytes) {
  uint64_t units =
      std::min<uint64_t>(uint64_t{1} << std::min<size_t>(extents, 30), kSlotsExtentMaxUnits);
  while (units * unit_bytes < least_bytes(row_bytes)) units *= 2;
  return units * unit_bytes;
}
}  // namespace

// Replay grow(): it stops once there are slots_for() and those that one batch waits for.
Slots::Footprint Slots::footprint_of(uint32_t row_bytes, uint64_t capacity, uint64_t unit_bytes) {
  const uint64_t wanted = slots_for(capacity) + kBatchSlots;
  Footprint most;
  uint64_t slots = 0;
  for (size_t extents = 0; slots < wanted; ++extents) {
    const uint64_t bytes = extent_bytes(extents, row_bytes, unit_bytes);
    const uint64_t count = lay_out(row_bytes, 0, bytes)->count;
    // All extents after the longest are as long, and there may be millions.
    const bool is_longest = bytes == extent_bytes(extents + 1, row_bytes, unit_bytes);
    const uint64_t times = is_longest ? (wanted - slots + count - 1) / count : 1;
    slots += times * count;
    most.pool += times * bytes;
  }
  const uint64_t bits = words_for(slots) * 8;
  most.memory = bits + most.pool / kRegionBytes * sizeof(uint16_t) + kMaxRecent * sizeof(SlotRef);
  return most;
}

Slots::Slots(Pool& pool, uint32_t table, uint32_t row_bytes, uint64_t capacity)
    : pool_(&pool),
      table_(table),
      row_bytes_(row_bytes),
      row_share_(~uint64_t{0} / row_bytes + 1),
      max_slots_(slots_for(capacity)),
      group_words_(std::max<uint64_t>(1, kRegionBytes / row_bytes / 64)),
      by_unit_(pool.medium().reserved(), pool.unit_bytes()) {}

Slots::ByUnit::ByUnit(uint64_t reserved, uint64_t unit_bytes)
    : units_(reserved / unit_bytes + 1),
      shift_(static_cast<uint32_t>(std::countr_zero(unit_bytes))) {}

Slots::ByUnit::~ByUnit() {
  if (is_built()) munmap(places_.load(), units_ * sizeof(std::atomic<Extent*>));
}

void Slots::ByUnit::build(const std::vector<std::unique_ptr<Extent>>& extents) {
  void* const zeros = mmap(nullptr, units_ * sizeof(std::atomic<Extent*>), PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  PETPS_CHECK(zeros != MAP_FAILED, "no address space for a table's map of its extents");
  auto* const places = static_cast<std::atomic<Extent*>*>(zeros);
  for (const auto& extent : extents) set(places, extent.get());
  places_.store(places, std::memory_order_release);
}

void Slots::ByUnit::set(std::atomic<Extent*>* places, Extent* extent) const {
  for (uint64_t at = extent->offset; at < extent->offset + extent->bytes;
       at += uint64_t{1} << shift_)
    places[at >> shift_].store(extent, std::memory_order_release);
}

void Slots::set_capacity(uint64_t capacity) {
  max_slots_.store(slots_for(capacity), std::memory_order_relaxed);
}

Slots::~Slots() {
  for (const auto& extent : extents_)  // the next owner of the memory may touch it
    PETPS_UNPOISON(pool_->at(extent->offset), extent->bytes);
}

std::unique_ptr<Slots::Extent> Slots::lay_out(uint32_t row_bytes, uint64_t offset, uint64_t bytes) {
  auto owner = std::make_unique<Extent>();
  Extent& extent = *owner;
  extent.offset = offset;
  extent.bytes = bytes;
  // Find the largest count whose map, headers and rows fit.
  uint64_t count = bytes * 8 / (uint64_t{row_bytes} * 8 + sizeof(SlotHeader) * 8 + 1) + 1;
  for (;; --count) {
    const uint64_t map = (kMapHeaderBytes + words_for(count) * 8 + 63) / 64 * 64;
    extent.headers = offset + map;
    extent.rows = (extent.headers + count * sizeof(SlotHeader) + kRowAlignment - 1) /
                  kRowAlignment * kRowAlignment;
    if (extent.rows + count * row_bytes <= offset + bytes) break;
  }
  extent.count = count;
  return owner;
}

void Slots::add(uint64_t offset, uint64_t bytes, bool old) {
  std::unique_ptr<Extent> extent = lay_out(row_bytes_, offset, bytes);
  extent->old = old;
  if (old) {
    walked_.store(false, std::memory_order_release);
  } else {
    extent->free_bits.assign(words_for(extent->count), 0);
    for (uint64_t i = 0; i < extent->count; ++i)
      extent->free_bits[i / 64] |= uint64_t{1} << (i % 64);
    extent->free = extent->count;
    free_.fetch_add(extent->count, std::memory_order_relaxed);
    PETPS_POISON(pool_->at(extent->rows), extent->count * row_bytes_);
  }
  allocator_bytes_.fetch_add(extent->headers - extent->offset + extent->free_bits.size() * 8,
                             std::memory_order_relaxed);
  total_.fetch_add(extent->count, std::memory_order_relaxed);
  const std::lock_guard lock(by_unit_mutex_);
  extents_.push_back(std::move(extent));
  if (by_unit_.is_built()) by_unit_.set(extents_.back().get());
}

Slots::ByUnit::View Slots::by_unit() const {
  if (!by_unit_.is_built()) [[unlikely]] {
    const std::lock_guard lock(by_unit_mutex_);
    if (!by_unit_.is_built()) by_unit_.build(extents_);
  }
  return by_unit_.view();
}

Slots::Extent* Slots::extent_of(SlotRef ref) const { return by_unit().at(ref); }

const Slots::Extent* Slots::find_extent(SlotRef ref) const {
  if (by_unit_.is_built()) return by_unit_.at(ref);
  const std::lock_guard lock(by_unit_mutex_);
  for (const auto& extent : extents_) {
    if (ref >= extent->offset && ref < extent->offset + extent->bytes) return extent.get();
  }
  return nullptr;
}

bool Slots::is_slot(SlotRef ref) const {
  const Extent* extent = find_extent(ref);
  return extent != nullptr && ref >= extent->rows &&
         ref < extent->rows + extent->count * row_bytes_ && (ref - extent->rows) % row_bytes_ == 0;
}

// Return the number of the slot within its extent. Exact while offset * row_bytes < 2**64; an
// extent has less than 2**32 bytes.
uint64_t Slots::slot_of(const Extent& extent, SlotRef ref) const {
  return static_cast<uint64_t>((static_cast<Wide>(ref - extent.rows) * row_share_) >> 64);
}

SlotHeader* Slots::header(SlotRef ref) const {
  const Extent* const extent = extent_of(ref);
  if (extent != nullptr && ref >= extent->rows) [[likely]] {
    const uint64_t slot = slot_of(*extent, ref);
    if (slot < extent->count) [[likely]]
      return reinterpret_cast<SlotHeader*>(pool_->at(extent->headers)) + slot;
  }
  // The ref of a damaged entry. Nothing writes to the header of a slot that was not allocated.
  static constinit thread_local SlotHeader none{};
  none = {};
  return &none;
}

// Add an extent, unless another thread adds one while this thread waits. Releases `lock` during
// the disk operation, which may be slow: a thread that reads or frees slots must not wait for it.
Status Slots::grow(std::unique_lock<std::mutex>& lock) {
  const size_t seen = extents_.size();
  lock.unlock();
  const std::lock_guard growing(growth_mutex_);
  lock.lock();
  if (extents_.size() != seen) return Status();
  const uint64_t wanted = extent_bytes(seen, row_bytes_, pool_->unit_bytes());
  // A free extent may be as long as all that the table has: the index of before a growth. But
  // slot_of() is exact only in a shorter one than 4 GiB.
  uint64_t has = 0;
  for (const auto& extent : extents_) has += extent->bytes;
  has = std::min(has, kMostExtentBytes);
  lock.unlock();
  auto extent = pool_->add_extent(static_cast<uint32_t>(layout::ExtentKind::kSlots), table_,
                                  {least_bytes(row_bytes_), wanted, std::max(2 * wanted, has)});
  const Status status =
      extent.ok() && extent.value().reused ? zero_headers(extent.value()) : extent.status();
  lock.lock();
  PETPS_RETURN_IF_ERROR(status);
  add(extent.value().offset, extent.value().bytes, /*old=*/false);
  return Status();
}

// Zero the headers of a reused extent, which belong to rows of the dropped table. After a power
// loss under durability `process` an entry may have reached the disk without its row; a header
// that still named the key would then vouch for the old row.
Status Slots::zero_headers(const Pool::Extent& extent) {
  if (!kernel_writes_back()) return Status();
  const auto parts = lay_out(row_bytes_, extent.offset, extent.bytes);
  media::Flusher flusher(pool_->medium());
  pool_->zero(parts->headers, parts->rows, Site::kReusedExtent, flusher);
  return pool_->medium().sync_range(pool_->at(parts->headers), parts->rows - parts->headers,
                                    Site::kReusedSync);
}

// Add an extent if too few slots are free; called once per round of the cursor, and once per
// extent's worth of replaced rows, so that a table whose rows change has its share soon, and one
// that is only loaded takes none. When few slots are free they lie far apart, and so do rows that
// are written one after another: each write then costs a page-table walk, a header's line and, on a
// file, a clean folio. Spare slots keep them near. If there is no room for more, go on without.
void Slots::grow_spare(std::unique_lock<std::mutex>& lock) {
  const uint64_t total = total_.load(std::memory_order_relaxed);
  replaced_ = 0;
  if (free_.load(std::memory_order_relaxed) < total / kSpareShare && total < max_slots())
    static_cast<void>(grow(lock));
}

// Return true if only the kernel decides when a store reaches the disk. Otherwise a drain does: it
// cleans all pages, so neighbouring slots are better than recent ones.
bool Slots::kernel_writes_back() const {
  const media::Media& medium = pool_->medium();
  return medium.kind() == media::Kind::kFile && medium.durability() == media::Durability::kProcess;
}

bool Slots::is_recent(const Extent& extent, SlotRef ref) const {
  if (extent.written.empty()) return false;
  const uint16_t written = extent.written[(ref - extent.offset) / kRegionBytes];
  return static_cast<uint16_t>(written_now() - written) <= kRecentParts;
}

// Return how many free slots make a group of words dense: 5/4 of its share of the free slots, but
// not more than it has slots.
uint64_t Slots::dense_group() const {
  const uint64_t slots = group_words_ * 64;
  return std::min(slots, free_.load(std::memory_order_relaxed) * slots * 5 /
                             (total_.load(std::memory_order_relaxed) * 4));
}

uint16_t Slots::written_now() const {
  return static_cast<uint16_t>(written_bytes_ / kPartBytes + kRecentParts + 1);
}

void Slots::note_written(std::span<const SlotRef> refs) {
  const ByUnit::View extents = by_unit();
  const uint16_t now = written_now();
  for (const SlotRef ref : refs) {
    Extent& extent = *extents.at(ref);
    if (extent.written.empty()) {
      extent.written.assign((extent.bytes + kRegionBytes - 1) / kRegionBytes, 0);
      allocator_bytes_.fetch_add(extent.written.size() * sizeof now, std::memory_order_relaxed);
    }
    extent.written[(ref - extent.offset) / kRegionBytes] = now;
  }
  written_bytes_ += refs.size() * row_bytes_;
}

// Take up to out.size() free slots of pages that are probably dirty, the last one freed first.
uint64_t Slots::take_recent(std::span<SlotRef> out, SlotHeader** headers) {
  uint64_t taken = 0;
  const ByUnit::View extents = by_unit();
  while (taken < out.size() && !recent_.empty()) {
    const SlotRef ref = recent_.back();
    recent_.pop_back();
    Extent& extent = *extents.at(ref);
    const uint64_t slot = slot_of(extent, ref);
    const uint64_t bit = uint64_t{1} << (slot % 64);
    // It may have been taken since, and its page may have been written back.
    if ((extent.free_bits[slot / 64] & bit) == 0 || !is_recent(extent, ref)) continue;
    extent.free_bits[slot / 64] &= ~bit;
    extent.free -= 1;
    if (headers != nullptr)
      headers[taken] = reinterpret_cast<SlotHeader*>(pool_->at(extent.headers)) + slot;
    out[taken++] = ref;
  }
  free_.fetch_sub(taken, std::memory_order_relaxed);
  return taken;
}

// Return the words of the group that begins at the cursor if fewer of its slots are free than
// `min_free` of a whole group, else 0. Also return 0 within a group: what is left of it is near.
uint64_t Slots::sparse_words(const Extent& extent, uint64_t min_free) const {
  if (cursor_word_ % group_words_ != 0) return 0;
  const auto words = std::span(extent.free_bits).subspan(cursor_word_);
  const auto group = words.first(std::min<size_t>(group_words_, words.size()));
  uint64_t free = 0;
  for (const uint64_t word : group) free += static_cast<uint64_t>(std::popcount(word));
  // The last group of an extent is shorter, and its last word may have bits without a slot.
  const uint64_t slots = std::min(group.size() * 64, extent.count - cursor_word_ * 64);
  return free * group_words_ * 64 < min_free * slots ? group.size() : 0;
}

// Take up to out.size() free slots in address order, starting at the cursor.
uint64_t Slots::take_locked(std::span<SlotRef> out, SlotHeader** headers, Choice choice,
                            bool* finished_round) {
  uint64_t taken = 0;
  uint64_t may_skip = choice == Choice::kDense ? out.size() * kSkippedWords : 0;
  const uint64_t min_free = dense_group();
  const size_t extents = extents_.size();
  for (size_t visited = 0; visited <= extents && taken < out.size(); ++visited) {
    Extent& extent = *extents_[cursor_extent_];
    if (extent.free > 0) {
      const uint64_t before = taken;
      auto* const first_header = reinterpret_cast<SlotHeader*>(pool_->at(extent.headers));
      bool stopped = false;
      while (cursor_word_ < extent.free_bits.size()) {
        if (may_skip > 0) {
          const uint64_t skipped = sparse_words(extent, min_free);
          may_skip -= std::min(may_skip, skipped);
          cursor_word_ += skipped;
          if (skipped > 0) continue;
        }
        uint64_t word = extent.free_bits[cursor_word_];
        for (; word != 0 && taken < out.size(); word &= word - 1) {
          const uint64_t slot = cursor_word_ * 64 + static_cast<uint64_t>(std::countr_zero(word));
          const SlotRef ref = extent.rows + slot * row_bytes_;
          stopped = choice == Choice::kRecent && !is_recent(extent, ref);
          if (stopped) break;
          if (headers != nullptr) headers[taken] = first_header + slot;
          out[taken++] = ref;
        }
        extent.free_bits[cursor_word_] = word;
        if (stopped || taken == out.size()) break;
        ++cursor_word_;
      }
      extent.free -= taken - before;
      if (stopped || taken == out.size()) break;
    }
    cursor_word_ = 0;
    cursor_extent_ = (cursor_extent_ + 1) % extents;
    if (cursor_extent_ == 0) *finished_round = true;
  }
  free_.fetch_sub(taken, std::memory_order_relaxed);
  return taken;
}

Status Slots::allocate(std::span<SlotRef> out, bool* wait_for_walk, SlotHeader** headers) {
  *wait_for_walk = false;
  if (out.empty()) return Status();
  std::unique_lock lock(mutex_);
  while (free_.load(std::memory_order_relaxed) < out.size()) {
    const bool at_limit = total_.load(std::memory_order_relaxed) >= max_slots() + out.size();
    Status status =
        at_limit ? Status(Code::kResourceExhausted, "every spare slot waits for readers to finish")
                 : grow(lock);
    if (status.ok()) continue;
    *wait_for_walk = needs_walk();
    return status;
  }
  bool finished_round = false;
  uint64_t taken = 0;
  const auto rest = [&] { return out.subspan(taken); };
  const auto rest_headers = [&] { return headers == nullptr ? nullptr : headers + taken; };
  const bool recent = kernel_writes_back();
  if (recent) {
    taken += take_locked(rest(), rest_headers(), Choice::kRecent, &finished_round);
    taken += take_recent(rest(), rest_headers());
    bool skipped_round = false;  // it must not make the table grow
    taken += take_locked(rest(), rest_headers(), Choice::kDense, &skipped_round);
  }
  taken += take_locked(rest(), rest_headers(), Choice::kAny, &finished_round);
  PETPS_CHECK(taken == out.size(), "the free count and the free bits disagree");
  if (recent) note_written(out);
  for (const SlotRef ref : out) PETPS_UNPOISON(row(ref), row_bytes_);
  if (finished_round || replaced_ > extents_.back()->count) grow_spare(lock);
  return Status();
}

// Free the slot. Return false and leave it alone if `ref` is no slot of the table, or a free one:
// only a damaged entry has named it, because no other entry's slot is released twice.
bool Slots::free_locked(Extent* extent, SlotRef ref) {
  if (extent == nullptr || ref < extent->rows) return false;
  const uint64_t slot = slot_of(*extent, ref);
  if (slot >= extent->count || ref != extent->rows + slot * row_bytes_) return false;
  uint64_t& word = extent->free_bits[slot / 64];
  const uint64_t bit = uint64_t{1} << (slot % 64);
  if ((word & bit) != 0) return false;
  word |= bit;
  extent->free += 1;
  PETPS_POISON(row(ref), row_bytes_);
  return true;
}

void Slots::release(std::span<const SlotRef> refs) {
  std::lock_guard lock(mutex_);
  const bool walking = needs_walk();
  const size_t kept = deferred_.capacity() + recent_.capacity();
  const ByUnit::View extents = by_unit();
  const bool recent = kernel_writes_back();
  uint64_t freed = 0;
  for (const SlotRef ref : refs) {
    Extent* const extent = extents.at(ref);
    if (walking && extent != nullptr && extent->old) {
      deferred_.push_back(ref);
    } else if (free_locked(extent, ref)) [[likely]] {
      freed += 1;
      if (recent && recent_.size() < kMaxRecent && is_recent(*extent, ref)) recent_.push_back(ref);
    } else {
      keep_unused(1);  // the slot that the key had, wherever it is
    }
  }
  replaced_ += refs.size();
  free_.fetch_add(freed, std::memory_order_relaxed);
  allocator_bytes_.fetch_add((deferred_.capacity() + recent_.capacity() - kept) * sizeof(SlotRef),
                             std::memory_order_relaxed);
}

// Return the extent's marks. Several threads may race to make the array; one array is kept.
std::atomic<uint64_t>* Slots::marks_of(Extent* extent) {
  std::atomic<uint64_t>* marks = extent->marks.load(std::memory_order_acquire);
  if (marks != nullptr) return marks;
  auto fresh = std::make_unique<std::atomic<uint64_t>[]>(words_for(extent->count));
  if (!extent->marks.compare_exchange_strong(marks, fresh.get(), std::memory_order_acq_rel))
    return marks;
  allocator_bytes_.fetch_add(words_for(extent->count) * 8, std::memory_order_relaxed);
  return fresh.release();
}

void Slots::mark(SlotRef ref) {
  Extent* extent = extent_of(ref);
  if (extent == nullptr || !extent->old || !is_slot(ref)) return;  // verify reports invalid refs
  const uint64_t slot = slot_of(*extent, ref);
  marks_of(extent)[slot / 64].fetch_or(uint64_t{1} << (slot % 64), std::memory_order_relaxed);
}

// Set the free bits of an old extent, now that they are known.
void Slots::adopt_free_bits(Extent* extent, std::vector<uint64_t> bits) {
  extent->free_bits = std::move(bits);
  extent->free = 0;
  for (const uint64_t word : extent->free_bits)
    extent->free += static_cast<uint64_t>(std::popcount(word));
  free_.fetch_add(extent->free, std::memory_order_relaxed);
  const std::atomic<uint64_t>* const marks =
      extent->marks.exchange(nullptr, std::memory_order_acq_rel);
  if (marks == nullptr)  // otherwise the free bits replace the marks, which have the same size
    allocator_bytes_.fetch_add(extent->free_bits.size() * 8, std::memory_order_relaxed);
  delete[] marks;
#if defined(__SANITIZE_ADDRESS__)
  for (uint64_t slot = 0; slot < extent->count; ++slot) {
    if ((extent->free_bits[slot / 64] >> (slot % 64)) & 1)
      PETPS_POISON(row(extent->rows + slot * row_bytes_), row_bytes_);
  }
#endif
}

void Slots::end_walk_locked() {
  walked_.store(true, std::memory_order_release);
  uint64_t freed = 0;
  for (const SlotRef ref : deferred_) freed += free_locked(extent_of(ref), ref) ? 1 : 0;
  keep_unused(deferred_.size() - freed);
  free_.fetch_add(freed, std::memory_order_relaxed);
  allocator_bytes_.fetch_sub(deferred_.capacity() * sizeof(SlotRef), std::memory_order_relaxed);
  deferred_ = std::vector<SlotRef>();  // `= {}` would keep the memory
}

void Slots::finish_walk() {
  std::lock_guard lock(mutex_);
  if (!needs_walk()) return;
  for (const auto& owner : extents_) {
    Extent& extent = *owner;
    if (!extent.old) continue;
    std::vector<uint64_t> bits(words_for(extent.count), ~uint64_t{0});
    const std::atomic<uint64_t>* const marks = extent.marks.load(std::memory_order_acquire);
    for (size_t w = 0; marks != nullptr && w < bits.size(); ++w)
      bits[w] = ~marks[w].load(std::memory_order_relaxed);
    if (extent.count % 64 != 0) bits.back() &= (uint64_t{1} << (extent.count % 64)) - 1;
    adopt_free_bits(&extent, std::move(bits));
  }
  end_walk_locked();
}

void Slots::load_free_maps() {
  std::lock_guard lock(mutex_);
  for (const auto& owner : extents_) {
    const Extent& extent = *owner;
    if (!extent.old) continue;
    uint64_t stored;
    const std::byte* map = pool_->at(extent.offset);
    std::memcpy(&stored, map, sizeof stored);
    if (stored != base::checksum64(map + kMapHeaderBytes, words_for(extent.count) * 8)) return;
  }
  for (const auto& owner : extents_) {
    Extent& extent = *owner;
    if (!extent.old) continue;
    std::vector<uint64_t> bits(words_for(extent.count));
    std::memcpy(bits.data(), pool_->at(extent.offset) + kMapHeaderBytes, bits.size() * 8);
    adopt_free_bits(&extent, std::move(bits));
  }
  end_walk_locked();
}

void Slots::store_free_maps(media::Flusher& flusher) {
  std::lock_guard lock(mutex_);
  for (const auto& owner : extents_) {
    const Extent& extent = *owner;
    std::vector<uint64_t> image(1 + extent.free_bits.size());
    std::copy(extent.free_bits.begin(), extent.free_bits.end(), image.begin() + 1);
    image[0] = base::checksum64(image.data() + 1, extent.free_bits.size() * 8);
    flusher.copy(pool_->at(extent.offset), image.data(), image.size() * 8, Site::kFreeMap);
  }
}

bool Slots::is_free(SlotRef ref) const {
  std::lock_guard lock(mutex_);
  const Extent* extent = extent_of(ref);
  if (extent->free_bits.empty()) return false;  // not known before the walk
  const uint64_t slot = slot_of(*extent, ref);
  return (extent->free_bits[slot / 64] >> (slot % 64)) & 1;
}

}  // namespace petps::pool
