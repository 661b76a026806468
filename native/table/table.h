// Room table: the tables of one open pool; the only room where pool, index and epoch meet.
//
// Owns:        lookup, apply (allocate, fill, persist, publish, retire), recovery (walk),
//              migration, growth, expiry, eviction, verify, scrub, scan.
// Never does:  network, message formats, decoding of rows; write a row in place; retire before
//              the publish is durable.
// Called by:   server (pull, push), bindings (Python: load, ingest, verify), tests.
// Invariants:  A row pointer from lookup is valid until the Pin taken before that lookup is
//              dropped. An OK from apply means durable at the pool's level. A failed apply left
//              every key with its old or its new row, whole.
// Threads:     All methods are safe from any thread. lookup takes no lock. The walk and the
//              migration run on one background thread that Tables owns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/status.h"
#include "epoch/epoch.h"
#include "pool/pool.h"

namespace petps::table {

// What is wrong with a row that an entry names. Never renumber: POOL.damage has these numbers.
enum class Fault : uint8_t {
  kNoSlot = 1,    // the entry names no slot of the table
  kOtherKey = 2,  // the header of the slot names another key
  kChecksum = 3,  // the checksum of the row differs from the header's
};

// A damaged row, as it was read. Without a slot, stamp and crc are 0.
struct DamagedRow {
  uint64_t key = 0;
  pool::SlotRef slot = 0;
  uint32_t stamp = 0;  // of the header
  uint32_t crc = 0;    // of the header
  Fault fault = Fault::kChecksum;
  bool operator==(const DamagedRow&) const = default;
};

// A batch of full rows or deletions for one table. A later entry of the same key wins.
struct Batch {
  std::span<const uint64_t> keys;
  // keys.size() * row_bytes, in order (rows of deletions are ignored); null if all are deletions.
  const std::byte* rows = nullptr;
  std::span<const uint8_t> deleted = {};  // empty, or keys.size(): 1 = delete
  uint32_t stamp = 0;                     // low bits of the version
  std::span<const uint32_t> stamps = {};  // empty, or keys.size(): one stamp for each key
  // Delete a key only while its row has this key's stamp. For a batch of deletions with stamps.
  bool only_of_stamp = false;
  // Empty, or keys.size(), for a batch of deletions: delete a key only while its row is this
  // damaged one, never use the slot again, and remember the key as missing.
  std::span<const DamagedRow> only_damaged = {};
  bool only_missing = false;  // write a key only while it is remembered as missing
  // The number of threads for a large batch, the caller included; the others inherit its
  // priority.
  uint32_t threads = 1;
};

struct ApplyReport {
  uint64_t inserted = 0;
  uint64_t updated = 0;
  uint64_t deleted = 0;
  uint64_t absent = 0;      // deletions of keys that did not exist
  uint64_t refused = 0;     // new keys refused: the table is at capacity
  uint64_t superseded = 0;  // entries of the batch that a later one of the same key replaced

