// The bytes of a pool's metadata; FORMAT.md describes them in prose. Little-endian. Any change
// needs a new kFormatVersion.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/checksum.h"
#include "pool/clock.h"
#include "pool/pool.h"

namespace petps::pool::layout {

inline constexpr uint64_t kSignature = 0x31305F5350544550;  // "PETPS_01"
inline constexpr uint32_t kFormatVersion = 4;
// The first version whose tables may have rows that expire. A pool is written as it from the first
// such table on.
inline constexpr uint32_t kExpiryFormatVersion = 4;
inline constexpr uint32_t kOldestFormatVersion = 1;

inline constexpr uint64_t kJournalBytes = 4096;
inline constexpr uint64_t kProgressBytes = uint64_t{kMaxProgress} * 128;

// The places of a format version's metadata. Extents follow the metadata.
struct Map {
  uint32_t format_version;    // the lowest version that a pool of this map is written as
  uint64_t superblock_bytes;  // room of one copy
  uint64_t metadata_bytes;
  uint32_t max_tables;

  constexpr uint64_t superblock(int copy) const {
    return static_cast<uint64_t>(copy) * superblock_bytes;
  }
  constexpr uint64_t journal() const { return 2 * superblock_bytes; }
  constexpr uint64_t progress() const { return journal() + kJournalBytes; }
  constexpr uint64_t extents() const { return progress() + kProgressBytes; }
  constexpr uint64_t max_extents() const { return (metadata_bytes - extents()) / 8; }
};
inline constexpr Map kMap = {3, 640 << 10, uint64_t{2} << 20, kMaxTables};
// For versions 1 and 2. A pool keeps its map for life; version 1 becomes 2 at its first write.
inline constexpr Map kMapBefore3 = {2, 128 << 10, uint64_t{1} << 20, kMaxTablesBefore3};

inline constexpr const Map& map_of(uint32_t format_version) {
  return format_version < 3 ? kMapBefore3 : kMap;
}

struct Superblock {
  uint64_t signature;
  uint32_t format_version;
  uint32_t length;    // bytes that the checksum covers, from the start
  uint64_t checksum;  // XXH3-64 of {XXH3-64 of this header with 0 here, XXH3-64 of the records}
  uint64_t sequence;  // the valid copy with the higher sequence counts
  uint8_t uuid[16];
  uint8_t boot_id[16];  // of the machine that wrote last
  uint64_t unit_bytes;
  uint32_t generation;
  uint32_t clean;       // 1: the last writer closed cleanly
  uint32_t durability;  // media::Durability
  uint32_t next_table;
  uint32_t next_instance;
  uint32_t table_count;
  uint32_t instance_count;
  uint32_t alias_count;
  uint64_t frozen;  // bit i belongs to the i-th instance record
  uint64_t reserved[4];
};
static_assert(sizeof(Superblock) == 144, "records follow at a fixed place");

struct TableEntry {
  uint32_t id;
  uint32_t instance;
  uint8_t dtype;
  uint8_t feed;
  uint16_t reserved;
  uint32_t dim;
  uint32_t row_bytes;
  uint32_t expire_after;  // seconds, 0 = rows never expire
  uint64_t capacity;
  uint64_t bucket_offset;
  uint64_t bucket_count;
  uint64_t default_row;  // SlotRef, 0 = zeros
  uint64_t rows;         // as of the last clean close
  uint64_t displaced;    // likewise
  char name[kMaxNameBytes + 1];
};
static_assert(sizeof(TableEntry) == 136, "pinned by FORMAT.md");

struct InstanceEntry {
  uint32_t id;
  uint32_t partitions;
  char model[kMaxNameBytes + 1];
  char name[kMaxNameBytes + 1];
};
static_assert(sizeof(InstanceEntry) == 136, "pinned by FORMAT.md");

struct AliasEntry {
  uint32_t instance;
  uint32_t previous;  // its instance before the last switch, 0 = none
  char name[kMaxNameBytes + 1];
};
static_assert(sizeof(AliasEntry) == 72, "pinned by FORMAT.md");
static_assert(kMaxInstances <= 64, "the superblock has 64 frozen bits");
constexpr bool full_catalogue_fits(const Map& map) {
  return sizeof(Superblock) + map.max_tables * sizeof(TableEntry) +
             kMaxInstances * sizeof(InstanceEntry) + kMaxAliases * sizeof(AliasEntry) <=
         map.superblock_bytes;
}
static_assert(full_catalogue_fits(kMap) && full_catalogue_fits(kMapBefore3),
              "a full catalogue must fit one copy");

// One of the two records of a partition's progress; each has its own cache line.
struct ProgressEntry {
  uint32_t instance;
  uint32_t partition;
  uint64_t run;
  uint64_t seq;
  uint64_t offset;
  uint64_t version;
  uint64_t target;
  uint64_t turn;      // the valid record with the higher turn counts; 0 = never written
  uint32_t state;     // bits 0-7 ProgressState, 8-31 the publisher's mark
  uint32_t checksum;  // low 32 bits of XXH3-64 of the bytes before
};
static_assert(sizeof(ProgressEntry) == 64,
              "one cache line, so that a torn one leaves the other whole");

// One of the two records of a partition's event time, in an extent of clocks.
struct ClockEntry {
  uint32_t table;
  uint32_t partition;
  uint64_t turn;  // as of ProgressEntry
  uint64_t cell_ns;
  uint64_t time_ns;
  uint64_t version;
  uint64_t bounds[kExpiryBounds];
  uint64_t shown_ns;
  uint64_t debt_ns;
  uint64_t reserved[6];
  uint64_t checksum;  // XXH3-64 of the bytes before
};
static_assert(sizeof(ClockEntry) == 512, "pinned by FORMAT.md");
inline constexpr uint64_t kClockPairBytes = 2 * sizeof(ClockEntry);

enum class ExtentKind : uint32_t { kBuckets = 1, kSlots = 2, kClocks = 3 };  // never renumber

// An extent record is one 8-byte word, so that its store publishes it whole: bits 0-3 kind, 4-15
// check, 16-39 table, 40-63 units. Extents follow one another in the order of their records.
struct ExtentWord {
  uint32_t kind;
  uint32_t table;
  uint32_t units;
};

inline uint64_t extent_check(uint64_t bare, uint64_t position) {
  const uint64_t input[2] = {bare, position};
  return base::checksum64(input, sizeof input) & 0xFFF;
}

inline uint64_t pack_extent(const ExtentWord& extent, uint64_t position) {
  const uint64_t bare =
      uint64_t{extent.kind} | (uint64_t{extent.table} << 16) | (uint64_t{extent.units} << 40);
  return bare | (extent_check(bare, position) << 4);
}

// Return false if the word is not what pack_extent returns for this position.
inline bool unpack_extent(uint64_t word, uint64_t position, ExtentWord* extent) {
  extent->kind = static_cast<uint32_t>(word & 0xF);
  extent->table = static_cast<uint32_t>((word >> 16) & 0xFFFFFF);
  extent->units = static_cast<uint32_t>(word >> 40);
  return pack_extent(*extent, position) == word &&
         extent->kind >= static_cast<uint32_t>(ExtentKind::kBuckets) &&
         extent->kind <= static_cast<uint32_t>(ExtentKind::kClocks);
}

inline constexpr uint32_t kBucketBytes = 256;  // room index owns the contents
inline constexpr uint64_t kEntriesPerBucket = 14;
inline constexpr uint64_t kLoadNumerator = 4, kLoadDenominator = 5;  // capacity / entries

}  // namespace petps::pool::layout
