// Room index: PETHash, the single-level hash index from key to slot. INDEX.md explains the
// design, FORMAT.md gives the bytes.
//
// Owns:        buckets, tags, overflow counters, bucket locks; batched find, publish and erase of
//              entries; hot moves and their journal; healing after a crash.
// Never does:  free a slot; read or write a row (it only prefetches rows); drain on behalf of a
//              batch (table drains, once per phase).
// Called by:   table.
// Invariants:  1. A key's entries (two during a move, otherwise at most one) change only under the
//                 lock of its home bucket. An entry is filled or emptied only under the lock of
//                 the bucket that it is in as well. Exceptions: replace exchanges the ref of an
//                 entry that stays; replay_journal runs before any other writer.
//              2. The overflow counter of a bucket is 255, or at least the number of displaced
//                 entries that passed it. A raise is durable before the entry is published. A
//                 lowering follows the durable removal of the entry, or undoes a raise that no
//                 entry relies on.
//              3. The count in a bucket's word changes before a key is written into the bucket,
//                 and again after the key's ref is visible. Readers accept a miss only if the
//                 count of no probed bucket changed during the search (proof: fill_entry).
//              4. Readers never write.
// Threads:     any thread may call find*, without locks. Any thread may call the writing
//              functions; a key has one writer until that writer's drain. The caller serialises
//              moves.
// Source:      PetPS section 3.2.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/status.h"
#include "index/bucket.h"
#include "media/media.h"
#include "pool/pool.h"

namespace petps::index {

// The probe path of a key: bucket j of the path is (home + j * step) mod count.
struct Path {
  uint64_t home;
  uint64_t step;
  uint8_t tag;
};

// The place of a key: bucket number, entry in that bucket, number of buckets passed from home.
struct Place {
  uint64_t bucket = 0;
  uint32_t entry = 0;
  uint64_t distance = 0;
  SlotRef ref = 0;  // 0: the key is absent
};

enum class OpState : uint8_t {
  // Planned: the key was seen at (bucket, entry).
  kPresent,
  // Planned: the key was absent. The counters of the first `passed` buckets of its path are
  // raised, and the key goes to bucket `passed` of the path.
  kNew,
  // publish() found no room for the key: call raise() and drain again.
  kAgain,
  kDone,
  // The caller has dropped the op (superseded in the batch, or refused), or raise() found no room
  // in the whole table.
  kSkipped,
};

// One key of a batch; it passes through plan, raise, publish and settle.
struct Op {
  uint64_t key = 0;
  SlotRef ref = 0;  // in: the new slot; 0 deletes
  SlotRef old = 0;  // planned: the key's ref; done: the key's ref before the change
  uint64_t bucket = 0;
  uint32_t entry = 0;
  uint32_t passed = 0;  // this op has raised the counters of buckets [0, passed) of the path
  uint32_t lower = 0;   // settle() lowers the counters of buckets [0, lower) of the path
  OpState state = OpState::kDone;
};

inline constexpr size_t kNoKey = ~size_t{0};
// A recount is worth its pass over the buckets when the missed lowerings exceed 1 / kRecountShare
// of the buckets, and kSaturated / 2.
inline constexpr uint64_t kRecountShare = 64;

class Index {
 public:
  // bucket_offset: pool offset of the table's first bucket. The generation is the pool's.
  // row_bytes: of the rows that find() returns.
  Index(pool::Pool& pool, uint64_t bucket_offset, uint64_t bucket_count, uint32_t row_bytes = 1);

