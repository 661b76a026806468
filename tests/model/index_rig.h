// A table of three buckets for the model: an index, rows that name their key, and the history of
// the values of each key, so that every answer of a reader can be checked.
#pragma once

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "index/index.h"
#include "tests/model/machine.h"
#include "tests/native/pool/memory_pool.h"

namespace petps::model {

class IndexRig {
 public:
  static constexpr uint64_t kCapacity = 30;  // three buckets
  static constexpr size_t kRefs = 2048;      // more than the refs, and the keys, of a scenario

  // grows: there is a second array of buckets, and writers take a lock (table/GROW.md).
  explicit IndexRig(bool grows = false) : pool_(memory_.format()), grows_(grows) {
    const auto record = pool_->create_table(pool::testing_support::spec("t", kCapacity)).value();
    arrays_[0] = {record.bucket_offset, record.bucket_count, kCapacity};
    if (grows) arrays_[1] = pool_->reserve_buckets(record.id, 2 * kCapacity).value();
    restart();
  }

  // The array that readers search now.
  index::Index& index() { return *indexes_[current()]; }
  uint64_t buckets() { return arrays_[current()].count; }
  index::Bucket& bucket(uint64_t number) { return bucket_of(current(), number); }
  media::Media& medium() { return pool_->medium(); }

  // Return new keys with home bucket `home` and second bucket `second`.
  std::vector<uint64_t> keys(uint64_t home, uint64_t second, size_t count) {
    std::vector<uint64_t> keys;
    for (; keys.size() < count; ++next_key_) {
      const index::Path path = index().path_of(next_key_);
      if (path.home != home || index().bucket_at(path, 1) != second) continue;
      keys.push_back(next_key_);
      const size_t number = history_.size();
      if (number == kRefs) std::abort();
      history_[next_key_].number = number;
    }
    return keys;
  }

  // ---- the start of a run ----

  // Save the current state: every run begins with it.
  void keep() {
    kept_.resize(buckets() * sizeof(index::Bucket));
    std::memcpy(kept_.data(), &bucket(0), kept_.size());
    kept_rows_ = index().rows();
    kept_displaced_ = index().displaced();
    kept_next_ref_ = next_ref_;
    kept_history_ = history_;
    kept_data_ = data_;
  }
  void restore(bool walked = true) {
    current_ = 0;
    mirrored_ = nullptr;
    range_ = 0;
    std::memcpy(&bucket(0), kept_.data(), kept_.size());
    if (grows_) std::memset(&bucket_of(1, 0), 0, arrays_[1].count * sizeof(index::Bucket));
    restart(walked);
    next_ref_ = kept_next_ref_;
    history_ = kept_history_;
    data_ = kept_data_;
    for (auto& [key, known] : history_) done_[known.number] = known.refs.size() - 1;
  }

  // ---- writers: one for each key ----

  void put(uint64_t key) {
    take();
    const pool::SlotRef ref = begin_write(key, true);
    if (!index().exchange(key, ref).ok()) fail("an insert is refused");
    end_write(key);
  }
  void erase(uint64_t key) {
    take();
    const pool::SlotRef before = history_[key].refs.back();
    begin_write(key, false);
    if (!index().erase(key, before).ok()) fail("a key to erase is not there");
    end_write(key);
  }
  // Replace the key's ref as a batch does that only replaces rows. No move may run beside it.
  void replace(uint64_t key) {
    take();
    index::Entry* entry = nullptr;
    pool::SlotRef seen = 0;
    index().locate({&key, 1}, &entry, &seen);
    if (entry == nullptr) return fail("a key to replace is not there");
    const pool::SlotRef with = begin_write(key, true);
    media::Flusher flusher(medium());
    index().replace({&entry, 1}, &with, &seen, flusher);
    end_write(key);
  }

  // ---- growing ----

  void begin_growing() {
    take();
    mirrored_ = &*indexes_[1];
    give();
  }
  void copy_bucket(uint64_t number) {
    take();
    const index::Index::LiveEntries live = indexes_[0]->read_bucket(number);
    std::vector<uint64_t> keys;
    for (size_t i = 0; i < live.count; ++i) keys.push_back(live.entries[i].key);
    mirror(keys);
    give();
  }
  void swap() {
    take();
    mirrored_ = &*indexes_[0];
    store(&current_, 8, 1, std::memory_order_release, kNowhere);
    give();
  }

  // ---- readers ----

  void find_one(uint64_t key) {
    const size_t done = begin_read(key);
    end_read(key, done, index().find_one(key).ref);
  }
  void find_batch(const std::vector<uint64_t>& keys) {
    std::vector<size_t> done;
    for (const uint64_t key : keys) done.push_back(begin_read(key));
    std::vector<pool::SlotRef> refs(keys.size());
    index().find_refs(keys, refs.data());
    for (size_t i = 0; i < keys.size(); ++i) end_read(keys[i], done[i], refs[i]);
  }
  // Scan bucket `number`. Fail if a key of `always` (in the bucket during the whole scan) is
  // missing or if a key has the ref of another one.
  void scan(uint64_t number, const std::vector<uint64_t>& always) {
    std::map<uint64_t, size_t> done;
    for (auto& [key, known] : history_) done[key] = begin_read(key);
    const index::Index::LiveEntries live = index().read_bucket(number);
    std::map<uint64_t, pool::SlotRef> seen;
    for (size_t i = 0; i < live.count; ++i) {
      if (!seen.emplace(live.entries[i].key, live.entries[i].ref).second)
        fail("a scan shows a key twice");
      end_read(live.entries[i].key, done[live.entries[i].key], live.entries[i].ref);
    }
    for (const uint64_t key : always) {
      if (!seen.contains(key)) fail("a scan misses a key that was present");
    }
  }

