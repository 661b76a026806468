// Room pool: the formatted bytes of a medium. FORMAT.md beside this file gives every field.
//
// Owns:        superblock copies, extent records, table and instance records, aliases, progress
//              records, event times (clock.h), slots and their headers, the free list (in DRAM; a
//              clean close stores it).
// Never does:  look inside a bucket; decide when a retired slot is free (epoch does); hand out a
//              raw pointer to keep.
// Called by:   index (bucket bytes), table (everything else).
// Invariants:  An extent's record is durable before the extent's first use. A superblock copy is
//              overwritten only while the other one is whole and newer. A slot is free, allocated
//              to a writer, reachable from the index, or retired; DRAM records only which slots
//              are free.
// Threads:     Catalogue calls (create_table, set_alias, ...) are serialised inside. Several
//              writers may use the Slots of one table. row() and header() are safe from any
//              thread. A call that reads (names, tables, progress, slot counts) or frees (slots,
//              a dropped table) waits for no disk operation.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "media/media.h"
#include "pool/clock.h"

namespace petps::pool {

// The position of a slot: the byte offset of its row in the pool. 0 = no slot. It is never a
// pointer, because the pool may be mapped elsewhere.
using SlotRef = uint64_t;

// The 16 bytes beside every slot. Writes, verify and repair touch them; pulls never do.
struct SlotHeader {
  uint64_t key;
  uint32_t stamp;  // low bits of the version that wrote the row
  uint32_t crc;    // CRC-32C of the row
};
static_assert(sizeof(SlotHeader) == 16, "four headers fill a cache line; none straddles one");

inline constexpr uint32_t kMaxTables = 4096;
inline constexpr uint32_t kMaxTablesBefore3 = 512;  // of a pool of format version 1 or 2
inline constexpr uint32_t kMaxInstances = 64;
inline constexpr uint32_t kMaxAliases = 64;
inline constexpr uint32_t kMaxNameBytes = 63;
inline constexpr uint32_t kMaxDim = 4096;
inline constexpr uint64_t kMaxCapacity = uint64_t{1} << 40;       // rows of a table
inline constexpr uint32_t kMaxPartitions = 1024;                  // per instance
inline constexpr uint32_t kMaxProgress = 2048;                    // records of all instances
inline constexpr uint32_t kMaxPublisherMark = 0xFFFFFF;           // the record has 24 bits for it
inline constexpr uint64_t kDefaultUnitBytes = uint64_t{2} << 20;  // extents are multiples of this
inline constexpr uint64_t kTestUnitBytes = uint64_t{64} << 10;
inline constexpr uint32_t kSlotsExtentMaxUnits = 32;  // row extents double from 1 unit to 64 MiB

// What may write a table: a table takes either pushes or deltas.
enum class Feed : uint8_t { kPush = 0, kDelta = 1 };

struct TableSpec {
  std::string
      name;  // unique within its instance; letters, digits, '_', '-', '.'; at most kMaxNameBytes
  uint32_t instance = 0;  // id of the instance it belongs to
  uint8_t dtype = 0;      // codec::Dtype; the pool only stores it
  Feed feed = Feed::kPush;
  uint32_t dim = 0;        // 1..kMaxDim
  uint32_t row_bytes = 0;  // bytes of one stored row
  uint64_t capacity = 0;   // rows it can hold, at index load 0.8
  // The age in seconds of event time at which a row expires; 0 = never. See set_expiry().
  uint32_t expire_after = 0;
  // row_bytes, or empty for zeros: what a client shows for a missing key.
  std::vector<std::byte> default_row;
};

// The bytes of a table's index, at most kMaxCapacity rows.
uint64_t index_bytes_for(uint64_t capacity);

struct TableRecord {
  uint32_t id = 0;  // never reused
  TableSpec spec;
  uint64_t bucket_offset = 0;
  uint64_t bucket_count = 0;
  SlotRef default_row = 0;  // slot of the default row, 0 = zeros
  uint64_t rows = 0;        // as of the last clean close
  uint64_t displaced = 0;
};

// An array of buckets in the pool, for a table of this capacity.
struct BucketArray {
  uint64_t offset = 0;
  uint64_t count = 0;
  uint64_t capacity = 0;
};

struct InstanceRecord {
  uint32_t id = 0;          // never reused
  std::string model;        // "ranking"
  std::string name;         // "ranking@7"
  uint32_t partitions = 1;  // P; never changes
  bool frozen = false;      // an alias was switched away from it, so deltas no longer write it
};

struct AliasRecord {
  std::string name;
  uint32_t instance = 0;
  uint32_t previous = 0;  // its instance before the last switch; 0 = none, or dropped since
};

struct Names {
  std::vector<InstanceRecord> instances;
  std::vector<AliasRecord> aliases;
  uint64_t sequence = 0;  // of the superblock that holds these names; a higher one is newer
};

enum class ProgressState : uint32_t {  // never renumber
  kFollowing = 0,
  kCatchingUp = 1,
  kPassing = 2,     // `target` is a run that feeds another instance, so this one passes over it
  kIncomplete = 3,  // stopped: rows that the commit of version `target` counts never came
  kConflict = 4,    // stopped: two publishers wrote `run`
  // Rows may be older than progress recorded. `target`: a run that feeds another instance, or 0.
  kLostPower = 5,
};

// Return true if a partition leaves this state only by a base, whatever the stream contains.
inline bool needs_base(ProgressState state) {
  return state == ProgressState::kCatchingUp || state == ProgressState::kIncomplete ||
         state == ProgressState::kConflict || state == ProgressState::kLostPower;
}

struct Progress {
  uint32_t instance = 0;
  uint32_t partition = 0;
  uint64_t run = 0;
  uint64_t seq = 0;      // last applied
  uint64_t offset = 0;   // source position after it
  uint64_t version = 0;  // last committed
  ProgressState state = ProgressState::kFollowing;
  uint64_t target = 0;     // depends on the state: see ProgressState
  uint32_t publisher = 0;  // mark of the writer of `run`, at most kMaxPublisherMark; 0 = unknown
};

// Return true if something of the log has been applied, or a base without a position.
inline bool has_applied(const Progress& progress) {
  return progress.run > 0 || progress.version > 0;
}

// Return true if the record claims nothing: its partition was removed from this pool. `target` is
// then the newest run that it had applied.
inline bool is_blank(const Progress& progress) {
  return progress.state == ProgressState::kFollowing && !has_applied(progress) &&
         progress.seq == 0 && progress.offset == 0 && progress.publisher == 0;
}

struct Options {
  media::Options media;
  uint64_t unit_bytes = kDefaultUnitBytes;  // create only
};

class Slots;
struct Clocks;
namespace layout {
struct Map;
}

class Pool {
 public:
  // Format a new pool. Return kAlreadyExists or kResourceExhausted (disk full) as media does.
  static base::Result<std::unique_ptr<Pool>> create(const Options& options);
  // Remove the unfinished pool of a failed create(). Return `reason`; if the removal fails, the
  // message says so.
  static base::Status undo_create(const Options& options, const base::Status& reason);
  // Open a pool. Return kDataLoss, kInvalidArgument or kUnimplemented if it is not a pool, has
  // another format version, or is shorter than its extents (an incomplete copy). The message
  // names the file and the remedy.
  static base::Result<std::unique_ptr<Pool>> open(const Options& options);
  // Do the same with a medium that the caller made (tests).
  static base::Result<std::unique_ptr<Pool>> format(std::unique_ptr<media::Media> medium,
                                                    uint64_t unit_bytes);
  static base::Result<std::unique_ptr<Pool>> attach(std::unique_ptr<media::Media> medium);
  ~Pool();

