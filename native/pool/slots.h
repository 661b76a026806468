// Slots of one table: the places of its rows. Part of room pool.
//
// An extent of slots is [free map | headers | rows]. Only a clean close writes the free map;
// until then the free list is in DRAM, one bit per slot. After an unclean stop, nothing is free
// in the extents that existed at open until finish_walk(): new rows take fresh extents.
//
// Free slots are taken in address order, round after round, so that rows that are written one after
// another lie near each other. But where the kernel writes dirty pages back automatically (a file
// with durability `process`), free slots of pages written a short time ago come first: these pages
// are dirty already. The first store to a clean page costs a fault, and the write-back of a folio.
// Then come regions where many slots are free, so that one folio takes many rows; where few are
// free, more become free until the next round.
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

  // Fill `out` with free slots. Return kResourceExhausted if the disk is full or max_slots() is
  // reached; the caller should reclaim and retry. Nothing is taken then, and `wait_for_walk` says
  // whether the walk will free some. If headers is not null, set headers[i] = header(out[i]).
  base::Status allocate(std::span<SlotRef> out, bool* wait_for_walk,
                        SlotHeader** headers = nullptr);
  // Free slots that no thread can read any more. Before finish_walk(), slots of old extents are
  // kept aside. For a ref of a damaged entry, which is no slot of the table or a free one, keep one
  // slot unused.
  void release(std::span<const SlotRef> refs);

  // Let `slots` more slots exist, in place of some that nobody releases (table/SCRUB.md).
  void keep_unused(uint64_t slots) { kept_unused_.fetch_add(slots, std::memory_order_relaxed); }
  uint64_t kept_unused() const { return kept_unused_.load(std::memory_order_relaxed); }

  std::byte* row(SlotRef ref) const { return pool_->at(ref); }
  // Of a ref that is no slot of the table, an empty one of this thread.
  SlotHeader* header(SlotRef ref) const;
  // Return true if ref is the start of a slot of this table.
  bool is_slot(SlotRef ref) const;

  // Walk of an unclean open: mark the reachable slots (any thread), then finish. The caller
  // ensures that no mark() runs beside or after finish_walk() or load_free_maps().
  bool needs_walk() const { return !walked_.load(std::memory_order_acquire); }
  void mark(SlotRef ref);
  void finish_walk();
  // Clean open: take the stored free maps instead. If one fails its checksum, take none;
  // needs_walk() stays true.
  void load_free_maps();
  // Clean close: store the free maps; flush them, but do not drain.
  void store_free_maps(media::Flusher& flusher);

  bool is_free(SlotRef ref) const;
  uint64_t total() const { return total_.load(std::memory_order_relaxed); }
  uint64_t free_count() const { return free_.load(std::memory_order_relaxed); }
  // The most bytes that the slots of a table take in a new pool, when the table is full and its
  // rows change: in the pool, as whole extents, and in this process's memory.
  struct Footprint {
    uint64_t pool = 0;
    uint64_t memory = 0;
  };
  static Footprint footprint_of(uint32_t row_bytes, uint64_t capacity, uint64_t unit_bytes);
  uint64_t max_slots() const { return max_slots_.load(std::memory_order_relaxed) + kept_unused(); }
  void set_capacity(uint64_t capacity);
  uint64_t allocator_bytes() const { return allocator_bytes_.load(std::memory_order_relaxed); }
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
    // One bit per slot. For an old extent: empty until the walk ends, so that opening costs
    // nothing.
    std::vector<uint64_t> free_bits;
    // By region of kRegionBytes: written_now() at its last write, modulo 2^16; empty before the
    // first. A wrong "recent" costs time only.
    std::vector<uint16_t> written;
    // Only for an old extent, from its first mark until the walk ends. One bit per slot; owned.
    std::atomic<std::atomic<uint64_t>*> marks{nullptr};
    ~Extent() { delete[] marks.load(std::memory_order_relaxed); }
  };
  static std::unique_ptr<Extent> lay_out(uint32_t row_bytes, uint64_t offset, uint64_t bytes);
  // Add an extent of the catalogue (old), or a new one.
  void add(uint64_t offset, uint64_t bytes, bool old);
  Extent* extent_of(SlotRef ref) const;          // null if no extent of this table has the ref
  const Extent* find_extent(SlotRef ref) const;  // the same, without building by_unit_
  uint64_t slot_of(const Extent& extent, SlotRef ref) const;
  base::Status grow(std::unique_lock<std::mutex>& lock);
  void grow_spare(std::unique_lock<std::mutex>& lock);
  base::Status zero_headers(const Pool::Extent& extent);
  bool free_locked(Extent* extent, SlotRef ref);
  std::atomic<uint64_t>* marks_of(Extent* extent);
  void adopt_free_bits(Extent* extent, std::vector<uint64_t> bits);
  void end_walk_locked();
  enum class Choice {
    kRecent,  // until the first region whose pages are probably clean
    kDense,   // without the groups of words where few slots are free, as long as few are skipped
    kAny,
  };
  uint64_t take_locked(std::span<SlotRef> out, SlotHeader** headers, Choice choice,
                       bool* finished_round);
  uint64_t sparse_words(const Extent& extent, uint64_t min_free) const;
  uint64_t dense_group() const;
  bool kernel_writes_back() const;
  uint16_t written_now() const;
  void note_written(std::span<const SlotRef> refs);
  bool is_recent(const Extent& extent, SlotRef ref) const;
  uint64_t take_recent(std::span<SlotRef> out, SlotHeader** headers);

  Pool* pool_;
  uint32_t table_;
  uint32_t row_bytes_;
  uint64_t row_share_;  // 2**64 / row_bytes_, rounded up: a multiplication replaces the division
  std::atomic<uint64_t> max_slots_;
  uint64_t group_words_;      // of free bits: the slots of one region, or 64 slots
  std::mutex growth_mutex_;   // one extent at a time; held while the disk works; before mutex_
  mutable std::mutex mutex_;  // guards the free slots; no disk operation holds it
  std::vector<std::unique_ptr<Extent>> extents_;  // by ordinal; under mutex_ and by_unit_mutex_
  // The same extents by unit of the pool, one place for each unit of the address range, so that
  // extent_of needs no lock. Refs are random, so a binary search would mispredict every step. The
  // first use builds it, and a pull never uses it. Its pages are zero pages until an extent is
  // stored in them.
  class ByUnit {
   public:
    ByUnit(uint64_t reserved, uint64_t unit_bytes);
    ~ByUnit();
    ByUnit(const ByUnit&) = delete;
    ByUnit& operator=(const ByUnit&) = delete;
    bool is_built() const { return places_.load(std::memory_order_acquire) != nullptr; }
    // What at() reads, loaded once: a loop over refs must not load it again after every store.
    struct View {
      const std::atomic<Extent*>* places;
      uint64_t units;
      uint32_t shift;
      Extent* at(SlotRef ref) const {
        return ref >> shift < units ? places[ref >> shift].load(std::memory_order_acquire)
                                    : nullptr;
      }
    };
    View view() const { return {places_.load(std::memory_order_acquire), units_, shift_}; }
    Extent* at(SlotRef ref) const { return view().at(ref); }
    // The caller orders these two calls.
    void build(const std::vector<std::unique_ptr<Extent>>& extents);
    void set(Extent* extent) { set(places_.load(std::memory_order_relaxed), extent); }

   private:
    void set(std::atomic<Extent*>* places, Extent* extent) const;
    std::atomic<std::atomic<Extent*>*> places_{nullptr};
    uint64_t units_;
    uint32_t shift_;
  };
  ByUnit::View by_unit() const;  // the first call builds it
  mutable ByUnit by_unit_;
  mutable std::mutex by_unit_mutex_;  // for building by_unit_ and adding an extent; after mutex_
  size_t cursor_extent_ = 0;
  uint64_t cursor_word_ = 0;
  std::vector<SlotRef> recent_;  // free slots of recent regions; some have been taken since
  uint64_t replaced_ = 0;        // rows whose slots were released since grow_spare()
  uint64_t written_bytes_ = 0;   // rows for which a slot was taken
  std::vector<SlotRef> deferred_;
  std::atomic<uint64_t> kept_unused_{0};
  std::atomic<uint64_t> total_{0};
  std::atomic<uint64_t> free_{0};
  std::atomic<uint64_t> allocator_bytes_{0};  // status() reads it while mutex_ is held
  std::atomic<bool> walked_{true};
};

// Slots beyond capacity for replaced rows until they are reclaimed.
inline constexpr uint64_t kSpareSlots = 65536;
inline constexpr uint64_t kBatchSlots = 65536;  // the most that one allocate() takes

}  // namespace petps::pool
