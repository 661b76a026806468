// Room table: the tables of one open pool; the only room where pool, index and epoch meet.
//
// Owns:        lookup, apply (allocate, fill, persist, publish, retire), recovery (walk), migration, verify, scan.
// Never does:  network, formats of messages, decoding of rows; write a row in place; retire before the publish is durable.
// Called by:   server (pull, push), bindings (Python: load, ingest, verify), tests.
// Invariants:  a row pointer from lookup is valid until the Pin taken before that lookup is dropped; an OK from apply means
//              durable at the pool's level; a failed apply left every key with its old or its new row, whole.
// Threads:     all methods are safe from any thread; lookup takes no lock; the walk and the migration run on one background
//              thread that Tables owns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/status.h"
#include "epoch/epoch.h"
#include "pool/pool.h"

namespace petps::table {

// A batch of full rows or deletions for one table. Later entries of the same key win.
struct Batch {
  std::span<const uint64_t> keys;
  const std::byte* rows =
      nullptr;  // keys.size() * row_bytes, in order (rows of deletions are ignored); null if all are deletions
  std::span<const uint8_t> deleted = {};  // empty, or keys.size(): 1 = delete
  uint32_t stamp = 0;                     // low bits of the version
  // How many may work on a large batch, the caller among them; the others inherit its priority.
  uint32_t threads = 1;
};

struct ApplyReport {
  uint64_t inserted = 0;
  uint64_t updated = 0;
  uint64_t deleted = 0;
  uint64_t absent = 0;      // deletions of keys that were not there
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
  uint64_t index_bytes = 0;
  uint64_t header_bytes = 0;
  uint64_t row_bytes_total = 0;  // rows * row_bytes
  uint64_t allocator_bytes = 0;  // DRAM and pool bitmaps
  uint64_t displaced =
      0;  // rows outside their home bucket (as of the last walk and since; approximate)
  bool walked = false;  // the background walk of this open has finished
};

struct VerifyReport {
  uint64_t rows = 0;
  uint64_t buckets = 0;
  uint64_t stale_tags = 0;         // allowed after a crash: healed by the walk and by writers
  uint64_t high_counters = 0;      // allowed after a crash
  uint64_t unreachable_slots = 0;  // allowed until the walk has freed them
  uint64_t problem_count = 0;
  std::vector<std::string> problems;  // the first kMaxProblems, each naming table, bucket or key
  bool clean() const { return problem_count == 0; }
};

struct ScanPage {
  std::vector<uint64_t> keys;
  std::vector<const std::byte*> rows;  // valid while the Pin of the scan lives
  uint64_t next_bucket = 0;            // pass to the next call; bucket_count when done
};

inline constexpr size_t kNoKey = ~size_t{0};

class Tables;

// A Table lives until nobody has a TablePointer to it: one that was dropped meanwhile can still be read, and refuses to be
// written. A plain Table* is good under a Pin, if it was found under that Pin (see generation()).
class Table;
using TablePointer = std::shared_ptr<Table>;

class Table {
 public:
  const pool::TableRecord& record() const;
  uint32_t id() const { return record().id; }

  // rows[i] = address of the row of keys[i], or null. The caller's Pin was taken before. n is bounded by the caller.
  void lookup(std::span<const uint64_t> keys, const std::byte** rows) const;
  // Same rows, in step with work on them: visit(found, ready) asks for the lines of rows[found] while it works on rows[ready],
  // whose lines were asked for some keys before; each key comes once as either, in order, kNoKey stands for none, and a row may be
  // null. Asking for a row right before copying another one keeps both memory and core busy.
  template <typename Visitor>
  void lookup(std::span<const uint64_t> keys, const std::byte** rows, Visitor&& visit) const {
    lookup_in_step(
        keys, rows,
        [](void* context, size_t found, size_t ready) {
          (*static_cast<std::remove_reference_t<Visitor>*>(context))(found, ready);
        },
        const_cast<void*>(static_cast<const void*>(&visit)));  // a const visitor comes back const
  }
  // Same answer, one key at a time without prefetching (reference for tests).
  const std::byte* lookup_one(uint64_t key) const;
  // The table's default row, or null when it is all zeros.
  const std::byte* default_row() const;

  // Applies a batch copy-on-write; durable when it returns OK. kResourceExhausted when no slot can be had (disk full): nothing of
  // the batch was published. New keys beyond capacity are refused and counted; the rest is applied.
  base::Result<ApplyReport> apply(const Batch& batch);