  media::Media& medium() { return *media_; }
  const media::Media& medium() const { return *media_; }
  std::byte* at(uint64_t offset) const { return base_ + offset; }
  const std::array<uint8_t, 16>& uuid() const { return uuid_; }
  uint32_t generation() const { return generation_; }  // of this open; raised after an unclean stop
  bool was_clean() const { return was_clean_; }        // the previous writer closed cleanly
  // Return true if the durability is `process`, the pool was not closed, and another boot or an
  // unknown one wrote it last: any page may be older than any other. Stays true until
  // accept_lost_power().
  bool lost_power() const { return lost_power_; }
  bool read_only() const { return read_only_; }
  // Return the highest superblock sequence now in the medium. If it differs from sequence(), the
  // catalogue has changed since this pool read it (media::Access::kReadBeside).
  uint64_t newest_sequence() const;
  uint64_t sequence() const;
  // While held, give no extents of dropped tables to other tables, or back to the disk.
  void hold_free_extents(bool held) { extents_held_.store(held, std::memory_order_release); }
  // Never give blocks back to the disk from now on: a network card keeps the pool's pages.
  void keep_blocks();
  uint64_t unit_bytes() const { return unit_bytes_; }

  // Start writing: raise the generation if the last stop was unclean, and clear the clean flag.
  // Both are durable when it returns. A writer calls this first.
  base::Status begin_writing();
  // Set the counts that status() shows after a clean open, before anything is counted.
  // finish_clean() makes them durable.
  void set_counts(uint32_t table, uint64_t rows, uint64_t displaced);
  // Set the clean flag. A writer calls this last, after every table stored its free list.
  base::Status finish_clean();
  // Set the durability. A change to kPower first syncs everything written so far.
  base::Status set_durability(media::Durability durability);
  // Take a pool that lost power back into service, after verify found no fault. Every recorded
  // progress needs a base (kLostPower, version 0), and what no extent record names is zero again.
  // The sequence grows by kAcceptedStep, so that no reader takes the names for ones that it has
  // seen. Durable when it returns; until then the pool still counts as one that lost power.
  base::Status accept_lost_power();
  // Return the error that refuses to serve a pool that lost power.
  base::Status lost_power_refusal() const;

