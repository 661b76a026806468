// The write side. A writer of a key holds the lock of the key's home bucket. It takes further
// locks only by try_lock, and releases all its locks if a try_lock fails, so writers never
// deadlock.
#include <algorithm>

#include "base/check.h"
#include "base/hash.h"
#include "base/prefetch.h"
#include "index/index.h"

namespace petps::index {

using base::Code;
using base::Result;
using base::Status;
using media::Flusher;
using media::Site;

Index::Index(pool::Pool& pool, uint64_t bucket_offset, uint64_t bucket_count, uint32_t row_bytes)
    : pool_(&pool),
      media_(&pool.medium()),
      base_(pool.at(0)),
      buckets_(reinterpret_cast<Bucket*>(pool.at(bucket_offset))),
      bucket_count_(bucket_count),
      generation_(pool.generation()),
      row_bytes_(row_bytes) {}

// ---- locks ----

// Try once to take the lock. In an older generation, ignore the lock, because its holder died: take
// it and mark the bucket as being healed, with one compare-and-swap, then heal the bucket.
bool Index::try_lock(Bucket& bucket, Held* held) {
  uint64_t seen = load64(bucket.word);
  if (generation_of(seen) != generation_) {
    const uint64_t healing =
        (uint64_t{generation_} << 32) | (next_count(seen) & kCountMask) | kHealing;
    if (!base::exchange64(bucket.word, seen, healing)) return false;
    media_->report_store(&bucket.word, sizeof bucket.word);
    heal(bucket);
    held->word = (healing & ~kStateMask) | kLocked;
    store64(bucket.word, held->word);  // must come after the tags
  } else {
    if ((seen & kStateMask) != kFree) return false;
    held->word = seen | kLocked;
    if (!base::exchange64(bucket.word, seen, held->word)) return false;
  }
  media_->report_store(&bucket.word, sizeof bucket.word);
  held->bucket = &bucket;
  return true;
}

Index::Held Index::lock(Bucket& bucket) {
  Held held;
  for (uint32_t spins = 1; !try_lock(bucket, &held); ++spins) {
    if (spins % kSpinsBeforeYield == 0) {
      base::yield();
    } else {
      base::pause();
    }
  }
  return held;
}

void Index::unlock(const Held& held) {
  store64(held.bucket->word, held.word & ~kStateMask);
  media_->report_store(&held.bucket->word, sizeof held.bucket->word);
}

void Index::heal(Bucket& bucket) {
  for (uint32_t i = 0; i < kEntries; ++i) {
    if (load64(bucket.entries[i].ref) == 0) continue;
    store8(bucket.tags[i], path_of(load64(bucket.entries[i].key)).tag);
    media_->report_store(&bucket.tags[i], 1);
  }
}

// ---- small pieces ----

uint32_t Index::empty_entry(const Bucket& bucket) {
  uint32_t i = 0;
  while (i < kEntries && load64(bucket.entries[i].ref) != 0) ++i;
  return i;
}

bool Index::has_room(const Bucket& bucket) { return empty_entry(bucket) < kEntries; }

void Index::raise_counter(Bucket& bucket, Flusher& flusher) {
  uint8_t seen = load8(bucket.overflow);
  while (seen != kSaturated &&
         !base::exchange8(bucket.overflow, seen, static_cast<uint8_t>(seen + 1))) {
  }
  media_->report_store(&bucket.overflow, 1);
  flusher.flush(&bucket.overflow, 1, Site::kRaisedCounter);
}

// Lower the counters of buckets [from, to) of the path. The removal that they counted must
// already be durable; the lowering need not be durable.
void Index::lower_counters(const Path& path, uint64_t from, uint64_t to) {
  for (uint64_t distance = from; distance < to; ++distance) {
    Bucket& bucket = buckets_[bucket_at(path, distance)];
    uint8_t seen = load8(bucket.overflow);
    while (seen != kSaturated && seen != 0 &&
           !base::exchange8(bucket.overflow, seen, static_cast<uint8_t>(seen - 1))) {
    }
    if (seen == kSaturated) missed_lowerings_.fetch_add(1, std::memory_order_relaxed);
    media_->report_store(&bucket.overflow, 1);
  }
}

// Count an added (+1) or removed (-1) entry of a bucket whose lock the caller holds. This keeps
// rows() exact during the walk: the walk itself counts the entries of a bucket that it reaches
// later.
void Index::count_rows(const Bucket& bucket, bool displaced, int64_t by) {
  if (number_of(bucket) >= walked_until_.load(std::memory_order_acquire)) {
    changed_before_walk_.fetch_add(static_cast<uint64_t>(by), std::memory_order_relaxed);
    return;
  }
  rows_.fetch_add(static_cast<uint64_t>(by), std::memory_order_relaxed);
  if (displaced) displaced_.fetch_add(static_cast<uint64_t>(by), std::memory_order_relaxed);
}

// Fill an empty entry. Below is the proof that no reader accepts a false miss, and that no
// reader takes the ref of another key.
//
// The reader: it loads a bucket's word, then tags, keys and refs, then the overflow counter. At
// the end of a miss it loads the word of every probed bucket again. Every load acquires and every
// store releases.
//
// The writer: the entry is empty, and no other thread fills it, because this thread has the
// bucket's lock. The count changes twice: before the key is stored, and after the ref is stored.
// The second change is visible before the lock is free, and before the key leaves its old place
// (move_locked).
//
// No false miss. Let a key be in the table during the whole search, in places P0, P1, ... one
// after the other, and suppose that the search misses it.
//   1. The search missed P0, so it saw P0 emptied (or overwritten, which happens later still). So
//      its later loads see both changes of the count of P1's bucket.
//   2. If it read P1's bucket before the ref was visible there, the word that it had loaded lacks
//      the second change. The last load of the word then differs, and the search retries.
//   3. Otherwise it saw P1 emptied. The same argument holds for P2 and so on, up to the last
//      place, which was never emptied: a contradiction.
//   4. If the probe stopped before it reached P(i+1), it read a counter of 0. That counter was
//      raised for the key before P(i+1) was filled, so the 0 was stored later: after the key was
//      filled into a nearer place P(i+2). So the reader's later loads see both changes of the
//      count of that bucket, and the argument continues with P(i+2).
// With only one change, a reader that loads the word between that change and the store of the ref
// sees the key in neither place, and sees an unchanged word.
//
// No foreign ref. The ref of an earlier key was cleared before this key is stored, under the same
// lock. Suppose a reader matched the earlier key and loads this ref. When it loads the key again
// it sees this key; or, if the earlier key has come back to the entry by then, it sees a changed
// count.
//
// The other writers of these words:
//   replace and try_publish exchange the ref of an entry that stays; a reader sees the old ref or
//     the new one.
//   erase_at clears a ref: from then on a miss is true, and a hit loaded the ref before that.
//   heal stores tags while the state is kHealing; a reader that sees kHealing, or an older
//     generation, compares keys instead of tags.
//   unlock and try_lock change the state, which readers ignore.
//   raise_counter runs before the fill, and lower_counters after the removal.
//   replay_journal gives its own reason.
void Index::fill_entry(Held* held, uint32_t entry, uint64_t key, uint8_t tag, SlotRef ref,
                       Flusher& flusher, Site site) {
  Bucket& bucket = *held->bucket;
  Entry& place = bucket.entries[entry];
  held->word = next_count(held->word);
  store64(bucket.word, held->word);
  media_->report_store(&bucket.word, sizeof bucket.word);
  store64(place.key, key);
  media_->report_store(&place.key, sizeof place.key);
  store8(bucket.tags[entry], tag);
  media_->report_store(&bucket.tags[entry], 1);
  store64(place.ref, ref);
  media_->report_store(&place.ref, sizeof place.ref);
  flusher.flush(&place, sizeof place, site);
  held->word = next_count(held->word);  // unlock stores it, or move_locked before that
}

Place Index::search_locked(uint64_t key, const Path& path) const {
  Place place;
  uint64_t number = path.home;
  for (uint64_t distance = 0; distance < bucket_count_; ++distance) {
    const Bucket& bucket = buckets_[number];
    uint64_t word;
    if (scan_bucket(bucket, key, path.tag, &word, &place)) {
      place.distance = distance;
      return place;
    }
    if (load8(bucket.overflow) == 0) break;
    number += path.step;
    if (number >= bucket_count_) number -= bucket_count_;
  }
  return Place{};
}

// ---- a batch ----

// Without the flush, a power cut could bring back a key that a killed process erased, beside the
// key's new entry. Once the walk is complete, every bucket is durable.
void Index::flush_absence(const Op& op, Flusher& flusher) {
  if (walked()) return;
  const Path path = path_of(op.key);
  for (uint64_t distance = 0; distance < bucket_count_; ++distance) {
    const Bucket& bucket = buckets_[bucket_at(path, distance)];
    flusher.flush(&bucket, sizeof bucket, Site::kAdoptedPath);
    if (load8(bucket.overflow) == 0) break;
  }
}

void Index::raise(Op& op, Flusher& flusher) {
  const Path path = path_of(op.key);
  const bool was_full = op.state == OpState::kAgain;
  op.state = OpState::kNew;
  Bucket* bucket = &buckets_[bucket_at(path, op.passed)];
  uint32_t passes = 0;
  for (bool full = was_full || !has_room(*bucket); full; full = !has_room(*bucket)) {
    if (op.passed + 1 >= bucket_count_) {
      // Each bucket was full when this loop read it. Other writers may have freed an entry in a
      // bucket that the loop had passed and filled one ahead of it: a table within its capacity
      // always has room somewhere. So retry.
      lower_counters(path, 0, op.passed);  // no published entry relies on these raises
      op.passed = 0;
      if (rows() >= bucket_count_ * kEntries || ++passes == kFullPasses) {
        op.state = OpState::kSkipped;
        return;
      }
      base::yield();
      bucket = &buckets_[path.home];
      continue;
    }
    raise_counter(*bucket, flusher);
    op.passed += 1;
    bucket = &buckets_[bucket_at(path, op.passed)];
  }
}

// Prefetch the bucket and the entry of an op. They have left the caches since the plan, because
// the rows of a slice passed through the caches. A locked instruction on an uncached line would
// stall all instructions after it.
void Index::prefetch_op(const Op& op) const {
  if (op.state == OpState::kPresent) {
    base::prefetch_for_write(&buckets_[op.bucket]);
    base::prefetch_for_write(&buckets_[op.bucket].entries[op.entry]);
  } else if (op.state == OpState::kNew) {
    base::prefetch_for_write(&buckets_[path_of(op.key).home]);
  }
}

void Index::publish(std::span<Op> ops, Flusher& flusher) {
  for (size_t i = 0; i < std::min(kPublishAhead, ops.size()); ++i) prefetch_op(ops[i]);
  for (size_t i = 0; i < ops.size(); ++i) {
    if (i + kPublishAhead < ops.size()) prefetch_op(ops[i + kPublishAhead]);
    Op& op = ops[i];
    if (op.state == OpState::kPresent || op.state == OpState::kNew) publish_one(op, flusher);
  }
}

size_t Index::replace(std::span<Entry* const> entries, const SlotRef* with, SlotRef* refs,
                      Flusher& flusher) {
  size_t repeats = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (i + kPublishAhead < entries.size()) base::prefetch_for_write(entries[i + kPublishAhead]);
    Entry& entry = *entries[i];
    const SlotRef old = load64(entry.ref);
    store64(entry.ref, with[i]);
    media_->report_store(&entry.ref, sizeof entry.ref);
    flusher.flush(&entry, sizeof entry, Site::kEntry);
    repeats += old != refs[i] ? 1 : 0;
    refs[i] = old;
  }
  return repeats;
}

