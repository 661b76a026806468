// The read side: lock-free; it never writes. Memory orders: every load of shared bytes is an
// acquire, so no later load (the check of the word) can come before an earlier one (tags,
// entries). Writers change the count before they store a key, and again after they store its ref;
// a release store publishes the ref. The proof for every writer is at Index::fill_entry.
#ifdef __x86_64__
#include <emmintrin.h>
#else
#include <arm_neon.h>
#endif

#include <array>

#include "base/hash.h"
#include "base/prefetch.h"
#include "index/index.h"

namespace petps::index {

namespace {

// Distance in keys between the stages of search_batch: the time that memory has to deliver what a
// stage has prefetched. Tuned with bench/micro/index_search, bench/pull/inprocess and
// bench/ingest/apply.
constexpr size_t kAhead = 8;
constexpr size_t kRowAhead = 8;
constexpr size_t kWindow = 64;  // keys in the stages at once, at most; a power of two
static_assert(3 * kAhead < kWindow, "a key keeps its place until it is finished");

// A key in the stages of search_batch.
struct Probe {
  const Bucket* bucket;  // home
  uint64_t hash;
  uint64_t word;        // the home bucket's word, loaded before its tags were matched
  uint64_t candidates;  // bit mask of the entries whose tags match
};

__extension__ typedef unsigned __int128 Wide;

inline uint64_t scale(uint64_t hash, uint64_t count) {
  return static_cast<uint64_t>((static_cast<Wide>(hash) * count) >> 64);
}

// Home comes from the high bits of the hash, tag from the low byte, step from the middle: the
// three are independent.
inline uint8_t tag_of(uint64_t hash) { return static_cast<uint8_t>(hash); }

inline Path path_from(uint64_t hash, uint64_t count) {
  const uint64_t rotated = (hash << 32) | (hash >> 32);
  return {scale(hash, count), 1 + scale(rotated, count - 1), tag_of(hash)};
}

inline void prefetch(const void* at) { __builtin_prefetch(at); }

// Match the tags of a prefetched bucket, and prefetch the first entry that they point to.
template <bool to_write>
inline uint32_t match_and_prefetch(const Index& index, const Bucket& bucket, uint64_t word,
                                   uint8_t tag) {
  const uint32_t candidates = index.trusted(word) ? match_tags(bucket, tag) : kAllEntries;
  if (candidates != 0) {
    const Entry* first = &bucket.entries[__builtin_ctz(candidates)];
    if constexpr (to_write) {
      base::prefetch_for_write(first);
    } else {
      prefetch(first);
    }
  }
  return candidates;
}

inline const Bucket& second_bucket(const Index& index, uint64_t hash) {
  const Path path = path_from(hash, index.bucket_count());
  const uint64_t number = path.home + path.step;
  return index.bucket(number < index.bucket_count() ? number : number - index.bucket_count());
}

// Match the tags of the home bucket. If none matches and the bucket has overflowed, the key may
// be displaced: prefetch its second bucket at once.
template <bool to_write>
inline void match_home(const Index& index, Probe* probe) {
  probe->word = load64(probe->bucket->word);
  probe->candidates =
      match_and_prefetch<to_write>(index, *probe->bucket, probe->word, tag_of(probe->hash));
  if (probe->candidates == 0 && load8(probe->bucket->overflow) != 0)
    prefetch(&second_bucket(index, probe->hash));
}

// Return true if the home bucket gives a valid answer: a hit, or a miss that search() would
// accept.
inline bool read_home(const Index& index, const Probe& probe, uint64_t key, Place* place) {
  const Bucket& bucket = *probe.bucket;
  for (uint64_t c = probe.candidates; c != 0; c &= c - 1) {
    const auto e = static_cast<uint32_t>(__builtin_ctzll(c));
    if (load64(bucket.entries[e].key) != key) continue;
    const uint64_t ref = load64(bucket.entries[e].ref);
    if (ref == 0) continue;
    *place = {static_cast<uint64_t>(&bucket - &index.bucket(0)), e, 0, ref};
    return load64(bucket.entries[e].key) == key && same_count(load64(bucket.word), probe.word);
  }
  return load8(bucket.overflow) == 0 && same_count(load64(bucket.word), probe.word);
}

inline void prefetch_second(const Index& index, const Probe& probe) {
  const Bucket& second = second_bucket(index, probe.hash);
  match_and_prefetch<false>(index, second, load64(second.word), tag_of(probe.hash));
}

}  // namespace

uint32_t match_tags(const Bucket& bucket, uint8_t tag) {
  const auto* halves = reinterpret_cast<const uint64_t*>(bucket.tags);
#ifdef __x86_64__
  const __m128i tags = _mm_set_epi64x(static_cast<int64_t>(load64(halves[1])),
                                      static_cast<int64_t>(load64(halves[0])));
  const __m128i same = _mm_cmpeq_epi8(tags, _mm_set1_epi8(static_cast<char>(tag)));
  return static_cast<uint32_t>(_mm_movemask_epi8(same)) & kAllEntries;
#else
  static constexpr uint8_t kBits[] = {1, 2, 4, 8, 16, 32, 64, 128};
  const auto match = [tag](uint64_t eight_tags) -> uint32_t {
    return vaddv_u8(vand_u8(vceq_u8(vcreate_u8(eight_tags), vdup_n_u8(tag)), vld1_u8(kBits)));
  };
  return (match(load64(halves[0])) | match(load64(halves[1])) << 8) & kAllEntries;
#endif
}

Path Index::path_of(uint64_t key) const { return path_from(base::index_hash(key), bucket_count_); }

size_t Index::range_of(uint64_t key, size_t ranges) { return scale(base::index_hash(key), ranges); }

uint64_t Index::bucket_at(const Path& path, uint64_t distance) const {
  return static_cast<uint64_t>((path.home + static_cast<Wide>(distance) * path.step) %
                               bucket_count_);
}

bool Index::scan_bucket(const Bucket& bucket, uint64_t key, uint8_t tag, uint64_t* word,
                        Place* place) const {
  for (;;) {
    *word = load64(bucket.word);
    uint32_t candidates = trusted(*word) ? match_tags(bucket, tag) : kAllEntries;
    bool changed = false;
    for (; candidates != 0; candidates &= candidates - 1) {
      const auto i = static_cast<uint32_t>(__builtin_ctz(candidates));
      const Entry& entry = bucket.entries[i];
      if (load64(entry.key) != key) continue;
      const uint64_t ref = load64(entry.ref);
      if (ref == 0) continue;
      // The ref belongs to this key unless the entry was given to another key between the loads.
      // The writer of that key changed the key, and before it the count.
      if (load64(entry.key) != key || !same_count(load64(bucket.word), *word)) {
        changed = true;
        break;
      }
      *place = {number_of(bucket), i, 0, ref};
      return true;
    }
    if (!changed) return false;
  }
}

Place Index::search(uint64_t key, const Path& path) const {
  struct Probed {
    const Bucket* bucket;
    uint64_t word;
  };
  constexpr size_t kInline = 32;
  std::array<Probed, kInline> probes;
  std::vector<Probed> more_probes;
  for (;;) {
    Place place;
    size_t probed = 0;
    more_probes.clear();
    uint64_t number = path.home;
    for (;;) {
      const Bucket& bucket = buckets_[number];
      uint64_t word;
      if (scan_bucket(bucket, key, path.tag, &word, &place)) {
        place.distance = probed;
        return place;
      }
      if (probed < kInline) {
        probes[probed] = {&bucket, word};
      } else {
        more_probes.push_back({&bucket, word});
      }
      ++probed;
      if (load8(bucket.overflow) == 0 || probed >= bucket_count_) break;
      number += path.step;
      if (number >= bucket_count_) number -= bucket_count_;
      prefetch(&buckets_[number]);
    }
    // Accept a miss only if no probed bucket took a key during the search: a moving entry is
    // always in at least one of its two places.
    bool changed = false;
    for (size_t i = 0; i < probed && !changed; ++i) {
      const Probed& probe = i < kInline ? probes[i] : more_probes[i - kInline];
      changed = !same_count(load64(probe.bucket->word), probe.word);
    }
    if (!changed) return Place{};
  }
}

Index::LiveEntries Index::read_bucket(uint64_t number) const {
  const Bucket& bucket = buckets_[number];
  for (;;) {
    LiveEntries live;
    const uint64_t word = load64(bucket.word);
    for (const Entry& entry : bucket.entries) {
      const uint64_t ref = load64(entry.ref);
      if (ref != 0) live.entries[live.count++] = {load64(entry.key), ref};
    }
    // No key was stored during the loop, so each ref belongs to the key beside it, and a key that
    // was in the bucket all the time is in the result.
    if (same_count(word, load64(bucket.word))) return live;
  }
}

Place Index::find_one(uint64_t key) const { return search(key, path_of(key)); }

// Run four stages over a sliding window: prefetch the home bucket; match its tags and prefetch
// the entry that they point to; read the entry; search the few keys that the home bucket did not
// answer. Call finished(i) for every key in order, after emit(i, place).
template <bool to_write, typename Emit, typename Finished>
void Index::search_batch(std::span<const uint64_t> keys, Emit emit, Finished finished) const {
  std::array<Probe, kWindow> window;
  std::array<size_t, kWindow> late;  // keys whose home bucket did not answer, in order
  size_t late_end = 0;
  size_t late_begin = 0;
  const size_t n = keys.size();
  for (size_t front = 0; front < n + 3 * kAhead; ++front) {
    if (front < n) {
      Probe& probe = window[front % kWindow];
      probe.hash = base::index_hash(keys[front]);
      probe.bucket = buckets_ + scale(probe.hash, bucket_count_);
      prefetch(probe.bucket);
    }
    if (front - kAhead < n) match_home<to_write>(*this, &window[(front - kAhead) % kWindow]);
    const size_t read = front - 2 * kAhead;
    if (read < n) {
      const Probe& probe = window[read % kWindow];
      Place place;
      if (read_home(*this, probe, keys[read], &place)) [[likely]] {
        emit(read, place);
      } else {
        prefetch_second(*this, probe);
        late[late_end++ % kWindow] = read;
      }
    }
    const size_t done = read - kAhead;
    if (done >= n) continue;
    if (late_begin != late_end && late[late_begin % kWindow] == done) [[unlikely]] {
      emit(done, search(keys[done], path_from(window[done % kWindow].hash, bucket_count_)));
      ++late_begin;
    }
    finished(done);
  }
}

namespace {
constexpr auto kNothing = [](size_t) {};
}

// The pool may have grown since the caller looked: its new size was stored before the ref. Only a
// reader beside the writer must ask the file for it.
const std::byte* Index::row_of_later(SlotRef ref) const {
  if (ref > last_row() && media_->is_read_beside()) media_->refresh_size();
  return ref > last_row() ? nullptr : base_ + ref;
}

void Index::find(std::span<const uint64_t> keys, const std::byte** rows, uint32_t row_lines) const {
  const uint64_t last = last_row();
  const auto emit = [&](size_t i, const Place& place) {
    rows[i] = row_below(place.ref, last);
    if (rows[i] == nullptr) return;
    for (uint32_t line = 0; line < row_lines; ++line) prefetch(rows[i] + line * media::kLineBytes);
  };
  search_batch<false>(keys, emit, kNothing);
}

void Index::find(std::span<const uint64_t> keys, const std::byte** rows, Visit visit,
                 void* context) const {
  const uint64_t last = last_row();
  const auto emit = [&](size_t i, const Place& place) { rows[i] = row_below(place.ref, last); };
  const auto finished = [&](size_t i) {
    visit(context, i, i < kRowAhead ? kNoKey : i - kRowAhead);
  };
  search_batch<false>(keys, emit, finished);
  for (size_t i = keys.size() - std::min(keys.size(), kRowAhead); i < keys.size(); ++i)
    visit(context, kNoKey, i);
}

void Index::find_refs(std::span<const uint64_t> keys, SlotRef* refs) const {
  search_batch<false>(
      keys, [&](size_t i, const Place& place) { refs[i] = place.ref; }, kNothing);
}

size_t Index::locate(std::span<const uint64_t> keys, Entry** entries, SlotRef* refs, Step step,
                     void* context) const {
  size_t present = 0;
  const auto emit = [&](size_t i, const Place& place) {
    entries[i] = place.ref == 0 ? nullptr : &buckets_[place.bucket].entries[place.entry];
    refs[i] = place.ref;
    present += place.ref != 0 ? 1 : 0;
  };
  search_batch<true>(keys, emit, [&](size_t i) {
    if (step != nullptr) step(context, i);
  });
  return present;
}

void Index::plan(std::span<Op> ops, Entry* const* entries, const SlotRef* refs) const {
  for (size_t i = 0; i < ops.size(); ++i) {
    Op& op = ops[i];
    op.passed = 0;
    op.lower = 0;
    op.old = refs[i];
    op.state = refs[i] != 0 ? OpState::kPresent : op.ref != 0 ? OpState::kNew : OpState::kDone;
    if (refs[i] == 0) continue;
    const auto offset = static_cast<uint64_t>(reinterpret_cast<const std::byte*>(entries[i]) -
                                              reinterpret_cast<const std::byte*>(buckets_));
    op.bucket = offset / sizeof(Bucket);
    op.entry = static_cast<uint32_t>(entries[i] - buckets_[op.bucket].entries);
  }
}

void Index::plan(std::span<Op> ops) const {
  std::vector<uint64_t> keys(ops.size());
  for (size_t i = 0; i < ops.size(); ++i) keys[i] = ops[i].key;
  std::vector<Entry*> entries(ops.size());
  std::vector<SlotRef> refs(ops.size());
  locate(keys, entries.data(), refs.data());
  plan(ops, entries.data(), refs.data());
}

}  // namespace petps::index