  // Catalogue. Every change is one superblock write, durable when the call returns.
  //
  // Create an instance. When a model gets its second instance, also create an alias from the
  // plain model name to the first one, so that the name keeps its instance.
  base::Result<InstanceRecord> create_instance(const std::string& model, const std::string& name,
                                               uint32_t partitions);
  // Remove the instance, its tables and its progress; free_table() then gives their space back.
  // Return kFailedPrecondition while an alias (or the plain model name) refers to it.
  base::Status drop_instance(uint32_t instance);
  // Remove a table that pushes feed; free_table() then gives its space back. Return
  // kFailedPrecondition for a table that deltas feed: the log goes on with its rows.
  base::Status drop_table(uint32_t table);
  // Return the status that drop_instance would return.
  base::Status check_droppable(uint32_t instance) const;
  // Give the dropped table's extents to new tables. The caller ensures that nothing reads or
  // writes them any more.
  void free_table(uint32_t table);
  base::Result<TableRecord> create_table(const TableSpec& spec);
  // Growing a table (table/GROW.md): reserve an array of empty buckets, which no superblock names
  // yet; make it the table's; free an array that the table does not have (any more). The caller
  // ensures that nothing reads or writes an array that it frees.
  base::Result<BucketArray> reserve_buckets(uint32_t table, uint64_t capacity);
  base::Status swap_buckets(uint32_t table, const BucketArray& array);
  void free_buckets(const BucketArray& array);
  // Return kFailedPrecondition for a table whose rows expire.
  base::Status set_feed(uint32_t table, Feed feed);
  // Let the table's rows expire at this age in event time; 0: never. The first such table makes the
  // pool one of format version 4. Return kInvalidArgument beyond
  // kMaxExpireAfter, kFailedPrecondition for a pool of an older map.
  base::Status set_expiry(uint32_t table, uint32_t seconds);
  // Return the table's event times, by partition; empty if its rows never expire.
  std::vector<EventClock> clocks(uint32_t table) const;
  // Count commits in the event times of the tables that deltas feed and whose rows expire; for
  // tables that pushes feed see write_clock(). Those that were counted before change nothing.
  // Durable after the flusher's drain. Return whether there is something to drain.
  base::Result<bool> write_clocks(std::span<const Commit> commits, media::Flusher& flusher);
  // Take over the event time of a partition that a base has, unless the table's own counts a later
  // version, or its rows never expire. Durable after the flusher's drain.
  base::Result<bool> adopt_clock(uint32_t table, uint32_t partition, const EventClock& clock,
                                 media::Flusher& flusher);
  // Count one commit in the event time of one table's partition 0.
  base::Result<bool> write_clock(uint32_t table, uint64_t version, uint64_t time_ns,
                                 media::Flusher& flusher);
  // Switch the alias, over all tables at once. Its old instance is frozen unless another alias
  // refers to it; its new instance is not frozen. To go back, switch to its `previous`. With
  // unless_frozen, return kFailedPrecondition if the instance is frozen, that is, an alias was
  // switched away from it in the meantime.
  base::Status set_alias(const std::string& alias, uint32_t instance, bool unless_frozen = false);
  std::vector<TableRecord> tables() const;
  std::vector<InstanceRecord> instances() const;
  std::vector<AliasRecord> aliases() const;
  // Return the names of one moment: every alias refers to an instance that exists.
  Names names() const;
  Slots& slots(uint32_t table);