void Index::publish_one(Op& op, Flusher& flusher) {
  const Path path = path_of(op.key);
  for (;;) {
    Held home = lock(buckets_[path.home]);
    const bool finished = try_publish(op, path, &home, flusher);
    unlock(home);
    if (finished) return;
    base::pause();  // another writer has the second lock
  }
}

// Publish an op; the caller holds the home lock. Return false and change nothing if another thread
// holds a further lock that the op needs.
bool Index::try_publish(Op& op, const Path& path, Held* home, Flusher& flusher) {
  Place at;
  if (op.state == OpState::kPresent && op.ref != 0) {
    // The key is where the plan saw it, unless it has moved since. Load the key again after the
    // ref: another writer may just be giving the entry to another key, and it stores the key
    // before the ref.
    const Entry& entry = buckets_[op.bucket].entries[op.entry];
    const SlotRef ref = load64(entry.key) == op.key ? load64(entry.ref) : 0;
    // The distance is not known and not used: only a replacement comes here.
    if (ref != 0 && load64(entry.key) == op.key) at = {op.bucket, op.entry, 0, ref};
  }
  if (at.ref == 0) at = search_locked(op.key, path);
  if (at.ref == 0) {
    if (op.ref != 0) return place_new(op, path, home, flusher);
    op.old = 0;
    op.state = OpState::kDone;
    return true;
  }
  if (op.ref == 0) return erase_at(op, at, *home, flusher);
  Entry& entry = buckets_[at.bucket].entries[at.entry];
  store64(entry.ref, op.ref);
  media_->report_store(&entry.ref, sizeof entry.ref);
  flusher.flush(&entry, sizeof entry, Site::kEntry);
  op.old = at.ref;
  // If counters were raised, it was in vain: another writer has inserted the key since the plan.
  op.lower = op.passed;
  op.state = OpState::kDone;
  return true;
}

