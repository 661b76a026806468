// The insides of Table and Tables, shared by the files of this room.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "epoch/epoch.h"
#include "index/index.h"
#include "pool/slots.h"
#include "table/hot.h"
#include "table/table.h"
#include "table/turns.h"

namespace petps::table {

struct Table::Impl final : epoch::Reclaimer {
  Impl(Tables::Impl& tables, const pool::TableRecord& table);
  ~Impl() override;
  void reclaim(std::span<const uint64_t> items) override {
    slots.release(items);
    retired.fetch_sub(items.size(), std::memory_order_release);  // a dropped table may go now
  }

  bool walked() const { return !slots.needs_walk() && index.walked(); }
  bool synced() const {  // a drain is a disk's flush
    return pool.medium().kind() == media::Kind::kFile &&
           pool.medium().durability() == media::Durability::kPower;
  }
  base::Status writable() const;  // an error that says why not
  // One row more, if capacity allows it now. What batches under way may bring counts, so no two of them take the same room.
  bool reserve_row();
  void set_counts(uint64_t rows, uint64_t displaced);  // known without a walk
  // Waits for the walk or for readers where that helps. headers: see Slots::allocate.
  base::Status allocate(std::span<pool::SlotRef> refs, pool::SlotHeader** headers = nullptr);
  void walk();
  void read_ahead(uint64_t bucket) const;
  base::Result<uint64_t> migrate(std::span<const uint64_t> hot_keys,
                                 HotKeys::Time now = std::chrono::steady_clock::now());
  base::Result<uint64_t> rehome();
  // A bounded part of a recount; true when it is complete, or cannot be made now. Adds the counters that it lowered.
  bool recount_step(uint64_t* lowered);
  bool wants_recount();

  Tables::Impl& owner;
  pool::Pool& pool;
  epoch::Domain& epochs;
  pool::TableRecord record;
  pool::Slots& slots;
  index::Index index;
  uint32_t row_lines;  // cache lines of a row that lookup prefetches
  // Rows, and new keys of batches under way: a reservation becomes a row without a change here, a deletion leaves when it is durable.
  // Until the walk has counted the rows of an unclean open, it takes them to be as many as they can be.
  std::atomic<uint64_t> occupied{0};
  uint64_t assumed_rows = 0;         // in `occupied`, for those that the walk will count
  std::atomic<uint64_t> erased{0};   // since the last re-homing
  std::atomic<uint64_t> retired{0};  // slots handed to epoch and not back yet
  // Batches that began and that ended, for verify to see that nothing moved.
  std::atomic<uint64_t> begun{0};
  std::atomic<uint64_t> ended{0};
  WriterTurns turns;
  bool dropped = false;  // changes under all of `turns`
  struct
      Scratch {  // of the chunk that holds the range, or of all the first; one item a key or slot
    std::vector<index::Entry*> entries;
    std::vector<pool::SlotRef> old;
    std::vector<pool::SlotRef> taken;
    std::vector<pool::SlotHeader*> headers;
  };
  std::array<Scratch, kRanges> scratch;
  Gate walk_gate;  // shared: publish and mark; exclusive: the walk takes the marks
  mutable MovesGate moves_gate;
  enum class Recount { kNone, kCounts, kInstalls } recount = Recount::kNone;  // under moves_mutex
  uint64_t installed = 0;  // buckets, of the recount that installs
  std::mutex hot_mutex;
  std::vector<uint64_t> hot_keys;  // pending hot sets
  HotKeys hot;                     // under moves_mutex
};

// The applied version of one instance; 0 as the instance: unused.
struct Applied {
  std::atomic<uint32_t> instance{0};
  std::atomic<uint64_t> version{0};
};

struct Tables::Impl final : epoch::Reclaimer {
  explicit Impl(std::unique_ptr<pool::Pool> opened);
  ~Impl() override;
  void reclaim(std::span<const uint64_t> items) override;  // ids of dropped tables
  TablePointer add(const pool::TableRecord& record);
  void start_background();
  void stop_background();
  void background();
  // Whether a process that pinned before a kill may still read rows that no index has. What a clean close left free was free for
  // every pin.
  bool read_since_a_kill() { return !pool->was_clean() && epochs.earlier_pins(); }
  void walk();
  void wait_for_walk();
  void wake();
  bool reclaimed();
  bool counts(uint64_t partition) const;  // the caller holds applied_mutex
  void refresh_applied(uint32_t instance);
  base::Status pass_over(uint32_t instance);

  std::unique_ptr<pool::Pool> pool;
  epoch::Domain epochs;
  // One creation or drop at a time: what the pool has and what stands below change together. Taken before all others.
  std::mutex catalogue_mutex;
  mutable std::mutex mutex;  // guards the next two
  std::vector<TablePointer> tables;
  std::vector<TablePointer> dropped;  // until no pin can read them
  std::atomic<uint64_t> generation{1};
  std::mutex walk_mutex;   // one walk at a time
  std::mutex moves_mutex;  // one hot move at a time: the pool has one journal
  std::atomic<bool> walked{false};
  std::mutex
      applied_mutex;  // writers of `applied`: of two refreshes the later one stays; guards counted
  std::vector<uint64_t> counted;  // bitmap of partitions; empty: all
  std::array<Applied, pool::kMaxInstances> applied;
  bool runs_background = false;
  std::atomic<bool> stopping{false};
  std::mutex wake_mutex;
  std::condition_variable wake_signal;
  bool work_waits = false;
  std::thread thread;
};

inline constexpr size_t kApplyChunk =
    512;  // keys of one round of the five verbs where a drain is cheap
inline constexpr size_t kApplyChunkSynced = 65536;  // where a drain is a disk's flush
// A hot move is three drains; where a drain is a disk's flush, a hot set may not keep the disk from the deltas. The next one goes on.
inline constexpr uint64_t kMaxMovesSynced = 200;
inline constexpr size_t kMaxPendingHot = 262'144;  // keys that wait for the background thread
inline constexpr uint64_t kLeastHot = 64;
inline constexpr uint64_t kMostHot = 262'144;
inline constexpr uint64_t kHotShare =
    16;  // hot keys that a table remembers an interval, of its capacity
inline constexpr uint64_t kRehomePasses = 6;
inline constexpr uint64_t kBucketsCounted = 16384;   // in one step of a recount
inline constexpr uint64_t kBucketsInstalled = 2048;  // likewise, while the table's writers wait
inline constexpr int kRecountSteps = 8;              // one after another in the background
inline constexpr uint64_t kRehomeEnough =
    2000;  // a pass that moves fewer than 1/2000 of the rows is the last
inline constexpr int kReclaimPatienceMs =
    10'000;  // how long a writer waits for readers to leave slots

}  // namespace petps::table
