// Room pool: the formatted bytes of a medium. FORMAT.md beside this file gives every field.
//
// Owns:        superblock copies, extent records, table and instance records, aliases, progress records, slots and their
//              headers, the free list (in DRAM; stored by a clean close).
// Never does:  look inside a bucket; decide when a retired slot is free (epoch does); hand out a raw pointer to keep.
// Called by:   index (bucket bytes), table (everything else).
// Invariants:  an extent's record is durable before the extent's first use; a superblock copy is overwritten only while the
//              other one is whole and newer; a slot is either free, allocated to a writer, reachable from the index, or
//              retired - and in DRAM only "free" is known.
// Threads:     catalogue calls (create_table, set_alias, ...) are serialised inside; Slots of one table may be used by several
//              writers; row() and header() are safe from any thread. What reads (names, tables, progress, slot counts) and
//              what frees (slots, a dropped table) waits for no disk operation.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "media/media.h"

namespace petps::pool {

// Position of a slot: byte offset of its row in the pool. 0 = no slot. Never a pointer: the pool may be mapped elsewhere.
using SlotRef = uint64_t;

// 16 bytes beside every slot, touched by writes, verify and repair, never by pulls.
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
inline constexpr uint32_t kMaxPartitions = 1024;                  // per instance
inline constexpr uint32_t kMaxProgress = 2048;                    // records of all instances
inline constexpr uint32_t kMaxPublisherMark = 0xFFFFFF;           // what a record has room for
inline constexpr uint64_t kDefaultUnitBytes = uint64_t{2} << 20;  // extents are multiples of this
inline constexpr uint64_t kTestUnitBytes = uint64_t{64} << 10;
inline constexpr uint32_t kSlotsExtentMaxUnits = 32;  // row extents double from 1 unit to 64 MiB

// Who may write a table: a table takes either pushes or deltas.
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
  std::vector<std::byte>
      default_row;  // row_bytes, or empty for zeros: what a client shows for a missing key
};

struct TableRecord {
  uint32_t id = 0;  // never reused
  TableSpec spec;
  uint64_t bucket_offset = 0;
  uint64_t bucket_count = 0;
  SlotRef default_row = 0;  // slot of the default row, 0 = zeros
  uint64_t rows = 0;        // as of the last clean close
  uint64_t displaced = 0;
};

struct InstanceRecord {
  uint32_t id = 0;          // never reused
  std::string model;        // "ranking"
  std::string name;         // "ranking@7"
  uint32_t partitions = 1;  // P, fixed for ever
  bool frozen = false;      // an alias was switched away from it: deltas write it no more
};

struct AliasRecord {
  std::string name;
  uint32_t instance = 0;
  uint32_t previous = 0;  // what it meant before the last switch; 0 = nothing, or dropped since
};

struct Names {
  std::vector<InstanceRecord> instances;
  std::vector<AliasRecord> aliases;
  uint64_t sequence = 0;  // of the superblock that says so: of two Names the higher is the newer
};

enum class ProgressState : uint32_t {  // never renumber
  kFollowing = 0,
  kCatchingUp = 1,
  kPassing = 2,     // `target` is a run that feeds another instance: it is passed over here
  kIncomplete = 3,  // stopped: the commit of version `target` counts other rows than arrived
  kConflict = 4,    // stopped: two publishers wrote `run`
  kLostPower =
      5,  // rows may be older than progress said; `target`: a run that kPassing names, or 0
};

// Only a base ends these, whatever the stream brings.
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
  uint64_t target = 0;     // by state: see there
  uint32_t publisher = 0;  // mark of who wrote `run`, at most kMaxPublisherMark; 0 = not known
};

struct Options {
  media::Options media;
  uint64_t unit_bytes = kDefaultUnitBytes;  // create only
};

class Slots;
namespace layout {
struct Map;
}

