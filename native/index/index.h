// Room index: PETHash, the single-level hash index from key to slot. INDEX.md beside this is the essay, FORMAT.md the bytes.
//
// Owns:        buckets, tags, overflow counters, bucket locks, batched find, publish and erase of entries, hot moves and their
//              journal, healing after a crash.
// Never does:  free a slot; touch a row (it only prefetches); drain on behalf of a batch (table does, once per phase).
// Called by:   table.
// Invariants:  1. A key's entries change only under the lock of its home bucket, but for the ref of an entry that stays where it is
//                 (replace); an empty entry of a bucket is claimed only under that bucket's lock. 2. Every bucket that a displaced entry passed has overflow > 0, durably, before the entry is.
//              3. The count in a bucket's word changes before a key is written into it and again after its ref is visible; readers
//              believe a miss only if no probed bucket's count changed meanwhile (proof: fill_entry). 4. Readers never write.
// Threads:     find* from any thread without locks; the writer calls from any thread, one writer per key until its drain; moves are
//              serialised by the caller.
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

// How a key probes: bucket j of its path is (home + j * step) mod count.
struct Path {
  uint64_t home;
  uint64_t step;
  uint8_t tag;
};

// Where a key is: bucket number, entry in it, buckets passed on the way.
struct Place {
  uint64_t bucket = 0;
  uint32_t entry = 0;
  uint64_t distance = 0;
  SlotRef ref = 0;  // 0: the key is not there
};

enum class OpState : uint8_t {
  kPresent,  // planned: the key was seen at (bucket, entry)
  kNew,  // planned: the key was not there; counters of `passed` buckets are raised, it goes to path[passed]
  kAgain,  // publish could not place it: raise() and drain again
  kDone,
  kSkipped,  // by the caller: superseded in the batch, or refused
};

// One key of a batch on its way through plan, raise, publish, settle.
struct Op {
  uint64_t key = 0;
  SlotRef ref = 0;  // in: the new slot; 0 deletes
  SlotRef old = 0;  // planned: what the key points to; done: what it pointed to before
  uint64_t bucket = 0;
  uint32_t entry = 0;
  uint32_t passed = 0;  // buckets of the path whose counters this op raised
  uint32_t lower = 0;   // buckets of the path to lower once the change is durable
  OpState state = OpState::kDone;
};

inline constexpr size_t kNoKey = ~size_t{0};
inline constexpr uint64_t kRecountShare =
    64;  // lowerings that were lost, of the buckets, until a recount is worth its scan

class Index {
 public:
  // `first` = the table's buckets in the pool; generation = the pool's of this open.
  Index(pool::Pool& pool, uint32_t table, uint64_t bucket_offset, uint64_t bucket_count);

  // refs -> rows[i] = base + ref, or null. Prefetches buckets, entries and the first `row_lines` cache lines of each row.
  void find(std::span<const uint64_t> keys, const std::byte** rows, uint32_t row_lines) const;
  // The same without prefetching rows, in step with work on them: visit(context, found, ready) is called once for each key as
  // `found`, in order, when rows[found] is set - the moment to ask for the row's lines - and once as `ready`, in order, kRowAhead
  // keys later, when they have had time to come. kNoKey stands for none.
  using Visit = void (*)(void* context, size_t found, size_t ready);
  void find(std::span<const uint64_t> keys, const std::byte** rows, Visit visit,
            void* context) const;
  // The same search with values instead of rows: refs[i] = ref or 0.
  void find_refs(std::span<const uint64_t> keys, SlotRef* refs) const;
  Place find_one(uint64_t key) const;
  // The live entries of a bucket, all of one instant. Moves between buckets are the caller's to hold off.
  struct LiveEntries {
    std::array<Entry, kEntries> entries;
    size_t count = 0;
  };
  LiveEntries read_bucket(uint64_t number) const;