  // Write the progress of partitions, each at most once; a partition has two records, written
  // alternately. Durable after the flusher's drain; after an error nothing is written. Return
  // kNotFound if an instance does not exist (any more). If a batch claims several new pairs, the
  // call drains their marks first; if it claims exactly one, the call drains the batch before it
  // returns.
  base::Status write_progress(std::span<const Progress> all, media::Flusher& flusher);
  base::Status write_progress(const Progress& progress, media::Flusher& flusher) {
    return write_progress({&progress, 1}, flusher);
  }
  std::optional<Progress> read_progress(uint32_t instance, uint32_t partition) const;
  std::vector<Progress> all_progress() const;

  // The journal's 64 bytes, for index's hot moves.
  std::byte* journal() const;
  // Return the bytes of extents that belong to no table: those of dropped tables, those of tables
  // whose creation a crash prevented, and the indexes that tables had before they grew.
  uint64_t free_bytes() const;
  // Give the blocks of these extents back to the disk: a hole is left, and the file keeps its
  // length. An extent gets blocks again before it is used. progress: called with the bytes done
  // and all; false ends it. Return the bytes done.
  base::Result<uint64_t> shrink(const std::function<bool(uint64_t, uint64_t)>& progress);
  // Check the metadata as read from the medium: that a superblock copy is whole, the extent
  // records, and the progress. Append a message for each fault.
  void verify_metadata(std::vector<std::string>* problems) const;

 private:
  friend class Slots;
  struct Catalogue;
  Pool();
  base::Status load_superblock();
  uint64_t first_extent() const;
  base::Status load_extents();
  base::Status load_slots();
  base::Status own_used_blocks();
  base::Status check_shrinkable() const;
  base::Status prepare_extent(uint32_t kind, uint64_t from, uint64_t to, media::Flusher& flusher);
  void load_progress();
  base::Status load_clocks(const TableRecord& table);
  base::Status add_clocks(const TableRecord& record);
  base::Status check_expiry(uint32_t seconds) const;
  Clocks* find_clocks(uint32_t table);
  base::Result<const TableRecord*> writable_table(uint32_t table) const;
  base::Status write_as_expiring();
  base::Status forget_clocks(uint32_t table, Clocks* clocks, uint64_t cell_ns);
  void write_clock_entry(uint32_t table, uint32_t partition, const Clocks& clocks,
                         media::Flusher& flusher);
  bool write_table_clocks(const TableRecord& table, std::span<const Commit> commits,
                          media::Flusher& flusher);
  base::Status check_progress(std::span<const Progress> all) const;
  base::Status claim_progress(std::span<const Progress> all, media::Flusher& flusher);
  base::Status lower_progress(media::Flusher& flusher);
  void zero(uint64_t from, uint64_t to, media::Site site, media::Flusher& flusher);
  base::Status sync_everything(media::Site site);