  // ---- after a run, or while setting it up ----

  void check() {
    std::vector<uint32_t> passed(buckets(), 0);
    uint64_t rows = 0;
    uint64_t displaced = 0;
    for (const auto& [key, known] : history_) {
      const pool::SlotRef last = known.refs.back();
      const index::Place place = index().find_one(key);
      if (place.ref != last) return fail("at the end a key does not have its last value");
      const bool was_there = mirrored_ != nullptr && mirrored_->find_one(key).ref != 0;
      if (was_there && mirrored_->find_one(key).ref != last)
        return fail("at the end the two arrays differ");
      if (last == 0) continue;
      rows += 1;
      displaced += place.distance > 0 ? 1 : 0;
      const index::Path path = index().path_of(key);
      for (uint64_t d = 0; d < place.distance; ++d) passed[index().bucket_at(path, d)] += 1;
    }
    uint64_t entries = 0;
    for (uint64_t b = 0; b < buckets(); ++b) {
      for (const index::Entry& entry : bucket(b).entries) entries += entry.ref != 0 ? 1 : 0;
      if (bucket(b).overflow < passed[b]) return fail("a counter is too low");
      if ((bucket(b).word & index::kStateMask) != index::kFree) return fail("a lock is left");
    }
    if (entries != rows) return fail("a key is there twice");
    if (index().walked() && index().rows() != rows) return fail("rows are counted wrongly");
    if (index().walked() && index().displaced() != displaced)
      return fail("displaced rows are counted wrongly");
  }

  // Put a bucket into the state that a crash leaves: an older generation, invalid tags.
  void make_old(uint64_t number) {
    index::Bucket& old = bucket(number);
    old.word = 4;
    std::memset(old.tags, 0x5A, sizeof old.tags);
  }

 private:
  struct Known {
    std::vector<pool::SlotRef> refs{0};  // 0: absent; the last write may be unfinished
    size_t number = 0;                   // of the key, in done_
  };
  static uint64_t row_of(uint64_t key, pool::SlotRef ref) { return key << 12 | ref; }

  void restart(bool walked = true) {
    indexes_[0].emplace(*pool_, arrays_[0].offset, arrays_[0].count);
    if (walked) indexes_[0]->set_walked(kept_rows_, kept_displaced_);
    if (!grows_) return;
    indexes_[1].emplace(*pool_, arrays_[1].offset, arrays_[1].count);
    indexes_[1]->set_walked(0, 0);
  }
  uint64_t current() {
    return grows_ ? load(&current_, 8, std::memory_order_acquire, kNowhere) : 0;
  }
  index::Bucket& bucket_of(uint64_t array, uint64_t number) {
    return reinterpret_cast<index::Bucket*>(pool_->at(arrays_[array].offset))[number];
  }
  // The lock of the only range; only a rig that grows has one.
  void take() {
    uint64_t free = 0;
    while (grows_ && !exchange(&range_, 8, &free, 1, std::memory_order_acq_rel, kNowhere)) {
      free = 0;
      wait();
    }
  }
  void give() {
    if (grows_) store(&range_, 8, 0, std::memory_order_release, kNowhere);
  }
  void mirror(const std::vector<uint64_t>& keys) {
    if (mirrored_ == nullptr) return;
    media::Flusher flusher(medium());
    if (!mirrored_->mirror(index(), keys, current() == 1, flusher))
      fail("a mirrored key has no room");
  }
  pool::SlotRef begin_write(uint64_t key, bool live) {
    Known& known = history_[key];
    const pool::SlotRef ref = live ? next_ref_++ : 0;
    if (live) store_plain(data_[ref], row_of(key, ref));
    known.refs.push_back(ref);
    return ref;
  }
  void end_write(uint64_t key) {
    mirror({key});
    Known& known = history_[key];
    store(&done_[known.number], 8, known.refs.size() - 1, std::memory_order_release, kNowhere);
    give();
  }
  size_t begin_read(uint64_t key) {
    return load(&done_[history_.at(key).number], 8, std::memory_order_acquire, kNowhere);
  }
  void end_read(uint64_t key, size_t done, pool::SlotRef ref) {
    if (ref != 0 && load_plain(data_[ref]) != row_of(key, ref))
      return fail("key " + std::to_string(key) + " has a row that is not its own, or unfinished");
    const std::vector<pool::SlotRef>& refs = history_[key].refs;
    for (size_t i = done; i < refs.size(); ++i) {
      if (refs[i] == ref) return;
    }
    fail(ref == 0 ? "a present key is missing: a false miss" : "a key has an old value");
  }

  pool::testing_support::Memory memory_;
  std::unique_ptr<pool::Pool> pool_;
  const bool grows_;
  std::array<pool::BucketArray, 2> arrays_;
  std::array<std::optional<index::Index>, 2> indexes_;
  uint64_t current_ = 0;              // which of the two readers search
  index::Index* mirrored_ = nullptr;  // the other one, while writers keep both equal
  uint64_t range_ = 0;
  uint64_t next_key_ = 1;
  pool::SlotRef next_ref_ = 1;
  std::map<uint64_t, Known> history_;
  // For each key, the index in `refs` of the newest finished write. Readers load it.
  std::vector<uint64_t> done_ = std::vector<uint64_t>(kRefs);
  std::vector<uint64_t> data_ = std::vector<uint64_t>(kRefs);
  std::vector<std::byte> kept_;
  uint64_t kept_rows_ = 0;
  uint64_t kept_displaced_ = 0;
  pool::SlotRef kept_next_ref_ = 1;
  std::map<uint64_t, Known> kept_history_;
  std::vector<uint64_t> kept_data_;
};

}  // namespace petps::model