  // Set rows[i] to the row of keys[i], or to null if the key is absent. Prefetch buckets,
  // entries and the first `row_lines` cache lines of each row.
  void find(std::span<const uint64_t> keys, const std::byte** rows, uint32_t row_lines) const;
  // Do the same search, but leave the prefetching of rows to `visit`, so that the search runs in
  // step with work on the rows. Call visit(context, searched, ready) with the position of each
  // key once as `searched` and, kRowAhead keys later, once as `ready`, both in order; kNoKey
  // stands for no key. When a key is `searched`, rows[searched] is set (null: the key is absent),
  // and visit prefetches the row's lines. When it is `ready`, the lines have had time to arrive.
  using Visit = void (*)(void* context, size_t searched, size_t ready);
  void find(std::span<const uint64_t> keys, const std::byte** rows, Visit visit,
            void* context) const;
  // Return the row of an entry's ref, or null if it does not lie in the pool: the entry is damaged.
  const std::byte* row_of(SlotRef ref) const { return row_below(ref, last_row()); }
  // Set refs[i] to the ref of keys[i], or to 0 if the key is absent.
  void find_refs(std::span<const uint64_t> keys, SlotRef* refs) const;
  Place find_one(uint64_t key) const;
  struct LiveEntries {
    std::array<Entry, kEntries> entries;
    size_t count = 0;
  };
  // Return the live entries of bucket `number`. Each ref is one that its key had during the
  // call, and a key that is in the bucket during the whole call is in the result. The caller
  // blocks moves between buckets.
  LiveEntries read_bucket(uint64_t number) const;

  // ---- a batch: locate, then replace, or plan, raise, [drain], publish, [drain], settle ----
  // Set entries[i] to the entry of keys[i] and refs[i] to its ref, or to null and 0 if the key
  // is absent. Return how many keys are present. Call step (if any) for every key in order,
  // while the search for later keys goes on.
  using Step = void (*)(void* context, size_t i);
  size_t locate(std::span<const uint64_t> keys, Entry** entries, SlotRef* refs, Step step = nullptr,
                void* context = nullptr) const;
  // Exchange the ref of each entry in the place that locate found, without a lock. The caller
  // has blocked moves since before locate, and every key was present. refs: on entry, the refs
  // that locate saw; on return, the refs that were replaced. For a key that is in the batch
  // twice, the second replaced ref is the one that its first occurrence stored. Return how many
  // replaced refs differ from what locate saw: the repeated keys.
  size_t replace(std::span<Entry* const> entries, const SlotRef* with, SlotRef* refs,
                 media::Flusher& flusher);
  // Set state, old, bucket and entry of ops that have key and ref, from the results of locate.
  void plan(std::span<Op> ops, Entry* const* entries, const SlotRef* refs) const;
  // Locate the keys of the ops, then plan.
  void plan(std::span<Op> ops) const;
  // A killed process may have erased the key without a drain. Until the walk is complete, flush
  // the buckets that may hold the key, so that the next drain makes its absence durable.
  void flush_absence(const Op& op, media::Flusher& flusher);
  // Choose a bucket with room for an op that is kNew or kAgain, and raise the counters before it.
  // Set kSkipped if the table has no room.
  void raise(Op& op, media::Flusher& flusher);
  // Publish the ops that are kPresent or kNew; each becomes kDone or kAgain.
  void publish(std::span<Op> ops, media::Flusher& flusher);
  // Lower the counters that the op names. Call it after the drain that follows publish.
  void settle(const Op& op);

  // Give these keys, which are distinct, the refs that they have in `other`, or make them absent.
  // Nobody else writes them in either index. Nothing is drained, so no superblock may name this
  // index before the caller's drain (table/GROW.md). only_present: leave absent keys absent. Return
  // false if a key found no room.
  bool mirror(const Index& other, std::span<const uint64_t> keys, bool only_present,
              media::Flusher& flusher);

  // Single forms; durable when they return. exchange inserts the key or replaces its ref. It
  // returns the old ref (0: the key was absent) and never frees it. It fails with
  // kResourceExhausted if every bucket is full. erase fails with kFailedPrecondition if the key's
  // ref is not `expected`, and with kNotFound if the key is absent.
  base::Result<SlotRef> exchange(uint64_t key, SlotRef ref);
  base::Status erase(uint64_t key, SlotRef expected);

  // ---- hot placement; one move at a time per pool ----
  // Move `key` to its home bucket. If that is full, first evict an entry whose key is not in
  // `hot`. Return the number of entries moved.
  base::Result<uint64_t> move_home(uint64_t key, const std::unordered_set<uint64_t>& hot);
  // Move displaced entries of this bucket nearer to their home where there is room. Return the
  // number of entries moved.
  base::Result<uint64_t> rehome_bucket(uint64_t bucket);

