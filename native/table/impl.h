// The internals of Table and Tables, shared by the files of this room.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <vector>

#include "epoch/epoch.h"
#include "index/index.h"
#include "pool/slots.h"
#include "table/heat.h"
#include "table/hot.h"
#include "table/range_locks.h"
#include "table/table.h"

namespace petps::table {

class Retiring;

struct Table::Impl final : epoch::Reclaimer {
  Impl(Tables::Impl& tables, const pool::TableRecord& table);
  ~Impl() override;
  void reclaim(std::span<const uint64_t> items) override {
    slots.release(items);
    retired.fetch_sub(items.size(), std::memory_order_release);  // may let a dropped table go
  }

  bool walked() const { return !slots.needs_walk() && index().walked(); }
  bool synced() const {  // true if a drain is a flush of the disk
    return pool.medium().kind() == media::Kind::kFile &&
           pool.medium().durability() == media::Durability::kPower;
  }
  base::Status check_writable() const;  // an error if the table cannot be written
  // Reserve room for one more row; return false if capacity leaves none now. `occupied` includes
  // the reservations of batches in flight, so no two batches take the same room.
  bool reserve_row();
  void set_counts(uint64_t rows, uint64_t displaced);  // for counts known without a walk
  // Allocate slots; wait for the walk or for readers where that helps. `retiring` is the
  // caller's, which may be all that is free. headers: see Slots::allocate.
  base::Status allocate(std::span<pool::SlotRef> refs, Retiring& retiring,
                        pool::SlotHeader** headers = nullptr);
  void walk();
  void read_ahead(uint64_t bucket) const;
  base::Result<uint64_t> migrate(std::span<const uint64_t> hot_keys,
                                 HotKeys::Time now = std::chrono::steady_clock::now());
  base::Result<uint64_t> rehome();
  // Run a bounded part of a recount. Return true if the recount is complete or impossible now.
  // Add the number of counters that it lowered to `lowered`.
  bool recount_step(uint64_t* lowered);
  bool wants_recount();

  // ---- growing: grow.cc, GROW.md
  index::Index& add_array(const pool::BucketArray& array);
  base::Status grow(const GrowOptions& options);
  base::Status begin_growing();
  base::Status copy_and_swap(const GrowOptions& options);
  base::Status copy_buckets(const index::Index& copy, const GrowOptions& options);
  base::Status swap_array(const pool::BucketArray& array, index::Index* copy,
                          const GrowOptions& options);
  base::Status swap_locked(const pool::BucketArray& array, index::Index* copy, bool* is_swapped);
  // Free the array before the swap, if no pin can read it any more.
  void finish_growing();
  // Give the keys of a table that grows the same refs in `mirrored` as in index(). The caller holds
  // their ranges, and drains.
  void mirror(std::span<const uint64_t> keys, media::Flusher& flusher);

  // ---- expiry: expire.cc, EXPIRY.md
  // Return the stamp of a batch's rows; the table gives it to pushes if its rows expire.
  uint32_t stamp_of(const Batch& batch) const {
    const uint64_t given = push_stamp.load(std::memory_order_acquire);
    return given == 0 ? batch.stamp : static_cast<uint32_t>(given);
  }
  void refresh_push_stamp();
  base::Result<uint64_t> expire(const ExpireOptions& options);
  std::vector<pool::EventClock> due_clocks() const;
  base::Result<bool> walk_expired(const ExpireOptions& options, uint64_t rule_then,
                                  epoch::Reader& reader, uint64_t* deleted);
  void collect_expired(const index::Index& array, const std::vector<pool::EventClock>& clocks,
                       uint64_t from, std::vector<uint64_t>* keys,
                       std::vector<uint32_t>* stamps) const;
  base::Status delete_expired(uint64_t rule_then, std::vector<uint64_t>* keys,
                              std::vector<uint32_t>* stamps, uint64_t* deleted, bool* ends);
  base::Status delete_of_stamp(std::span<const uint64_t> keys, std::span<const uint32_t> stamps,
                               uint64_t* deleted);
  void describe_expiry(TableStatus* status) const;

  // ---- scrubbing: scrub.cc, SCRUB.md
  // Return what is wrong with the row that the key has; nothing if it is whole. The caller holds a
  // pin or the key's range.
  std::optional<DamagedRow> examine(uint64_t key, pool::SlotRef ref) const;
  bool is_missing(uint64_t key) const;
  // The caller of these two holds the key's range.
  void add_missing(uint64_t key);
  void forget_missing(uint64_t key) {
    if (missing_rows.load(std::memory_order_relaxed) > 0) erase_missing(key);
  }
  void erase_missing(uint64_t key);