  void verify_progress(std::vector<std::string>* problems) const;
  base::Status write_superblock();
  base::Status validate(const TableSpec& spec) const;
  // table: its id, if it exists already; its slots then count once.
  base::Status check_room(const TableSpec& spec, uint64_t bucket_bytes, uint32_t table = 0) const;
  base::Status check_writable() const;
  base::Status check_droppable_locked(uint32_t instance) const;
  base::Status sync_new_table(const TableRecord& record, const Slots& slots);
  base::Status make_table(const TableSpec& spec, TableRecord* created);
  base::Status switch_alias(AliasRecord* alias, uint32_t instance);
  struct Extent {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    bool reused = false;  // from a dropped table, whose bytes are still in it
  };
  // The bytes that an extent may have. One that is appended has `wanted`, which is whole units.
  struct Length {
    uint64_t least;
    uint64_t wanted;
    uint64_t most;
  };
  // Return the length of an array of buckets of this many bytes.
  Length length_of_buckets(uint64_t bytes) const;
  // Claim a free extent or append a new one. When it returns, the record is durable and buckets
  // are zero.
  base::Result<Extent> add_extent(uint32_t kind, uint32_t table, const Length& length);
  size_t claim_free_extent(uint32_t table, const Length& length);
  base::Result<Extent> append_extent(uint32_t kind, uint32_t table, uint64_t units);
  base::Status store_extent_record(uint64_t position, uint32_t kind, uint32_t table, uint64_t units,
                                   media::Flusher& flusher);

  std::unique_ptr<media::Media> media_;
  std::byte* base_ = nullptr;
  const layout::Map* map_;
  uint32_t format_version_;
  std::array<uint8_t, 16> uuid_{};
  uint32_t generation_ = 0;
  uint64_t unit_bytes_ = 0;
  bool was_clean_ = false;
  bool lost_power_ = false;
  bool read_only_ = false;
  std::atomic<bool> extents_held_{false};
  bool blocks_kept_ = false;  // under state_mutex_
  uint64_t end_ = 0;          // where the next extent begins
  // What readers see of the catalogue: a consistent, durable snapshot that never changes.
  struct Snapshot {
    std::vector<TableRecord> tables;
    Names names;
  };
  void publish_snapshot();
  std::shared_ptr<const Snapshot> snapshot() const;

  // Lock order: mutex_, extents_mutex_, state_mutex_. The first two are held while the disk
  // works, so requests never take them: a reader takes only state_mutex_, which no disk operation
  // holds.
  //
  // Serialises changes of the catalogue and writes of progress.
  mutable std::mutex mutex_;
  mutable std::mutex extents_mutex_;  // guards extent records and the medium's growth
  // Guards snapshot_, and the catalogue's extents, slots and progress. A change also holds the
  // mutex above that owns them (extents_mutex_ for extents, mutex_ for slots and progress), so a
  // thread that holds that mutex reads them without state_mutex_. free_table() is the exception: it
  // holds only state_mutex_, so every thread reads an extent's table and the map of slots under
  // state_mutex_.
  mutable std::mutex state_mutex_;
  std::shared_ptr<const Snapshot> snapshot_;
  std::unique_ptr<Catalogue> catalogue_;
};

// How far accept_lost_power() advances the sequence: no pool writes that many superblocks between
// two acceptances.
inline constexpr uint64_t kAcceptedStep = uint64_t{1} << 32;

// Return 16 fresh random bytes; return this boot's id (zeros if the kernel has none: such a boot
// equals no other).
std::array<uint8_t, 16> random_uuid();
std::array<uint8_t, 16> current_boot_id();
void set_boot_id_for_test(std::optional<std::array<uint8_t, 16>> id);

}  // namespace petps::pool