  // ---- recovery ----
  // Lock the bucket, heal its tags if its generation is old, call `entry` for every live entry,
  // flush the bucket and count it as walked.
  void walk_bucket(uint64_t bucket, media::Flusher& flusher,
                   const std::function<void(uint64_t key, SlotRef ref)>& entry);
  // Flush the tags and the word of every bucket, for a clean close.
  void flush_words(media::Flusher& flusher);

  // ---- recount: lower overflow counters that are too high to the exact count (INDEX.md) ----
  // Return true if a recount is worth its pass over the buckets: after an unclean open, or after
  // saturated counters have missed enough lowerings.
  bool wants_recount() const {
    return missed_lowerings_.load(std::memory_order_relaxed) >
           std::max<uint64_t>(kSaturated / 2, bucket_count_ / kRecountShare);
  }
  void request_recount() { missed_lowerings_.store(UINT64_MAX / 2, std::memory_order_relaxed); }
  // Return false if there is no memory for the counts. Call it after the walk; one recount runs
  // at a time.
  bool begin_recount();
  // Count the displaced entries of up to `buckets` more buckets. Return true when all buckets
  // are counted. Writers continue.
  bool count_claims(uint64_t buckets);
  // Lower the counters of buckets [from, to) to what was counted. No batch and no move may run
  // during the call, and none may have failed before. Return how many counters were too high.
  uint64_t install_counters(uint64_t from, uint64_t to);
  // End the recount. No batch and no move may run during the call.
  void end_recount();

  // Mark every bucket as walked, after a clean open; the table has `rows` live entries.
  void set_walked(uint64_t rows, uint64_t displaced);
  // Return the number of live entries when the pool was opened. It is exact once the walk has
  // visited every bucket.
  uint64_t rows_at_open() const { return found_ - changed_before_walk_.load(); }
  bool walked() const { return walked_until_.load(std::memory_order_acquire) >= bucket_count_; }

  // Return the number of live entries in the buckets walked so far.
  uint64_t rows() const { return rows_.load(std::memory_order_relaxed); }
  uint64_t displaced() const { return displaced_.load(std::memory_order_relaxed); }

  uint64_t bucket_count() const { return bucket_count_; }
  uint64_t bucket_offset() const {  // in the pool
    return static_cast<uint64_t>(reinterpret_cast<const std::byte*>(buckets_) - base_);
  }
  const Bucket& bucket(uint64_t number) const { return buckets_[number]; }
  uint32_t generation() const { return generation_; }
  Path path_of(uint64_t key) const;
  // Return which of `ranges` equal shares of the buckets contains the key's home.
  static size_t range_of(uint64_t key, size_t ranges);
  uint64_t bucket_at(const Path& path, uint64_t distance) const;
  // Return true if the tags of a bucket with this word are valid.
  bool trusted(uint64_t word) const {
    return generation_of(word) == generation_ && (word & kStateMask) != kHealing;
  }

