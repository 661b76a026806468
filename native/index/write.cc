// The write side. A writer of a key holds the lock of the key's home bucket; it takes further locks only by try_lock and lets go of
// everything when one is taken, so writers never wait for one another in a circle.
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

Index::Index(pool::Pool& pool, uint32_t table, uint64_t bucket_offset, uint64_t bucket_count)
    : pool_(&pool),
      media_(&pool.medium()),
      base_(pool.at(0)),
      buckets_(reinterpret_cast<Bucket*>(pool.at(bucket_offset))),
      count_(bucket_count),
      table_(table),
      generation_(pool.generation()) {}

// ---- locks ----

// One attempt. In an older generation the lock bit means nothing (its holder died): claiming the bucket also claims its healing.
bool Index::claim(Bucket& bucket, Held* held) {
  uint64_t seen = load64(bucket.word);
  if (generation_of(seen) != generation_) {
    const uint64_t healing =
        (uint64_t{generation_} << 32) | (next_count(seen) & kCountMask) | kHealing;
    if (!base::exchange64(bucket.word, seen, healing)) return false;
    media_->stored(&bucket.word, sizeof bucket.word);
    heal(bucket);
    held->word = (healing & ~kStateMask) | kLocked;
    store64(bucket.word, held->word);  // after the tags
  } else {
    if ((seen & kStateMask) != kFree) return false;
    held->word = seen | kLocked;
    if (!base::exchange64(bucket.word, seen, held->word)) return false;
  }
  media_->stored(&bucket.word, sizeof bucket.word);
  held->bucket = &bucket;
  return true;
}

Index::Held Index::lock(Bucket& bucket) {
  Held held;
  for (uint32_t spins = 1; !claim(bucket, &held); ++spins) {
    if (spins % kSpinsBeforeYield == 0) {
      base::yield();
    } else {
      base::pause();
    }
  }
  return held;
}

bool Index::try_lock(Bucket& bucket, Held* held) { return claim(bucket, held); }

void Index::unlock(const Held& held) {
  store64(held.bucket->word, held.word & ~kStateMask);
  media_->stored(&held.bucket->word, sizeof held.bucket->word);
}