class Pool {
 public:
  // Formats a new pool. Returns kAlreadyExists, kResourceExhausted (disk full) as media does.
  static base::Result<std::unique_ptr<Pool>> create(const Options& options);
  // What a failed create() returns: removes the unfinished pool, says so if that fails.
  static base::Status undo_create(const Options& options, const base::Status& reason);
  // Opens one. kDataLoss / kInvalidArgument when it is no pool, of another format version, or shorter than its extents (copied half):
  // the message names the file and the remedy.
  static base::Result<std::unique_ptr<Pool>> open(const Options& options);
  // Same, over a medium the caller made (tests).
  static base::Result<std::unique_ptr<Pool>> format(std::unique_ptr<media::Media> medium,
                                                    uint64_t unit_bytes);
  static base::Result<std::unique_ptr<Pool>> attach(std::unique_ptr<media::Media> medium);
  ~Pool();

  media::Media& medium() { return *media_; }
  const media::Media& medium() const { return *media_; }
  std::byte* at(uint64_t offset) const { return base_ + offset; }
  const std::array<uint8_t, 16>& uuid() const { return uuid_; }
  uint32_t generation() const { return generation_; }  // of this open; raised after an unclean stop
  bool was_clean() const { return was_clean_; }        // how the previous writer left it
  // Durability `process`, not closed, and not of this boot, or of an unknown one: any page may be older
  // than any other. Stays true until accept_lost_power().
  bool lost_power() const { return lost_power_; }
  bool read_only() const { return read_only_; }
  // The newest superblock that stands in the medium now; another than sequence(): the catalogue has
  // changed since it was read (media::Access::kReadBeside).
  uint64_t newest_sequence() const;
  uint64_t sequence() const;
  // Until told otherwise, extents of dropped tables are not given to others.
  void hold_free_extents(bool held) { extents_held_.store(held, std::memory_order_release); }
  uint64_t unit_bytes() const { return unit_bytes_; }

  // Writer's first step: raises the generation if the last stop was unclean, clears the clean flag; durable when it returns.
  base::Status begin_writing();
  // What status() of a clean open shows before anything was counted; durable with finish_clean().
  void set_counts(uint32_t table, uint64_t rows, uint64_t displaced);
  // Writer's last step, after every table stored its free list: sets the clean flag.
  base::Status finish_clean();
  // Everything written so far is synced first when it becomes kPower.
  base::Status set_durability(media::Durability durability);
  // Takes a pool that lost power back into service, once verify found it clean: every recorded
  // progress needs a base (kLostPower, version 0), what no extent record names is zero again, the
  // sequence grows by kAcceptedStep, so that no reader takes the names for those it has seen. Durable
  // when it returns; until then the pool still counts as one that lost power.
  base::Status accept_lost_power();
  // What refuses to serve it before.
  base::Status lost_power_refusal() const;

  // Catalogue. Every change is one superblock write, durable when it returns.
  // A model's second instance gives the plain name an alias to the first, so that it goes on
  // meaning what it meant.
  base::Result<InstanceRecord> create_instance(const std::string& model, const std::string& name,
                                               uint32_t partitions);
  // Removes the instance, its tables and its progress; free_table() then gives their space back.
  // kFailedPrecondition while an alias (or the plain model name) means it.
  base::Status drop_instance(uint32_t instance);
  base::Status droppable(uint32_t instance) const;  // what drop_instance would answer
  // Nothing reads or writes the dropped table's extents any more: new tables may have them.
  void free_table(uint32_t table);
  base::Result<TableRecord> create_table(const TableSpec& spec);
  base::Status set_feed(uint32_t table, Feed feed);
  // Switches the alias, over all tables at once: what it meant is frozen (unless another alias
  // means it), what it means now is not. Going back is switching to its `previous`.
  // unless_frozen: kFailedPrecondition where the instance is frozen, because somebody switched away from it meanwhile.
  base::Status set_alias(const std::string& alias, uint32_t instance, bool unless_frozen = false);
  std::vector<TableRecord> tables() const;
  std::vector<InstanceRecord> instances() const;
  std::vector<AliasRecord> aliases() const;
  // All of one moment: every alias means an instance that is there.
  Names names() const;
  Slots& slots(uint32_t table);