bool Index::erase_at(Op& op, const Place& at, const Held& home, Flusher& flusher) {
  Bucket& bucket = buckets_[at.bucket];
  Held held;
  const bool displaced = &bucket != home.bucket;
  if (displaced && !try_lock(bucket, &held)) return false;
  Entry& entry = bucket.entries[at.entry];
  store64(entry.ref, 0);
  media_->report_store(&entry.ref, sizeof entry.ref);
  flusher.flush(&entry, sizeof entry, Site::kErasedEntry);
  count_rows(bucket, displaced, -1);
  change_claims(bucket, path_of(op.key), at.distance, /*added=*/false);
  if (displaced) unlock(held);
  op.old = at.ref;
  op.lower = static_cast<uint32_t>(at.distance);
  op.state = OpState::kDone;
  return true;
}

bool Index::place_new(Op& op, const Path& path, Held* home, Flusher& flusher) {
  // kPresent: another writer has erased the key since the plan, and no counter is raised for it
  // yet.
  if (op.state == OpState::kPresent) op.passed = 0;
  Bucket& bucket = buckets_[bucket_at(path, op.passed)];
  Held other;
  Held* held = home;
  if (&bucket != home->bucket) {
    if (!try_lock(bucket, &other)) return false;
    held = &other;
  }
  const uint32_t entry = empty_entry(bucket);
  if (entry < kEntries) {
    fill_entry(held, entry, op.key, path.tag, op.ref, flusher, Site::kEntry);
    count_rows(bucket, held == &other, +1);
    change_claims(bucket, path, op.passed, /*added=*/true);
    op.old = 0;
    op.lower = 0;
    op.state = OpState::kDone;
  } else {
    op.state = OpState::kAgain;
  }
  if (held == &other) unlock(other);
  return true;
}