 private:
  // A bucket that this thread has locked, and the bucket's word.
  struct Held {
    Bucket* bucket = nullptr;
    uint64_t word = 0;
  };
  template <bool to_write, typename Emit, typename Finished>
  void search_batch(std::span<const uint64_t> keys, Emit emit, Finished finished) const;
  // Find the key without locks; retry until the answer is valid (INDEX.md).
  Place search(uint64_t key, const Path& path) const;
  // Find the key. The caller holds the lock of the home bucket.
  Place search_locked(uint64_t key, const Path& path) const;
  // Return true and set `place` if the key is in the bucket. In both cases, set `word` to the
  // bucket's word that was loaded before the entries were read.
  bool scan_bucket(const Bucket& bucket, uint64_t key, uint8_t tag, uint64_t* word,
                   Place* place) const;
  Held lock(Bucket& bucket);                  // waits; heals an old bucket
  bool try_lock(Bucket& bucket, Held* held);  // does not wait for the lock; heals an old bucket
  void unlock(const Held& held);
  void heal(Bucket& bucket);
  static bool has_room(const Bucket& bucket);
  // Return the first empty entry; kEntries if the bucket is full.
  static uint32_t empty_entry(const Bucket& bucket);
  void raise_counter(Bucket& bucket, media::Flusher& flusher);
  void lower_counters(const Path& path, uint64_t from, uint64_t to);
  void prefetch_op(const Op& op) const;
  void publish_one(Op& op, media::Flusher& flusher);
  bool try_publish(Op& op, const Path& path, Held* home, media::Flusher& flusher);
  bool erase_at(Op& op, const Place& at, const Held& home, media::Flusher& flusher);
  bool place_new(Op& op, const Path& path, Held* home, media::Flusher& flusher);
  void fill_entry(Held* held, uint32_t entry, uint64_t key, uint8_t tag, SlotRef ref,
                  media::Flusher& flusher, media::Site site);
  base::Result<bool> move(uint64_t key, uint64_t to_distance);
  base::Status move_locked(uint64_t key, const Path& path, const Place& at, uint64_t to_distance,
                           Held* target, uint32_t entry);
  base::Result<bool> evict(uint64_t bucket, const std::unordered_set<uint64_t>& hot);
  void count_rows(const Bucket& bucket, bool displaced, int64_t by);
  void change_claims(const Bucket& in, const Path& path, uint64_t distance, bool added);
  // The highest ref of a row that lies in the pool as it is now.
  uint64_t last_row() const { return media_->size() - row_bytes_; }
  // Do as row_of(); last: a last_row(), maybe of before the pool grew. One compare finds both a ref
  // of 0 and one beyond the pool.
  const std::byte* row_below(SlotRef ref, uint64_t last) const {
    if (ref - 1 >= last) [[unlikely]]
      return ref == 0 ? nullptr : row_of_later(ref);
    return base_ + ref;
  }
  const std::byte* row_of_later(SlotRef ref) const;
  uint64_t number_of(const Bucket& bucket) const {
    return static_cast<uint64_t>(&bucket - buckets_);
  }

  pool::Pool* pool_;
  media::Media* media_;
  std::byte* base_;
  Bucket* buckets_;
  uint64_t bucket_count_;
  uint32_t generation_;
  uint32_t row_bytes_;
  base::Atomic<uint64_t> walked_until_{0};
  base::Atomic<uint64_t> rows_{0};
  uint64_t found_ = 0;  // live entries that the walk found
  // Entries added minus entries removed in buckets that the walk had not reached.
  base::Atomic<uint64_t> changed_before_walk_{0};
  base::Atomic<uint64_t> displaced_{0};
  // For the recount: how many displaced entries passed each bucket, counting the entries in
  // buckets [0, counted_until_).
  std::unique_ptr<base::Atomic<uint16_t>[]> claims_;
  base::Atomic<uint64_t> counted_until_{0};
  // Lowerings that saturated counters missed. request_recount() stores UINT64_MAX / 2, and
  // begin_recount() stores 0.
  base::Atomic<uint64_t> missed_lowerings_{0};
};

// Finish a move that a crash interrupted: if both copies of the entry exist, empty the old one.
// Call it before the first pull.
base::Status replay_journal(pool::Pool& pool);
// The two copies of an entry whose move was interrupted; null pointers if there is none. verify
// of a read-only pool ignores `from`.
struct InterruptedMove {
  Entry* from = nullptr;
  const Entry* to = nullptr;
};
InterruptedMove interrupted_move(const pool::Pool& pool);

inline constexpr uint32_t kSpinsBeforeYield = 64;
// A count of the recount that reached this value stays there.
inline constexpr uint16_t kTooManyClaims = UINT16_MAX;
// Passes of raise() over a path of full buckets before it treats the table as full.
inline constexpr uint32_t kFullPasses = 1000;
// How many ops ahead publish() and replace() prefetch.
inline constexpr size_t kPublishAhead = 12;

}  // namespace petps::index