  // Hot set of a client: the background thread moves these keys home, beside those of other sets that are pending. When
  // they are too many, this set replaces those.
  void set_hot_keys(std::vector<uint64_t> keys);
  // Synchronous forms, for tests and benchmarks. Return the number of entries moved. While a scan is open nothing moves: the
  // background thread does it later.
  base::Result<uint64_t> migrate(std::span<const uint64_t> hot_keys);
  base::Result<uint64_t>
  rehome();  // displaced entries whose home (or a nearer bucket) has room again
  // Lowers overflow counters that are too high, or saturated in vain, to what they count. Returns how many.
  base::Result<uint64_t> recount();

  // Bucket scan: entries of buckets [from, from + buckets). No moving entry is missed while a ScanGuard lives.
  ScanPage scan(uint64_t from_bucket, uint64_t buckets) const;
  class ScanGuard {  // holds off migration
   public:
    explicit ScanGuard(const Table& table);
    ~ScanGuard();

   private:
    const Table& table_;
  };

  TableStatus status() const;
  // Buckets that lookups of these keys read (found keys only), and how many were found.
  std::pair<uint64_t, uint64_t> bucket_reads(std::span<const uint64_t> keys) const;

  using Visit = void (*)(void* context, size_t found, size_t ready);
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
  // For verify: open a pool that lost power all the same, read-only.
  bool allow_lost_power = false;
  // Take such a pool back into service. The caller has verified it: see Pool::accept_lost_power().
  bool accept_lost_power = false;
  bool background =
      true;  // run the walk and the migration on a thread of their own; false: tests call walk() themselves
};

class Tables {
 public:
  static base::Result<std::unique_ptr<Tables>> create(const TablesOptions& options);
  // Serves at once: cost does not depend on rows. kFailedPrecondition for a pool that lost power: run verify.
  static base::Result<std::unique_ptr<Tables>> open(const TablesOptions& options);
  static base::Result<std::unique_ptr<Tables>> attach(std::unique_ptr<pool::Pool> pool,
                                                      bool background,
                                                      bool accept_lost_power = false);  // tests
  ~Tables();  // without close(): like a crash, minus the process

  // Stores free lists, sets the clean flag. No reader or writer may be active.
  base::Status close();

  pool::Pool& pool();
  epoch::Domain& epochs();

  base::Result<TablePointer> create_table(const pool::TableSpec& spec);
  TablePointer find(uint32_t id) const;                                            // null: unknown
  TablePointer find(const std::string& instance, const std::string& table) const;  // likewise
  std::vector<TablePointer> tables() const;
  // See Pool::set_alias. kFailedPrecondition for an instance whose base is not loaded in all partitions that count.
  base::Status switch_alias(const std::string& alias, uint32_t instance,
                            bool unless_frozen = false);
  // Removes an instance and its tables; durable when it returns. Batches under way end first; their space goes to other
  // tables once the last pin on it is dropped. Errors: see Pool::drop_instance.
  base::Status drop_instance(uint32_t instance);
  // Changes when tables are dropped: a Table* that was found earlier, under another Pin, is good only while this is the same.
  uint64_t generation() const;
  // Instance an alias (or a model or instance name) stands for; kNotFound names what exists.
  base::Result<pool::InstanceRecord> resolve(const std::string& model) const;

  // Progress of partitions, each at most once, after their rows were applied; durable when it returns. One drain for all of
  // them, and one more when several are recorded for the first time. Raises applied_version.
  base::Status record_progress(std::span<const pool::Progress> all);
  base::Status record_progress(const pool::Progress& progress) {
    return record_progress({&progress, 1});
  }
  // Highest version committed in all counted partitions of the instance; 0 while one of them has recorded none.
  uint64_t applied_version(uint32_t instance) const;
  // The partitions that applied versions count, of every instance: bit p of word p / 64. Until it is called, all.
  void count_partitions(std::span<const uint64_t> partitions);

  // The background work, in the foreground (background = false). walk() is idempotent.
  void walk();
  bool walked() const;
  // Why no other process may read the pool beside this one; empty: it may (epoch/READERS.md).
  std::string readers_refused() const;
  size_t reclaim();

  // Checks everything; safe online (rows under a pin), slow.
  VerifyReport verify() const;

  struct Impl;

 private:
  explicit Tables(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

inline constexpr size_t kMaxProblems = 100;

}  // namespace petps::table