void Index::heal(Bucket& bucket) {
  for (uint32_t i = 0; i < kEntries; ++i) {
    if (load64(bucket.entries[i].ref) == 0) continue;
    store8(bucket.tags[i], path_of(load64(bucket.entries[i].key)).tag);
    media_->stored(&bucket.tags[i], 1);
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
  media_->stored(&bucket.overflow, 1);
  flusher.flush(&bucket.overflow, 1, Site::kRaisedCounter);
}

// Buckets [from, to) of the path. Only after the removal they counted is durable; need not be durable itself.
void Index::lower_counters(const Path& path, uint64_t from, uint64_t to) {
  for (uint64_t distance = from; distance < to; ++distance) {
    Bucket& bucket = buckets_[bucket_at(path, distance)];
    uint8_t seen = load8(bucket.overflow);
    while (seen != kSaturated && seen != 0 &&
           !base::exchange8(bucket.overflow, seen, static_cast<uint8_t>(seen - 1))) {
    }
    if (seen == kSaturated) recount_wanted_.fetch_add(1, std::memory_order_relaxed);
    media_->stored(&bucket.overflow, 1);
  }
}

// The caller holds the bucket's lock. Keeps rows() exact while the walk goes on: what it has not reached it will count itself.
void Index::count_change(const Bucket& bucket, bool displaced, int64_t by) {
  if (number_of(bucket) >= walked_until_.load(std::memory_order_acquire)) {
    changed_before_walk_.fetch_add(static_cast<uint64_t>(by), std::memory_order_relaxed);
    return;
  }
  rows_.fetch_add(static_cast<uint64_t>(by), std::memory_order_relaxed);
  if (displaced) displaced_.fetch_add(static_cast<uint64_t>(by), std::memory_order_relaxed);
}

// Why no reader believes a false miss, and none takes a ref for another key's. A reader loads a bucket's word, then tags, keys and
// refs, then the overflow counter, and last each probed bucket's word again; every load acquires, every store releases.
//
// The entry is empty and stays so for others: this thread has the bucket's lock. The count changes twice, before the key is stored
// and after the ref is; the second change is visible at the latest when the lock is free, and before the key leaves another place
// (move_locked).
//   No false miss: let a key be in the table throughout a search, in places P0, P1, ... one after the other. The search missed P0, so
// it saw P0 emptied (or overwritten, which is later still), and with that both changes of P1's bucket. If it read P1's bucket before
// the ref was visible there, the word it had loaded lacks the second change, and the last look at the word tells. Else it saw P1
// emptied, and so on to the last place, which was never emptied. A probe that ends before P(i+1) read a counter of 0: the key's claim
// on it was raised before P(i+1) was filled, so the 0 is a later one, and who stored it did so after a nearer P(i+2) was filled.
//   With one change only, a reader that loads the word between it and the ref sees neither place and an unchanged word.
//   No foreign ref: the ref of an earlier key was cleared before this key is stored, under the same lock. A reader that matched the
// earlier key and loads this ref sees this key when it looks at the key again, or, if the earlier key has come back by then, a changed
// count.
// The other writers of these words: replace and try_publish exchange the ref of an entry that stays; a reader gets one or the other.
// erase_at clears a ref: from then on a miss is true, and a hit is of before. heal stores tags while the word says kHealing, and
// readers that see it, or an older generation, compare keys instead. unlock and claim change the state, which readers ignore.
// raise_counter comes before the fill, lower_counters after the removal. replay_journal: see there.
void Index::fill_entry(Held* held, uint32_t entry, uint64_t key, uint8_t tag, SlotRef ref,
                       Flusher& flusher, Site site) {
  Bucket& bucket = *held->bucket;
  Entry& place = bucket.entries[entry];
  held->word = next_count(held->word);
  store64(bucket.word, held->word);
  media_->stored(&bucket.word, sizeof bucket.word);
  store64(place.key, key);
  media_->stored(&place.key, sizeof place.key);
  store8(bucket.tags[entry], tag);
  media_->stored(&bucket.tags[entry], 1);
  store64(place.ref, ref);
  media_->stored(&place.ref, sizeof place.ref);
  flusher.flush(&place, sizeof place, site);
  held->word = next_count(held->word);  // stored by unlock, or by move_locked before
}

Place Index::search_locked(uint64_t key, const Path& path) const {
  Place place;
  uint64_t number = path.home;
  for (uint64_t distance = 0; distance < count_; ++distance) {
    const Bucket& bucket = buckets_[number];
    uint64_t word;
    if (scan_bucket(bucket, key, path.tag, &word, &place)) {
      place.distance = distance;
      return place;
    }
    if (load8(bucket.overflow) == 0) break;
    number += path.step;
    if (number >= count_) number -= count_;
  }
  return Place{};
}

// ---- a batch ----

// A process that was killed may have erased the key and not drained that: gone now, back after a power cut, beside the new entry.
// So until the walk has made every bucket durable, the buckets where the key might be are flushed before it counts as absent.
void Index::adopt_absence(const Op& op, Flusher& flusher) {
  if (walked()) return;
  const Path path = path_of(op.key);
  for (uint64_t distance = 0; distance < count_; ++distance) {
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
  uint32_t looks = 0;
  for (bool full = was_full || !has_room(*bucket); full; full = !has_room(*bucket)) {
    if (op.passed + 1 >= count_) {
      // Each bucket was full when it was looked at. Others may have moved room from one to another meanwhile: a table within its
      // capacity has room somewhere.
      lower_counters(path, 0, op.passed);  // nothing was published that counts on them
      op.passed = 0;
      if (rows() >= count_ * kEntries || ++looks == kFullLooks) {
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

// Bucket and entry have left the caches since the plan: a chunk's rows went through them. A lock on a line that is not there
// would stop everything behind it.
void Index::ask_to_publish(const Op& op) const {
  if (op.state == OpState::kPresent) {
    base::prefetch_for_write(&buckets_[op.bucket]);
    base::prefetch_for_write(&buckets_[op.bucket].entries[op.entry]);
  } else if (op.state == OpState::kNew) {
    base::prefetch_for_write(&buckets_[path_of(op.key).home]);
  }
}

void Index::publish(std::span<Op> ops, Flusher& flusher) {
  for (size_t i = 0; i < std::min(kPublishAhead, ops.size()); ++i) ask_to_publish(ops[i]);
  for (size_t i = 0; i < ops.size(); ++i) {
    if (i + kPublishAhead < ops.size()) ask_to_publish(ops[i + kPublishAhead]);
    Op& op = ops[i];
    if (op.state == OpState::kPresent || op.state == OpState::kNew) publish_one(op, flusher);
  }
}

size_t Index::replace(std::span<Entry* const> entries, const SlotRef* with, SlotRef* refs,
                      Flusher& flusher) {
  size_t twice = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (i + kPublishAhead < entries.size()) base::prefetch_for_write(entries[i + kPublishAhead]);
    Entry& entry = *entries[i];
    const SlotRef old = load64(entry.ref);
    store64(entry.ref, with[i]);
    media_->stored(&entry.ref, sizeof entry.ref);
    flusher.flush(&entry, sizeof entry, Site::kEntry);
    twice += old != refs[i] ? 1 : 0;
    refs[i] = old;
  }
  return twice;
}

void Index::publish_one(Op& op, Flusher& flusher) {
  const Path path = path_of(op.key);
  for (;;) {
    Held home = lock(buckets_[path.home]);
    const bool finished = try_publish(op, path, &home, flusher);
    unlock(home);
    if (finished) return;
    base::pause();  // a second lock was taken by another writer
  }
}

// With the home lock held. False: a further lock was taken by somebody; nothing was changed.
bool Index::try_publish(Op& op, const Path& path, Held* home, Flusher& flusher) {
  Place at;
  if (op.state == OpState::kPresent && op.ref != 0) {
    // Where the plan saw it, unless it moved since. The key is read again after the ref: the place may just be given to another key,
    // whose writer stores the key before the ref.
    const Entry& entry = buckets_[op.bucket].entries[op.entry];
    const SlotRef ref = load64(entry.key) == op.key ? load64(entry.ref) : 0;
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
  media_->stored(&entry.ref, sizeof entry.ref);
  flusher.flush(&entry, sizeof entry, Site::kEntry);
  op.old = at.ref;
  op.lower = op.passed;  // raised in vain: another writer brought the key meanwhile
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
  media_->stored(&entry.ref, sizeof entry.ref);
  flusher.flush(&entry, sizeof entry, Site::kErasedEntry);
  count_change(bucket, displaced, -1);
  change_claims(bucket, path_of(op.key), at.distance, /*comes=*/false);
  if (displaced) unlock(held);
  op.old = at.ref;
  op.lower = static_cast<uint32_t>(at.distance);
  op.state = OpState::kDone;
  return true;
}

bool Index::place_new(Op& op, const Path& path, Held* home, Flusher& flusher) {
  if (op.state ==
      OpState::
          kPresent) {  // erased by another writer since the plan: no counters are raised for it yet
    op.passed = 0;
  }
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
    count_change(bucket, held == &other, +1);
    change_claims(bucket, path, op.passed, /*comes=*/true);
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
  if (number >= walked_until_.load(std::memory_order_relaxed)) {  // else counted already
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
  walked_until_.store(count_, std::memory_order_release);
}

void Index::flush_words(Flusher& flusher) {
  for (uint64_t i = 0; i < count_; ++i)
    flusher.flush(&buckets_[i], media::kLineBytes, Site::kBucketWord);
}

}  // namespace petps::index