void Index::settle(const Op& op) {
  if (op.lower != 0) lower_counters(path_of(op.key), 0, op.lower);
}

bool Index::mirror(const Index& other, std::span<const uint64_t> keys, bool only_present,
                   Flusher& flusher) {
  std::vector<SlotRef> refs(keys.size());
  other.find_refs(keys, refs.data());
  std::vector<Op> ops(keys.size());
  for (size_t i = 0; i < ops.size(); ++i) {
    ops[i].key = keys[i];
    ops[i].ref = refs[i];
  }
  plan(ops);
  if (only_present) std::erase_if(ops, [](const Op& op) { return op.state == OpState::kNew; });
  for (bool again = true; again;) {
    for (Op& op : ops) {
      if (op.state == OpState::kNew || op.state == OpState::kAgain) raise(op, flusher);
    }
    publish(ops, flusher);
    again = std::any_of(ops.begin(), ops.end(),
                        [](const Op& op) { return op.state == OpState::kAgain; });
  }
  for (const Op& op : ops) settle(op);
  return std::none_of(ops.begin(), ops.end(),
                      [](const Op& op) { return op.state == OpState::kSkipped; });
}

Result<SlotRef> Index::exchange(uint64_t key, SlotRef ref) {
  PETPS_CHECK(ref != 0, "exchange publishes a slot; erase removes one");
  Flusher flusher(*media_);
  Op op;
  op.key = key;
  op.ref = ref;
  plan({&op, 1});
  while (op.state != OpState::kDone) {
    if (op.state != OpState::kPresent) {
      raise(op, flusher);
      if (op.state == OpState::kSkipped) {
        settle(op);
        return Status(Code::kResourceExhausted, "every bucket of the table is full");
      }
      PETPS_RETURN_IF_ERROR(flusher.drain(Site::kFilled));
    }
    publish({&op, 1}, flusher);
  }
  PETPS_RETURN_IF_ERROR(flusher.drain(Site::kPublished));
  settle(op);
  return op.old;
}