  ApplyReport& operator+=(const ApplyReport& other);
};

struct TableStatus {
  uint64_t rows = 0;
  uint64_t capacity = 0;
  uint64_t slots = 0;  // allocated from the pool, used or free
  uint64_t free_slots = 0;
  uint64_t retired_slots = 0;
  uint64_t index_bytes = 0;  // of both indexes while it grows
  uint64_t header_bytes = 0;
  uint64_t row_bytes_total = 0;  // rows * row_bytes
  uint64_t allocator_bytes = 0;  // DRAM and pool bitmaps
  // Rows outside their home bucket, as of the last walk and since; approximate.
  uint64_t displaced = 0;
  bool walked = false;  // the background walk of this open has finished
  // If rows expire (EXPIRY.md): seconds, 0 = never; the lowest event time of the partitions that
  // have one, 0 = none; rows expired since the open; how long a row may be served beyond
  // expire_after, in seconds of event time, -1 = unknown before the first walk of this open.
  uint32_t expire_after = 0;
  uint64_t event_time_ns = 0;
  uint64_t expired = 0;
  double expiry_delay = 0.0;
  uint64_t evicted = 0;  // rows since the open
  // Keys whose damaged rows were removed, and that nothing has written or deleted since. Slots of
  // such rows that stay unused, of this open.
  uint64_t missing_rows = 0;
  uint64_t damaged_slots = 0;
  uint64_t heat_bytes = 0;  // DRAM for how often keys are pulled
};

struct VerifyReport {
  uint64_t rows = 0;
  uint64_t buckets = 0;
  uint64_t stale_tags = 0;     // allowed after a crash: healed by the walk and by writers
  uint64_t high_counters = 0;  // allowed after a crash
  // Allowed until the walk frees them, and where damaged rows were removed.
  uint64_t unreachable_slots = 0;
  bool complete = true;  // false: it was ended before it had read all
  uint64_t problem_count = 0;
  std::vector<std::string> problems;  // the first kMaxProblems, each naming table, bucket or key
  bool clean() const { return problem_count == 0; }
};

struct GrowOptions {
  uint64_t capacity = 0;  // rows; more than the table has
  bool paced = true;      // leave most of the time to pulls and writers
  // Called between two steps with the buckets copied and the buckets in all; false gives up, and
  // after the swap it ends the wait for the last reader of the array before.
  std::function<bool(uint64_t done, uint64_t all)> progress;
};

// What a full table that pushes feed does with a new key (EVICTION.md).
enum class WhenFull : uint8_t { kRefuse, kEvictOldest, kEvictColdest };

struct ExpireOptions {
  bool paced = true;  // leave most of the time to pulls and writers
  // Called between two steps with the buckets done and the buckets in all; false ends the walk.
  std::function<bool(uint64_t done, uint64_t all)> progress;
};

// Where a pass of the scrubber is. It begins with an empty one.
struct ScrubCursor {
  const void* array = nullptr;  // the array of buckets that `bucket` counts in
  uint64_t bucket = 0;
};

struct ScrubStep {
  uint64_t rows = 0;     // read in this step
  uint64_t bytes = 0;    // likewise: of rows and headers
  uint64_t buckets = 0;  // done by the pass
  uint64_t bucket_count = 0;
  bool complete = false;             // the pass has read all buckets, and the default row
  bool default_row_damaged = false;  // set by the last step
  std::vector<DamagedRow> damaged;
};

struct ScanPage {
  std::vector<uint64_t> keys;
  std::vector<const std::byte*> rows;  // valid while the Pin of the scan lives
  uint64_t next_bucket = 0;            // pass to the next call; the bucket count when done
};

inline constexpr size_t kNoKey = ~size_t{0};

class Tables;

// A Table lives as long as any TablePointer to it. A table that was dropped while a caller holds
// a TablePointer can still be read, but not written. A plain Table* is valid under a Pin if the
// caller found it under that Pin (see change_count()).
class Table;
using TablePointer = std::shared_ptr<Table>;

class Table {
 public:
  const pool::TableRecord& record() const;  // as of the open; grow() changes the capacity
  uint64_t capacity() const;
  // The record, with what a growth has changed.
  pool::TableRecord record_now() const;
  // The end of a scan. It stays the same while a ScanGuard lives.
  uint64_t bucket_count() const;
  uint32_t id() const { return record().id; }

  // Set rows[i] to the address of the row of keys[i], or to null. The caller took a Pin before.
  // The caller limits the number of keys.
  void lookup(std::span<const uint64_t> keys, const std::byte** rows) const;
  // Find the same rows, interleaved with the caller's work on them: visit(searched, ready)
  // prefetches rows[searched] and works on rows[ready], which it prefetched some keys earlier.
  // Each key's position comes once as `searched` and once as `ready`, in order; kNoKey stands for
  // no key, and a row is null if its key is absent. Prefetching one row right before copying
  // another one keeps both memory and core busy.
  template <typename Visitor>
  void lookup(std::span<const uint64_t> keys, const std::byte** rows, Visitor&& visit) const {
    lookup_in_step(
        keys, rows,
        [](void* context, size_t searched, size_t ready) {
          (*static_cast<std::remove_reference_t<Visitor>*>(context))(searched, ready);
        },
        const_cast<void*>(static_cast<const void*>(&visit)));  // the call above restores const
  }
  // Find the same row, one key at a time without prefetching (the reference for tests).
  const std::byte* lookup_one(uint64_t key) const;
  // Count a pull of these keys for eviction. Nothing if the table does not evict its coldest rows.
  void note_pulled(std::span<const uint64_t> keys) const;
  // Return the stamp of a row that a lookup found, under its pin.
  uint32_t stamp_of(const std::byte* row) const;
  // Return the table's default row, or null if it is all zeros.
  const std::byte* default_row() const;

  // Apply a batch copy-on-write; it is durable when apply returns OK. New keys beyond capacity
  // are refused and counted, and the rest is applied. Return kResourceExhausted if there is no
  // free slot (disk full): nothing of the slice that failed was published, but earlier slices of
  // the batch may have been.
  base::Result<ApplyReport> apply(const Batch& batch);
  // Apply batches of one stamp as one, with the drains of one: a group commit. Keys, rows and
  // reports are those of applying one batch after the other, but keys that a full table refuses
  // may be others. The batches have at most keys_together() keys in all. After an error, each
  // batch may be applied again.
  base::Status apply_together(std::span<const Batch> batches, std::span<ApplyReport> reports);
  // Return how many keys share the drains of a batch: beyond that, a group gains nothing.
  size_t keys_together() const;