  // ---- a batch: locate, then replace, or plan, raise, [drain], publish, [drain], settle ----
  // entries[i] and refs[i] = where keys[i] is and what it points to, null and 0 if it is not there. Returns how many are there. step
  // (if any) is called for every key in order, while the search for later ones goes on.
  using Step = void (*)(void* context, size_t i);
  size_t locate(std::span<const uint64_t> keys, Entry** entries, SlotRef* refs, Step step = nullptr,
                void* context = nullptr) const;
  // Exchanges the ref of each entry where it was seen, without a lock. The caller has held moves off since before locate, and every
  // key was there. refs: in, what locate saw; out, what was replaced: of a key that stands twice, its ref before. Returns how many
  // of those there were.
  size_t replace(std::span<Entry* const> entries, const SlotRef* with, SlotRef* refs,
                 media::Flusher& flusher);
  // Sets state, old, bucket and entry of ops with key and ref, from what locate saw.
  void plan(std::span<Op> ops, Entry* const* entries, const SlotRef* refs) const;
  void plan(std::span<Op> ops) const;  // locates first
  void adopt_absence(
      const Op& op,
      media::Flusher& flusher);  // before the walk: a key that is not there is durably not there
  void raise(
      Op& op,
      media::Flusher&
          flusher);  // kNew, kAgain: chooses a bucket with room, raises the counters before it
  void publish(std::span<Op> ops, media::Flusher& flusher);  // makes ops kDone or kAgain
  void settle(const Op& op);  // after the drain: lowers what the op says

  // Single forms: durable when they return. exchange returns the old ref and never frees; erase fails (kFailedPrecondition)
  // when the key's ref is not `expected`, kNotFound when it is not there.
  base::Result<SlotRef> exchange(uint64_t key, SlotRef ref);
  base::Status erase(uint64_t key, SlotRef expected);

  // ---- hot placement; one move at a time per pool ----
  // Moves `key` to its home bucket, evicting cold entries (not in `hot`). Returns entries moved.
  base::Result<uint64_t> move_home(uint64_t key, const std::unordered_set<uint64_t>& hot);
  // Moves displaced entries of this bucket nearer to their home where there is room. Returns entries moved.
  base::Result<uint64_t> rehome_bucket(uint64_t bucket);

  // ---- recovery ----
  // Locks the bucket, heals its tags if its generation is old, tells every live entry, flushes them, then counts it as walked.
  void walk_bucket(uint64_t bucket, media::Flusher& flusher,
                   const std::function<void(uint64_t key, SlotRef ref)>& entry);
  // Tags and words of every bucket, flushed, for a clean close.
  void flush_words(media::Flusher& flusher);
  // ---- recount: overflow counters that are too high come down to what they count (INDEX.md) ----
  // Counters may be too high after a crash, and where one was saturated.
  bool recount_wanted() const {
    return recount_wanted_.load(std::memory_order_relaxed) >
           std::max<uint64_t>(kSaturated / 2, count_ / kRecountShare);
  }
  void want_recount() { recount_wanted_.store(UINT64_MAX / 2, std::memory_order_relaxed); }
  // False when there is no memory to count in. After the walk; one recount at a time.
  bool begin_recount();
  // Counts the displaced entries of up to `buckets` buckets more; true when all are counted. Writers go on.
  bool count_claims(uint64_t buckets);
  // Lowers counters of buckets [from, to) to what was counted. Nothing may be written meanwhile: no batch, no move, and none may
  // have failed. Returns how many were too high.
  uint64_t install_counters(uint64_t from, uint64_t to);
  void end_recount();  // likewise

  // A clean open: nothing to walk; `rows` live entries.
  void set_walked(uint64_t rows, uint64_t displaced);
  // Live entries when the pool was opened; known once the walk has visited every bucket.
  uint64_t rows_at_open() const { return found_ - changed_before_walk_.load(); }
  bool walked() const { return walked_until_.load(std::memory_order_acquire) >= count_; }