  // ---- eviction: evict.cc, EVICTION.md
  base::Status make_room(const Batch& batch, std::unique_lock<std::mutex>* turn);
  uint64_t count_absent(std::span<const uint64_t> keys, epoch::Reader& reader);
  base::Status evict_rows(uint64_t count, WhenFull rule, std::span<const uint64_t> kept,
                          epoch::Reader& reader, uint64_t* deleted);
  void choose_victims(uint64_t bucket, WhenFull rule, std::span<const uint64_t> kept,
                      std::vector<uint64_t>* keys, std::vector<uint32_t>* stamps);
  void renew_heat(uint64_t rows);
  static uint64_t time_as_stamp();
  void advance_push_stamp();

  Tables::Impl& owner;
  pool::Pool& pool;
  epoch::Domain& epochs;
  pool::TableRecord record;
  pool::Slots& slots;
  // The array of buckets that lookups and writers search. A lookup loads it after its pin, a writer
  // while it holds a range, a move or a scan while it holds moves_gate.
  index::Index& index() const { return *current.load(std::memory_order_acquire); }
  std::atomic<index::Index*> current{nullptr};
  std::vector<std::unique_ptr<index::Index>> arrays;  // of this open; under owner.moves_mutex
  std::atomic<uint64_t> capacity;
  std::atomic<uint32_t> expire_after;  // seconds, 0: never
  // The version of a push that is applied now, or its time if rows do not expire but are evicted.
  // 0: pushes have the stamps that they give.
  std::atomic<uint64_t> push_stamp{0};
  std::atomic<uint64_t> expired{0};  // rows, since the open
  std::mutex expire_mutex;           // one walk at a time
  std::mutex expiry_mutex;           // one tick or one change of expire_after at a time
  std::mutex rule_mutex;             // held while rows are deleted by the present rule
  uint64_t expiry_rule = 0;          // changes with expire_after; under rule_mutex
  mutable std::mutex expiry_state_mutex;
  // By partition: the event time when the last complete walk began; under expiry_state_mutex.
  std::vector<uint64_t> expired_until;
  std::atomic<WhenFull> when_full{WhenFull::kRefuse};
  std::mutex evict_mutex;            // one batch makes room, and takes it, at a time
  std::atomic<uint64_t> evicted{0};  // rows, since the open
  // How often keys are pulled, if the coldest rows are evicted. Pulls may hold an earlier one.
  std::atomic<Heat*> heat{nullptr};
  std::mutex heat_mutex;
  std::vector<std::unique_ptr<Heat>> heats;  // all of this open; under heat_mutex
  // Keys whose damaged rows were removed, and that nothing has written or deleted since. A key
  // changes under its range; the mutex guards the set. missing_rows is its size.
  mutable std::mutex missing_mutex;
  std::unordered_set<uint64_t> missing;
  std::atomic<uint64_t> missing_rows{0};
  uint32_t row_lines;  // cache lines of a row that lookup prefetches
  // Rows, and reserved room for new keys of batches in flight. When a reservation becomes a row,
  // this number stays; a deletion is subtracted once it is durable. Until the walk has counted
  // the rows of an unclean open, it holds the largest possible number of rows.
  std::atomic<uint64_t> occupied{0};
  uint64_t assumed_rows = 0;         // the part of `occupied` that the walk will correct
  std::atomic<uint64_t> erased{0};   // since the last re-homing
  std::atomic<uint64_t> retired{0};  // slots of replaced rows that are not released yet
  // The numbers of batches that began and that ended; verify compares them to see that nothing
  // changed.
  std::atomic<uint64_t> begun{0};
  std::atomic<uint64_t> ended{0};
  RangeLocks range_locks;
  Turns turns{std::clamp(std::thread::hardware_concurrency(), 1u, uint32_t{kRanges})};
  bool dropped = false;  // changes under all ranges of `range_locks`
  // While the table grows: the array that writers keep equal to index(). Changes under all ranges.
  index::Index* mirrored = nullptr;
  std::atomic<bool> lacks_keys{false};  // a mirrored key found no room
  // Bytes of the other array, the copy or the one before the swap, while there is one.
  std::atomic<uint64_t> second_index_bytes{0};
  bool grows = false;  // no move and no recount begins; under owner.moves_mutex
  // The array before the swap, until no pin is left that may read it.
  struct Outgrown final : epoch::Reclaimer {
    void reclaim(std::span<const uint64_t>) override { unread.store(true); }
    pool::BucketArray array;
    std::atomic<bool> retired{false};
    std::atomic<bool> unread{false};
  } outgrown;
  // Buffers of the slice that holds the range; a slice that holds all ranges uses the first. One
  // item per key or slot.
  struct Scratch {
    std::vector<index::Entry*> entries;
    std::vector<pool::SlotRef> old;
    std::vector<pool::SlotRef> taken;
    std::vector<pool::SlotHeader*> headers;
  };
  std::array<Scratch, kRanges> scratch;
  Gate walk_gate;  // shared: a batch publishes and marks; exclusive: the walk takes the marks
  mutable MovesGate moves_gate;
  enum class Recount { kNone, kCounts, kInstalls } recount = Recount::kNone;  // under moves_mutex
  uint64_t installed = 0;  // buckets done by the recount that installs
  std::mutex hot_mutex;
  std::vector<uint64_t> hot_keys;  // pending hot sets
  HotKeys hot;                     // under moves_mutex
};

// The applied version of one instance. Instance 0: this place is unused.
struct Applied {
  std::atomic<uint32_t> instance{0};
  std::atomic<uint64_t> version{0};
  std::atomic<bool> is_partial{false};  // see Tables::is_partial
};

struct Tables::Impl final : epoch::Reclaimer {
  explicit Impl(std::unique_ptr<pool::Pool> opened);
  ~Impl() override;
  void reclaim(std::span<const uint64_t> items) override;  // ids of dropped tables
  TablePointer add(const pool::TableRecord& record);
  void start_background();
  void stop_background();
  void background();
  // Return true if a process that pinned before a kill may still read rows that no index has.
  // After a clean close the answer is no: what it left free was free for every pin.
  bool read_since_a_kill() { return !pool->was_clean() && epochs.earlier_pins(); }
  void walk();
  void wake();
  bool await_reclaim();
  // The caller of these three holds applied_mutex.
  bool counts(uint64_t partition) const;
  uint64_t counted_partitions(const pool::InstanceRecord& instance) const;
  bool is_unread(uint32_t instance, uint64_t partition) const;
  void refresh_applied(uint32_t instance);
  std::vector<TablePointer> list_tables();
  base::Status pass_over(uint32_t instance);
  // Take the tables, which no superblock names any more, from writers; return their ids. The caller
  // retires them.
  std::vector<uint64_t> remove_tables(const std::function<bool(const Table&)>& is_dropped);