  // Add a client's hot set, the hottest key first. The background thread moves these keys to
  // their home buckets, with those of other pending sets. Keys beyond the limit of pending keys
  // are dropped: the client will send them again.
  void set_hot_keys(std::vector<uint64_t> keys);
  // Synchronous forms, for tests and benchmarks. Return the number of moved entries. While a scan
  // is open nothing moves; the background thread does it later.
  base::Result<uint64_t> migrate(std::span<const uint64_t> hot_keys);
  // Move displaced entries whose home (or a nearer bucket) has room again.
  base::Result<uint64_t> rehome();
  // Lower overflow counters that are too high, saturated ones included, to the exact count.
  // Return how many were lowered.
  base::Result<uint64_t> recount();

  // Give the table more capacity while it is read and written (GROW.md). When it returns OK, this
  // is durable. Any other result leaves the table as it was: kInvalidArgument for a capacity that
  // is not more than now, kResourceExhausted without room, kFailedPrecondition while the table
  // grows already, while a reader still holds the array before the last growth, or if `progress`
  // returned false.
  base::Status grow(const GrowOptions& options);

  // Delete the rows that have expired by the event times that the table has now (EXPIRY.md), while
  // it is read and written. Return how many. Durable when it returns; a walk that ended early, or
  // a crash, leaves the other ones to the next walk.
  base::Result<uint64_t> expire(const ExpireOptions& options);

  // Read the rows of the next buckets, `bytes` of them or a little more, and compare each with its
  // header and its key (SCRUB.md). Changes nothing. If the table has grown, the pass begins again.
  base::Result<ScrubStep> scrub(ScrubCursor* cursor, uint64_t bytes);
  // Take damaged rows out of service, each only while its key still has that row. Return how many.
  // Durable when it returns; from then on, lookups find no such key.
  base::Result<uint64_t> remove_damaged(std::span<const DamagedRow> rows);
  // Remember keys as missing that an earlier open removed. Keys that the table has are left out.
  base::Status note_missing(std::span<const uint64_t> keys);
  // Write rows of missing keys. A key that was written or deleted since it was removed stays as it
  // is. Durable when it returns.
  base::Result<ApplyReport> restore(std::span<const uint64_t> keys, const std::byte* rows,
                                    std::span<const uint32_t> stamps);
  // Return the keys that are missing now, in any order.
  std::vector<uint64_t> missing_keys() const;
  // Mark the keys whose rows are damaged now: 1 = damaged, 0 = whole or absent.
  base::Status find_damaged(std::span<const uint64_t> keys, std::span<uint8_t> damaged);

  // Scan buckets [from, from + buckets). While a ScanGuard lives, no entry moves, so the scan
  // misses none.
  ScanPage scan(uint64_t from_bucket, uint64_t buckets) const;
  class ScanGuard {  // holds migration off
   public:
    explicit ScanGuard(const Table& table);
    ~ScanGuard();

   private:
    const Table& table_;
  };

  TableStatus status() const;
  // Return how many buckets lookups of these keys read (found keys only), and how many keys are
  // found.
  std::pair<uint64_t, uint64_t> bucket_reads(std::span<const uint64_t> keys) const;

  using Visit = void (*)(void* context, size_t searched, size_t ready);
  void lookup_in_step(std::span<const uint64_t> keys, const std::byte** rows, Visit visit,
                      void* context) const;

