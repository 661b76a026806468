// Slots of one table: where rows go. Part of room pool.
//
// An extent of slots is [free map | headers | rows]. The free map is written only by a clean close; in between the free
// list lives in DRAM as one bit per slot. After an unclean stop nothing is free in the extents that existed at open until
// finish_walk(): new rows take fresh extents.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "pool/pool.h"

namespace petps::pool {

class Slots {
 public:
  Slots(Pool& pool, uint32_t table, uint32_t row_bytes, uint64_t capacity);
  ~Slots();
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  // Fills `out` with free slots. kResourceExhausted: the disk is full, or kMaxSlots is reached and the caller should reclaim and
  // ask again; nothing is taken then. `wait_for_walk` tells that the walk will free some.
  base::Status allocate(std::span<SlotRef> out, bool* wait_for_walk);
  // Slots nobody can read any more. Before finish_walk(), those of old extents are kept aside.
  void release(std::span<const SlotRef> refs);

  std::byte* row(SlotRef ref) const { return pool_->at(ref); }
  SlotHeader* header(SlotRef ref) const;
  // The same for refs that mostly share an extent: *hint is the extent of the last one, at first 0.
  SlotHeader* header(SlotRef ref, uint32_t* hint) const;
  // True when ref is the start of a slot of this table.
  bool valid(SlotRef ref) const;

  // Walk of an unclean open: mark what is reachable (any thread), then finish. The caller sees to it that no mark() runs beside
  // finish_walk() or load_free_maps(), or after them.
  bool needs_walk() const { return !walked_.load(std::memory_order_acquire); }
  void mark(SlotRef ref);
  void finish_walk();
  // Clean open: takes the stored free maps instead, unless one fails its checksum: needs_walk() stays true then.
  void load_free_maps();
  // Clean close. Flushed, not drained.
  void store_free_maps(media::Flusher& flusher);

  bool is_free(SlotRef ref) const;
  uint64_t total() const { return total_.load(std::memory_order_relaxed); }
  uint64_t free_count() const { return free_.load(std::memory_order_relaxed); }
  uint64_t max_slots() const { return max_slots_; }
  uint64_t allocator_bytes() const;
  uint32_t row_bytes() const { return row_bytes_; }

 private:
  friend class Pool;
  struct Extent {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint64_t count = 0;    // slots
    uint64_t headers = 0;  // pool offset
    uint64_t rows = 0;     // pool offset
    bool old = false;      // existed at open
    uint64_t free = 0;
    std::vector<uint64_t> free_bits;
    std::unique_ptr<std::atomic<uint64_t>[]> marks;  // old extents until finish_walk
  };
  Extent shape(uint64_t offset, uint64_t bytes) const;
  void add(uint64_t offset, uint64_t bytes,
           bool old);  // an extent from the catalogue, or a new one
  // Number of the extent that would hold ref; kMaxSlotExtents when it lies before the first.
  uint32_t ordinal_of(SlotRef ref) const;
  Extent* extent_of(SlotRef ref) const;
  SlotHeader* header_in(const Extent& extent, SlotRef ref) const;
  base::Status grow();
  void free_locked(SlotRef ref);
  void adopt_free_bits(Extent* extent, std::vector<uint64_t> bits);
  void end_walk_locked();
  uint64_t take_locked(std::span<SlotRef> out);

  Pool* pool_;
  uint32_t table_;
  uint32_t row_bytes_;
  uint64_t capacity_;
  uint64_t max_slots_;
  mutable std::mutex mutex_;
  // Extents by ordinal. Never moves and never shrinks, so extent_of needs no lock.
  std::unique_ptr<std::unique_ptr<Extent>[]> extents_;
  std::unique_ptr<uint64_t[]> offsets_;  // of each extent, side by side for the search
  std::atomic<uint32_t> extent_count_{0};
  uint32_t cursor_extent_ = 0;
  uint64_t cursor_word_ = 0;
  std::vector<SlotRef> deferred_;
  std::atomic<uint64_t> total_{0};
  std::atomic<uint64_t> free_{0};
  std::atomic<bool> walked_{true};
};

inline constexpr uint32_t kMaxSlotExtents = 1 << 15;  // of one table: 2 TiB of rows at 64 MiB each

// Slots beyond capacity that replaced rows may occupy until they are reclaimed.
inline constexpr uint64_t kSpareSlots = 65536;

}  // namespace petps::pool