Status Index::erase(uint64_t key, SlotRef expected) {
  Flusher flusher(*media_);
  Op op;
  op.key = key;
  const Path path = path_of(key);
  for (bool finished = false; !finished;) {
    const Held home = lock(buckets_[path.home]);
    const Place at = search_locked(key, path);
    if (at.ref != expected || at.ref == 0) {
      unlock(home);
      return at.ref == 0
                 ? Status(Code::kNotFound, "the key is not in the index")
                 : Status(Code::kFailedPrecondition, "the key points to another slot by now");
    }
    finished = erase_at(op, at, home, flusher);
    unlock(home);
    if (!finished) base::pause();
  }
  PETPS_RETURN_IF_ERROR(flusher.drain(Site::kPublished));
  settle(op);
  return Status();
}

// ---- recovery ----

void Index::walk_bucket(uint64_t number, Flusher& flusher,
                        const std::function<void(uint64_t, SlotRef)>& entry) {
  Bucket& bucket = buckets_[number];
  const Held held = lock(bucket);
  uint64_t live = 0;
  uint64_t displaced = 0;
  for (const Entry& e : bucket.entries) {
    const uint64_t ref = load64(e.ref);
    if (ref == 0) continue;
    const uint64_t key = load64(e.key);
    entry(key, ref);
    live += 1;
    displaced += path_of(key).home != number ? 1 : 0;
  }
  flusher.flush(&bucket, sizeof bucket, Site::kAdoptedBucket);
  // A bucket before walked_until_ is counted already.
  if (number >= walked_until_.load(std::memory_order_relaxed)) {
    found_ += live;
    rows_.fetch_add(live, std::memory_order_relaxed);
    displaced_.fetch_add(displaced, std::memory_order_relaxed);
    walked_until_.store(number + 1, std::memory_order_release);
  }
  unlock(held);
}

void Index::set_walked(uint64_t rows, uint64_t displaced) {
  found_ = rows;
  rows_.store(rows, std::memory_order_relaxed);
  displaced_.store(displaced, std::memory_order_relaxed);
  walked_until_.store(bucket_count_, std::memory_order_release);
}

void Index::flush_words(Flusher& flusher) {
  for (uint64_t i = 0; i < bucket_count_; ++i)
    flusher.flush(&buckets_[i], media::kLineBytes, Site::kBucketWord);
}

}  // namespace petps::index