  // Live entries: of the buckets walked so far.
  uint64_t rows() const { return rows_.load(std::memory_order_relaxed); }
  uint64_t displaced() const { return displaced_.load(std::memory_order_relaxed); }

  uint64_t bucket_count() const { return count_; }
  const Bucket& bucket(uint64_t number) const { return buckets_[number]; }
  uint32_t generation() const { return generation_; }
  Path path_of(uint64_t key) const;
  // Which of `ranges` equal shares of the buckets the key's home is in.
  static size_t range_of(uint64_t key, size_t ranges);
  uint64_t bucket_at(const Path& path, uint64_t distance) const;
  // True if the bucket's tags are to be trusted now.
  bool trusted(uint64_t word) const {
    return generation_of(word) == generation_ && (word & kStateMask) != kHealing;
  }

 private:
  struct Held {  // a bucket this thread has locked, and its word
    Bucket* bucket = nullptr;
    uint64_t word = 0;
  };
  template <bool to_write, typename Emit, typename Finished>
  void search_batch(std::span<const uint64_t> keys, Emit emit, Finished finished) const;
  Place search(uint64_t key, const Path& path) const;  // believed: retries while buckets change
  Place search_locked(uint64_t key, const Path& path) const;  // the caller holds the home lock
  // True and `place` when the key is in the bucket; else `word` is the one under which it was not.
  bool scan_bucket(const Bucket& bucket, uint64_t key, uint8_t tag, uint64_t* word,
                   Place* place) const;
  Held lock(Bucket& bucket);                  // waits; heals
  bool try_lock(Bucket& bucket, Held* held);  // does not wait
  void unlock(const Held& held);
  bool claim(Bucket& bucket, Held* held);
  void heal(Bucket& bucket);
  static bool has_room(const Bucket& bucket);
  static uint32_t empty_entry(const Bucket& bucket);  // kEntries: none
  void raise_counter(Bucket& bucket, media::Flusher& flusher);
  void lower_counters(const Path& path, uint64_t from, uint64_t to);
  void ask_to_publish(const Op& op) const;
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
  void count_change(const Bucket& bucket, bool displaced, int64_t by);
  void change_claims(const Bucket& in, const Path& path, uint64_t distance, bool comes);
  uint64_t number_of(const Bucket& bucket) const {
    return static_cast<uint64_t>(&bucket - buckets_);
  }

  pool::Pool* pool_;
  media::Media* media_;
  std::byte* base_;
  Bucket* buckets_;
  uint64_t count_;
  uint32_t table_;
  uint32_t generation_;
  base::Atomic<uint64_t> walked_until_{0};
  base::Atomic<uint64_t> rows_{0};
  uint64_t found_ = 0;  // by the walk
  base::Atomic<uint64_t> changed_before_walk_{
      0};  // entries that came, less those that went, ahead of it
  base::Atomic<uint64_t> displaced_{0};
  // Of the recount: displaced entries that passed each bucket, of those that lie in the buckets before counted_until_.
  std::unique_ptr<base::Atomic<uint16_t>[]> claims_;
  base::Atomic<uint64_t> counted_until_{0};
  base::Atomic<uint64_t> recount_wanted_{0};  // lowerings that saturated counters did not take
};

// Finishes a move that a crash interrupted: if both copies of the entry are there, the old one goes. Before the first pull.
base::Status replay_journal(pool::Pool& pool);
// The two places of an entry whose move was interrupted; nulls: there is none. verify of a read-only pool looks past `from`.
struct InterruptedMove {
  Entry* from = nullptr;
  const Entry* to = nullptr;
};
InterruptedMove interrupted_move(const pool::Pool& pool);

inline constexpr uint32_t kSpinsBeforeYield = 64;
inline constexpr uint16_t kTooManyClaims = UINT16_MAX;  // a count of the recount that stays
inline constexpr uint32_t kFullLooks = 1000;  // passes over full buckets until they count as full
inline constexpr size_t kPublishAhead = 12;  // ops whose lines are under way while one is published

}  // namespace petps::index
