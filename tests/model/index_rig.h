// A table of three buckets for the model: an index, rows that name their key, and the history of
// the values of each key, so that every answer of a reader can be checked.
#pragma once

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

  IndexRig() : pool_(memory_.format()) {
    const auto record = pool_->create_table(pool::testing_support::spec("t", kCapacity));
    record_ = record.value();
    restart();
  }

  index::Index& index() { return *index_; }
  uint64_t buckets() const { return record_.bucket_count; }
  index::Bucket& bucket(uint64_t number) {
    return reinterpret_cast<index::Bucket*>(pool_->at(record_.bucket_offset))[number];
  }
  media::Media& medium() { return pool_->medium(); }

  // Return new keys with home bucket `home` and second bucket `second`.
  std::vector<uint64_t> keys(uint64_t home, uint64_t second, size_t count) {
    std::vector<uint64_t> keys;
    for (; keys.size() < count; ++next_key_) {
      const index::Path path = index_->path_of(next_key_);
      if (path.home != home || index_->bucket_at(path, 1) != second) continue;
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
    kept_rows_ = index_->rows();
    kept_displaced_ = index_->displaced();
    kept_next_ref_ = next_ref_;
    kept_history_ = history_;
    kept_data_ = data_;
  }
  void restore(bool walked = true) {
    std::memcpy(&bucket(0), kept_.data(), kept_.size());
    restart(walked);
    next_ref_ = kept_next_ref_;
    history_ = kept_history_;
    data_ = kept_data_;
    for (auto& [key, known] : history_) done_[known.number] = known.refs.size() - 1;
  }

  // ---- writers: one for each key ----

  void put(uint64_t key) {
    const pool::SlotRef ref = begin_write(key, true);
    if (!index_->exchange(key, ref).ok()) fail("an insert is refused");
    end_write(key);
  }
  void erase(uint64_t key) {
    const pool::SlotRef before = history_[key].refs.back();
    begin_write(key, false);
    if (!index_->erase(key, before).ok()) fail("a key to erase is not there");
    end_write(key);
  }
  // Replace the key's ref as a batch does that only replaces rows. No move may run beside it.
  void replace(uint64_t key) {
    index::Entry* entry = nullptr;
    pool::SlotRef seen = 0;
    index_->locate({&key, 1}, &entry, &seen);
    if (entry == nullptr) return fail("a key to replace is not there");
    const pool::SlotRef with = begin_write(key, true);
    media::Flusher flusher(medium());
    index_->replace({&entry, 1}, &with, &seen, flusher);
    end_write(key);
  }

  // ---- readers ----

  void find_one(uint64_t key) {
    const size_t done = begin_read(key);
    end_read(key, done, index_->find_one(key).ref);
  }
  void find_batch(const std::vector<uint64_t>& keys) {
    std::vector<size_t> done;
    for (const uint64_t key : keys) done.push_back(begin_read(key));
    std::vector<pool::SlotRef> refs(keys.size());
    index_->find_refs(keys, refs.data());
    for (size_t i = 0; i < keys.size(); ++i) end_read(keys[i], done[i], refs[i]);
  }
  // Scan bucket `number`. Fail if a key of `always` (in the bucket during the whole scan) is
  // missing or if a key has the ref of another one.
  void scan(uint64_t number, const std::vector<uint64_t>& always) {
    std::map<uint64_t, size_t> done;
    for (auto& [key, known] : history_) done[key] = begin_read(key);
    const index::Index::LiveEntries live = index_->read_bucket(number);
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
      const index::Place place = index_->find_one(key);
      if (place.ref != last) return fail("at the end a key does not have its last value");
      if (last == 0) continue;
      rows += 1;
      displaced += place.distance > 0 ? 1 : 0;
      const index::Path path = index_->path_of(key);
      for (uint64_t d = 0; d < place.distance; ++d) passed[index_->bucket_at(path, d)] += 1;
    }
    uint64_t entries = 0;
    for (uint64_t b = 0; b < buckets(); ++b) {
      for (const index::Entry& entry : bucket(b).entries) entries += entry.ref != 0 ? 1 : 0;
      if (bucket(b).overflow < passed[b]) return fail("a counter is too low");
      if ((bucket(b).word & index::kStateMask) != index::kFree) return fail("a lock is left");
    }
    if (entries != rows) return fail("a key is there twice");
    if (index_->walked() && index_->rows() != rows) return fail("rows are counted wrongly");
    if (index_->walked() && index_->displaced() != displaced)
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
    index_.emplace(*pool_, record_.bucket_offset, record_.bucket_count);
    if (walked) index_->set_walked(kept_rows_, kept_displaced_);
  }
  pool::SlotRef begin_write(uint64_t key, bool live) {
    Known& known = history_[key];
    const pool::SlotRef ref = live ? next_ref_++ : 0;
    if (live) store_plain(data_[ref], row_of(key, ref));
    known.refs.push_back(ref);
    return ref;
  }
  void end_write(uint64_t key) {
    Known& known = history_[key];
    store(&done_[known.number], 8, known.refs.size() - 1, std::memory_order_release, kNowhere);
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
  pool::TableRecord record_;
  std::optional<index::Index> index_;
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