  std::unique_ptr<pool::Pool> pool;
  epoch::Domain epochs;
  // Serialises creations and drops, so that the pool's catalogue and the lists below change
  // together. Taken before all other mutexes.
  std::mutex catalogue_mutex;
  mutable std::mutex mutex;  // guards the next two
  std::vector<TablePointer> tables;
  std::vector<TablePointer> dropped;  // until no pin can read them
  std::atomic<uint64_t> change_count{1};
  std::mutex walk_mutex;   // one walk at a time
  std::mutex moves_mutex;  // one hot move at a time: the pool has one journal
  std::atomic<bool> walked{false};
  // Serialises writers of `applied`, so that the later of two refreshes wins; guards the bitmaps.
  std::mutex applied_mutex;
  std::vector<uint64_t> counted;                     // bitmap of partitions; empty: all
  std::map<uint32_t, std::vector<uint64_t>> unread;  // likewise, by instance; absent: none
  std::array<Applied, pool::kMaxInstances> applied;
  bool runs_background = false;
  std::atomic<bool> stopping{false};
  std::mutex wake_mutex;
  std::condition_variable wake_signal;
  bool work_waits = false;
  std::thread thread;
};

// Keys of one round of the five verbs, where a drain is cheap.
inline constexpr size_t kSliceKeys = 512;
inline constexpr size_t kSliceKeysSynced = 65536;  // likewise, where a drain flushes the disk
static_assert(kSliceKeys <= pool::kBatchSlots && kSliceKeysSynced <= pool::kBatchSlots);
// Slots that a writer gives to epoch at once. More would leave the caches before they are reused.
inline constexpr size_t kRetiredTogether = 4096;
// A hot move takes three drains. Where a drain flushes the disk, one call makes at most this
// number of moves, so that a hot set does not keep the disk from the deltas. The next hot set
// continues.
inline constexpr uint64_t kMaxMovesSynced = 200;
inline constexpr size_t kMaxPendingHot = 262'144;  // keys that wait for the background thread
inline constexpr uint64_t kLeastHot = 64;
inline constexpr uint64_t kMostHot = 262'144;
// A table remembers capacity / kHotShare hot keys per interval, within the two limits above.
inline constexpr uint64_t kHotShare = 16;
inline constexpr uint64_t kRehomePasses = 6;
inline constexpr uint64_t kBucketsCounted = 16384;   // in one step of a recount
inline constexpr uint64_t kBucketsInstalled = 2048;  // likewise, while the table's writers wait
inline constexpr int kRecountSteps = 8;              // consecutive steps in the background
// In one step of growing, while all writers wait; in smaller steps if it is paced, because pulls
// are slower during a step.
inline constexpr uint64_t kBucketsCopied = 64;
inline constexpr uint64_t kBucketsCopiedPaced = 16;
inline constexpr uint64_t kPace = 6;  // how much longer than a step the pause behind it is
// A re-homing pass that moves fewer than 1/2000 of the rows is the last.
inline constexpr uint64_t kRehomeEnough = 2000;
// How long a writer waits for readers to release slots.
inline constexpr int kReclaimPatienceMs = 10'000;

}  // namespace petps::table