  struct Impl;
  explicit Table(std::unique_ptr<Impl> impl);
  ~Table();
  Impl& impl() { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

struct TablesOptions {
  pool::Options pool;
  // For verify: open a pool that lost power anyway, read-only.
  bool allow_lost_power = false;
  // Take such a pool back into service. The caller has verified it: see
  // Pool::accept_lost_power().
  bool accept_lost_power = false;
  // Run the walk and the migration on a background thread; if false, tests call walk().
  bool background = true;
};

// Why keys of a partition may have rows, but not in this pool.
enum class Lack : uint8_t {
  kNone,
  kCameLater,  // the model's name had left the instance when the partition came, or was read
  kUnread,     // the log has not been read yet
};

class Tables {
 public:
  static base::Result<std::unique_ptr<Tables>> create(const TablesOptions& options);
  // Open a pool and serve at once: the cost does not depend on the number of rows. Return
  // kFailedPrecondition for a pool that lost power; run verify on it.
  static base::Result<std::unique_ptr<Tables>> open(const TablesOptions& options);
  static base::Result<std::unique_ptr<Tables>> attach(std::unique_ptr<pool::Pool> pool,
                                                      bool background,
                                                      bool accept_lost_power = false);  // tests
  ~Tables();  // without close(): like a crash of the process

  // Store the free lists and set the clean flag. No reader or writer may be active.
  base::Status close();

  pool::Pool& pool();
  epoch::Domain& epochs();

  base::Result<TablePointer> create_table(const pool::TableSpec& spec);
  TablePointer find(uint32_t id) const;  // null if unknown
  TablePointer find(const std::string& instance, const std::string& table) const;  // likewise
  std::vector<TablePointer> tables() const;
  // See Pool::set_alias. Return kFailedPrecondition for an instance whose base is not loaded in
  // all counted partitions.
  base::Status switch_alias(const std::string& alias, uint32_t instance,
                            bool unless_frozen = false);
  // Remove an instance and its tables; durable when it returns. Batches in flight complete first.
  // The space goes to other tables once the last pin on it is dropped. Errors: see
  // Pool::drop_instance.
  base::Status drop_instance(uint32_t instance);
  // Remove a table that pushes feed, likewise. Errors: see Pool::drop_table.
  base::Status drop_table(uint32_t table);
  // Give the blocks of free space back to the disk; see Pool::shrink. First wait, a few seconds at
  // most, until what was dropped or outgrown is free.
  base::Result<uint64_t> shrink(const std::function<bool(uint64_t, uint64_t)>& progress);
  // Let the table's rows expire at this age in event time; 0: never. See Pool::set_expiry.
  base::Status set_expiry(uint32_t table, uint32_t seconds);
  // Advance the event time of a table that pushes feed to now_ns of the server's clock, or to what
  // one commit may advance it. Later pushes belong to the next version. Durable on return.
  base::Status tick(uint32_t table, uint64_t now_ns);
  // Set what the table does when it is full, until the pool is closed. Return kFailedPrecondition
  // for a table that deltas feed.
  base::Status set_when_full(uint32_t table, WhenFull rule);
  // Take over a base's event time of a partition. Durable on return. See Pool::adopt_clock.
  base::Status adopt_clock(uint32_t table, uint32_t partition, const pool::EventClock& clock);
  // Return a number that grows when tables are dropped. A Table* that was found earlier, under
  // another Pin, is valid only while this number is the same.
  uint64_t change_count() const;
  // Return the instance that an alias (or a model or instance name) refers to. The message of
  // kNotFound names what exists.
  base::Result<pool::InstanceRecord> resolve(const std::string& model) const;

  // Record the progress of partitions, each at most once, after their rows were applied; durable
  // when it returns. It makes one drain for all of them, and one more when several are recorded
  // for the first time. Raises applied_version. commits: what the progress covers, in order; they
  // advance event times, which are durable before the progress, with a drain of their own.
  base::Status record_progress(std::span<const pool::Progress> all,
                               std::span<const pool::Commit> commits = {});
  base::Status record_progress(const pool::Progress& progress) {
    return record_progress({&progress, 1});
  }
  // Return the highest version committed in all counted partitions of the instance; 0 while one
  // of them has recorded none.
  uint64_t applied_version(uint32_t instance) const;
  // Return whether a row that is missing from the instance may exist in another pool, because the
  // log has not fed one of its counted partitions.
  bool is_partial(uint32_t instance) const;
  // Return why that is so of this partition. It is slow.
  Lack lack_of(uint32_t instance, uint32_t partition) const;
  // Set the partitions of which the pool was opened without rows of the instance, and whose log has
  // not been read to its end since, as a bitmap. Its applied version is 0 while one of them is
  // counted.
  void set_unread(uint32_t instance, std::span<const uint64_t> partitions);
  // Set the partitions that applied versions count, for every instance: bit p of word p / 64. All
  // partitions count before the first call.
  void count_partitions(std::span<const uint64_t> partitions);

  // The background work, in the foreground (background = false). walk() is idempotent.
  void walk();
  bool walked() const;
  // Return why no other process may read the pool beside this one; empty if it may
  // (epoch/READERS.md).
  std::string readers_refused() const;
  size_t reclaim();

  // Check everything. Safe online (rows are read under a pin), but slow.
  // goes_on: called every few milliseconds; false ends it, and the report is incomplete. A growth
  // and hot moves of a table wait for its check.
  VerifyReport verify(const std::function<bool()>& goes_on = {}) const;

  struct Impl;

 private:
  base::Result<TablePointer> existing(uint32_t id) const;  // kNotFound if unknown
  explicit Tables(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

inline constexpr size_t kMaxProblems = 100;

}  // namespace petps::table