  // Progress of partitions, each at most once: two records written alternately. Durable after the
  // flusher's drain; after an error nothing is written. kNotFound: an instance is not there (any
  // more). A batch that claims several new pairs drains once by itself.
  base::Status write_progress(std::span<const Progress> all, media::Flusher& flusher);
  base::Status write_progress(const Progress& progress, media::Flusher& flusher) {
    return write_progress({&progress, 1}, flusher);
  }
  std::optional<Progress> read_progress(uint32_t instance, uint32_t partition) const;
  std::vector<Progress> all_progress() const;

  // The journal's 64 bytes, for index's hot moves.
  std::byte* journal() const;
  // Extents that belong to no table: of dropped ones, and of those that a crash kept from coming to be.
  uint64_t free_bytes() const;
  // Checks metadata as read from the medium: both superblock copies, extent records, progress. Appends what is wrong.
  void verify_metadata(std::vector<std::string>* problems) const;

 private:
  friend class Slots;
  struct Catalogue;
  Pool();
  base::Status load_superblock();
  uint64_t first_extent() const;
  base::Status load_extents();
  base::Status load_slots();
  void load_progress();
  base::Status check_progress(std::span<const Progress> all) const;
  base::Status claim_progress(std::span<const Progress> all, media::Flusher& flusher);
  base::Status lower_progress(media::Flusher& flusher);
  void zero(uint64_t from, uint64_t to, media::Site site, media::Flusher& flusher);
  base::Status sync_everything(media::Site site);

  void verify_progress(std::vector<std::string>* problems) const;
  base::Status write_superblock();
  base::Status validate(const TableSpec& spec) const;
  base::Status check_room(const TableSpec& spec, uint64_t bucket_bytes) const;
  base::Status writable() const;
  base::Status droppable_locked(uint32_t instance) const;
  base::Status sync_new_table(const TableRecord& record, const Slots& slots);
  base::Status make_table(const TableSpec& spec, TableRecord* made);
  base::Status switch_alias(AliasRecord* alias, uint32_t instance);
  struct Extent {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    bool reused = false;  // a dropped table's: its bytes are still there
  };
  // A free extent or a new one, of at least `units`; its record is durable, and buckets are zero, when it returns.
  base::Result<Extent> add_extent(uint32_t kind, uint32_t table, uint64_t units);
  size_t claim_free_extent(uint32_t table, uint64_t wanted);
  base::Result<Extent> append_extent(uint32_t kind, uint32_t table, uint64_t units);
  base::Status store_extent_record(uint64_t position, uint32_t kind, uint32_t table, uint64_t units,
                                   media::Flusher& flusher);

  std::unique_ptr<media::Media> media_;
  std::byte* base_ = nullptr;
  const layout::Map* map_;
  std::array<uint8_t, 16> uuid_{};
  uint32_t generation_ = 0;
  uint64_t unit_bytes_ = 0;
  bool was_clean_ = false;
  bool lost_power_ = false;
  bool read_only_ = false;
  std::atomic<bool> extents_held_{false};
  uint64_t end_ = 0;  // where the next extent begins
  // What readers see of the catalogue: of one moment, durable, never changed.
  struct Shown {
    std::vector<TableRecord> tables;
    Names names;
  };
  void show();
  std::shared_ptr<const Shown> shown() const;

  // Order: mutex_, extents_mutex_, state_mutex_. The first two are held while the disk works, so
  // requests never take them: a reader takes state_mutex_ alone, which no disk operation holds.
  mutable std::mutex mutex_;  // one change of the catalogue, or new pair of progress, at a time
  mutable std::mutex extents_mutex_;  // extent records and the medium's growth
  // Guards shown_, and of the catalogue: extents, slots, progress. They change under it and the one
  // above that is theirs; whoever has that one reads them without it.
  mutable std::mutex state_mutex_;
  std::shared_ptr<const Shown> shown_;
  std::unique_ptr<Catalogue> catalogue_;
};

// How far accept_lost_power() moves the sequence: no pool writes as many superblocks between two.
inline constexpr uint64_t kAcceptedStep = uint64_t{1} << 32;

// Fresh 16 random bytes; this boot's id (zeros where the kernel has none: such a boot equals no other).
std::array<uint8_t, 16> random_uuid();
std::array<uint8_t, 16> current_boot_id();
void set_boot_id_for_test(std::optional<std::array<uint8_t, 16>> id);

}  // namespace petps::pool
