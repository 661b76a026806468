// The name of every place that makes bytes durable. Production code only passes the name along.
// The crash suite suppresses one site at a time and must then fail, so no unnecessary persist
// call can stay.
#pragma once

#include <cstdint>

namespace petps::media {

enum class Site : uint8_t {
  // flushes
  kRow,              // pool: a row written into a fresh slot
  kRowHeader,        // pool: that slot's header
  kRaisedCounter,    // index: an overflow counter on the path of a displaced entry
  kEntry,            // index: an entry published, or its ref exchanged
  kErasedEntry,      // index: an entry's ref set to 0
  kProgress,         // pool: one progress record
  kProgressMark,     // pool: a pair that gets its first record together with other pairs
  kClock,            // pool: the event time of one partition of a table whose rows expire
  kSuperblock,       // pool: one superblock copy
  kExtentRecord,     // pool: ownership of an extent
  kReusedExtent,     // pool: the zeros over the buckets or clocks that an extent had
  kJournal,          // index: the record of a hot move
  kMovedEntry,       // index: the copy of an entry at its new place
  kVacatedEntry,     // index: the place that the entry left
  kFreeMap,          // pool: the free list that a clean close stores
  kBucketWord,       // index: words and tags that a clean close stores
  kAdoptedMetadata,  // pool: extent and progress records that a dead process may not have flushed
  kAdoptedBucket,    // index: what the walk found in a bucket, before it frees unreachable slots
  // index: the absence of a key that a dead process may have erased, before it is inserted again
  kAdoptedPath,
  // drains
  kFilled,          // table: first drain of a batch
  kPublished,       // table: second drain of a batch
  kProgressed,      // table: third drain of a batch
  kProgressMarked,  // pool: marks of pairs, before the first record in any of them
  kClocked,         // table: event times, before the progress that covers their commits
  kSuperblockDrain,
  kExtentRecordDrain,
  kJournalDrain,
  kMovedDrain,
  kVacatedDrain,
  kCloseDrain,
  kCopiedDrain,   // table: some buckets copied into the array of a table that grows
  kAdoptedDrain,  // pool: before an unclean pool is written; table: the walk, before it frees
  // syncs: they reach the disk whatever the durability
  kAdoptedSync,     // pool: the superblock copy that was read, before the other one is overwritten
  kSuperblockSync,  // pool: one superblock copy
  kNewTableSync,    // pool: buckets, extent records and default row, before a superblock names them
  kGrownSync,       // pool: the array of a table that grew, before a superblock names it
  kReusedSync,      // pool: the empty headers of slots that a dropped table had
  kPowerSync,       // media: everything, before the durability becomes `power`
  kCloseSync,       // pool: everything that the clean flag vouches for
  kCount
};

inline constexpr Site kFirstSync = Site::kAdoptedSync;

}  // namespace petps::media
