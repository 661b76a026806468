// Hot-aware placement: hot entries move home and cold ones make room. A move writes the journal,
// copies the entry and empties the old one. It drains each step, and holds the locks of the key's
// home and of the buckets of both entries. A crash in between leaves the journal, and
// replay_journal finishes the move.
#include <algorithm>
#include <array>
#include <cstring>

#include "base/checksum.h"
#include "index/index.h"

namespace petps::index {

using base::Code;
using base::Result;
using base::Status;
using media::Flusher;
using media::Site;

namespace {

struct JournalRecord {
  uint64_t key;
  uint64_t from;  // pool offset of the entry that the move empties
  uint64_t to;    // pool offset of the key's new entry
  uint64_t reserved[4];
  uint64_t checksum;
};
static_assert(sizeof(JournalRecord) == 64, "one cache line");

uint64_t checksum_of(const JournalRecord& record) {
  return base::checksum64(&record, offsetof(JournalRecord, checksum));
}

}  // namespace

Result<bool> Index::move(uint64_t key, uint64_t to_distance) {
  const Path path = path_of(key);
  std::array<Held, 3> held;
  size_t locks = 0;
  held[locks++] = lock(buckets_[path.home]);
  const auto hold = [&](Bucket& bucket) -> Held* {
    for (size_t i = 0; i < locks; ++i) {
      if (held[i].bucket == &bucket) return &held[i];
    }
    return try_lock(bucket, &held[locks]) ? &held[locks++] : nullptr;
  };
  Result<bool> moved = false;
  const Place at = search_locked(key, path);
  Held* source = nullptr;
  Held* target = nullptr;
  if (at.ref != 0 && at.distance != to_distance) {
    source = hold(buckets_[at.bucket]);
    if (source != nullptr) target = hold(buckets_[bucket_at(path, to_distance)]);
  }
  if (target != nullptr && target->bucket != source->bucket) {
    const uint32_t entry = empty_entry(*target->bucket);
    if (entry < kEntries) {
      const Status status = move_locked(key, path, at, to_distance, target, entry);
      moved = status.ok() ? Result<bool>(true) : Result<bool>(status);
    }
  }
  for (size_t i = 0; i < locks; ++i) unlock(held[i]);
  return moved;
}

Status Index::move_locked(uint64_t key, const Path& path, const Place& at, uint64_t to_distance,
                          Held* target, uint32_t entry) {
  Flusher flusher(*media_);
  Entry& from = buckets_[at.bucket].entries[at.entry];
  const Entry& to = target->bucket->entries[entry];
  for (uint64_t d = at.distance; d < to_distance; ++d)
    raise_counter(buckets_[bucket_at(path, d)], flusher);
  JournalRecord record{};
  record.key = key;
  record.from = static_cast<uint64_t>(reinterpret_cast<const std::byte*>(&from) - base_);
  record.to = static_cast<uint64_t>(reinterpret_cast<const std::byte*>(&to) - base_);
  record.checksum = checksum_of(record);
  flusher.copy(pool_->journal(), &record, sizeof record, Site::kJournal);
  PETPS_RETURN_IF_ERROR(flusher.drain(Site::kJournalDrain));

  fill_entry(target, entry, key, path.tag, at.ref, flusher, Site::kMovedEntry);
  if (Status status = flusher.drain(Site::kMovedDrain); !status.ok()) {
    // The pool continues to serve read-only, and a scan must not show the key twice. At the next
    // open the journal settles both possible states.
    uint64_t& ref = target->bucket->entries[entry].ref;
    store64(ref, 0);
    media_->report_store(&ref, sizeof ref);
    return status;
  }

  // Store the count's second change before the key leaves its old entry: a reader that sees the
  // old entry empty also sees this change (fill_entry). The failure above needs no second change,
  // because the key never left its old entry.
  store64(target->bucket->word, target->word);
  media_->report_store(&target->bucket->word, sizeof target->bucket->word);
  store64(from.ref, 0);
  media_->report_store(&from.ref, sizeof from.ref);
  flusher.flush(&from, sizeof from, Site::kVacatedEntry);
  change_claims(*target->bucket, path, to_distance, /*added=*/true);
  change_claims(buckets_[at.bucket], path, at.distance, /*added=*/false);
  PETPS_RETURN_IF_ERROR(flusher.drain(Site::kVacatedDrain));

  if (to_distance < at.distance) lower_counters(path, to_distance, at.distance);
  if (at.distance == 0) displaced_.fetch_add(1, std::memory_order_relaxed);
  if (to_distance == 0) displaced_.fetch_sub(1, std::memory_order_relaxed);
  return Status();
}

// Move one entry of the bucket to the first other bucket of its own path that has room.
Result<bool> Index::evict(uint64_t number, const std::unordered_set<uint64_t>& hot) {
  const Bucket& bucket = buckets_[number];
  // Try guests (displaced entries) first: they lose nothing by moving on.
  for (const bool guests : {true, false}) {
    for (const Entry& entry : bucket.entries) {
      const uint64_t key = load64(entry.key);
      if (load64(entry.ref) == 0 || hot.contains(key)) continue;
      const Path path = path_of(key);
      if ((path.home != number) != guests) continue;
      uint64_t distance = 0;
      while (distance < bucket_count_ && (bucket_at(path, distance) == number ||
                                          !has_room(buckets_[bucket_at(path, distance)]))) {
        ++distance;
      }
      if (distance == bucket_count_) continue;
      auto moved = move(key, distance);
      if (!moved.ok() || moved.value()) return moved;
    }
  }
  return false;
}

Result<uint64_t> Index::move_home(uint64_t key, const std::unordered_set<uint64_t>& hot) {
  const Path path = path_of(key);
  const Place at = search(key, path);
  if (at.ref == 0 || at.distance == 0) return uint64_t{0};
  uint64_t moves = 0;
  if (!has_room(buckets_[path.home])) {
    auto evicted = evict(path.home, hot);
    if (!evicted.ok()) return evicted.status();
    if (!evicted.value()) return uint64_t{0};
    moves += 1;
  }
  auto moved = move(key, 0);
  if (!moved.ok()) return moved.status();
  return moves + (moved.value() ? 1 : 0);
}

Result<uint64_t> Index::rehome_bucket(uint64_t number) {
  uint64_t moves = 0;
  for (const Entry& entry : buckets_[number].entries) {
    if (load64(entry.ref) == 0) continue;
    const uint64_t key = load64(entry.key);
    const Path path = path_of(key);
    if (path.home == number) continue;
    for (uint64_t distance = 0; distance < bucket_count_ && bucket_at(path, distance) != number;
         ++distance) {
      if (!has_room(buckets_[bucket_at(path, distance)])) continue;
      auto moved = move(key, distance);
      if (!moved.ok()) return moved.status();
      moves += moved.value() ? 1 : 0;
      break;
    }
  }
  return moves;
}

namespace {

uint64_t offset_of(const pool::Pool& pool, const Entry* entry) {
  return static_cast<uint64_t>(reinterpret_cast<const std::byte*>(entry) - pool.at(0));
}

// Return true if `offset` is the offset of an entry of the table.
bool has_entry_at(const pool::TableRecord& table, uint64_t offset) {
  if (offset < table.bucket_offset) return false;
  const uint64_t within = offset - table.bucket_offset;
  return within / sizeof(Bucket) < table.bucket_count &&
         within % sizeof(Bucket) >= offsetof(Bucket, entries) && within % sizeof(Entry) == 0;
}

// Return the two entries that the journal names, whether or not the move has changed them; set
// *key if it names any. The record outlives its table, whose extent may hold anything by now,
// for example the rows of another table. So both offsets must be entries of one existing table.
// If that is another table in the same extent, the record does no harm: a key of that table is in
// two entries only during a move of that table, and such a move has overwritten the journal.
InterruptedMove journaled_move(const pool::Pool& pool, uint64_t* key) {
  JournalRecord record;
  std::memcpy(&record, pool.journal(), sizeof record);
  if (record.checksum != checksum_of(record) || record.to == 0)
    return {};  // nothing ever moved, or the record is torn and its move had not changed an entry
  const std::vector<pool::TableRecord> tables = pool.tables();
  if (std::none_of(tables.begin(), tables.end(), [&](const pool::TableRecord& table) {
        return has_entry_at(table, record.from) && has_entry_at(table, record.to);
      }))
    return {};
  *key = record.key;
  return {reinterpret_cast<Entry*>(pool.at(record.from)),
          reinterpret_cast<const Entry*>(pool.at(record.to))};
}

}  // namespace

InterruptedMove interrupted_move(const pool::Pool& pool) {
  uint64_t key = 0;
  const InterruptedMove move = journaled_move(pool, &key);
  if (move.from == nullptr) return {};
  const bool both =
      move.from->key == key && move.from->ref != 0 && move.to->key == key && move.to->ref != 0;
  return both ? move : InterruptedMove{};
}

Status replay_journal(pool::Pool& pool) {
  if (pool.was_clean()) return Status();
  uint64_t key = 0;
  const auto [from, to] = journaled_move(pool, &key);
  if (from == nullptr) return Status();
  // A killed process may have left both changes in caches only. The copy must be durable before
  // the old entry is emptied. An old entry that is empty now must stay empty: otherwise a later
  // erase through the new entry, followed by a power cut, would bring the key back from the old
  // entry.
  Flusher flusher(pool.medium());
  flusher.flush(to, sizeof *to, Site::kMovedEntry);
  flusher.flush(from, sizeof *from, Site::kVacatedEntry);
  PETPS_RETURN_IF_ERROR(flusher.drain(Site::kMovedDrain));
  if (interrupted_move(pool).from == nullptr) return Status();
  // The killed process may have stored the ref at `to` without the count's second change. A
  // reader in another process that loaded the word before that ref must not find the old entry
  // empty beside an unchanged word. No other thread writes yet.
  Bucket& bucket =
      *reinterpret_cast<Bucket*>(pool.at(offset_of(pool, to) / sizeof(Bucket) * sizeof(Bucket)));
  store64(bucket.word, next_count(load64(bucket.word)));
  pool.medium().report_store(&bucket.word, sizeof bucket.word);
  store64(from->ref, 0);
  pool.medium().report_store(&from->ref, sizeof from->ref);
  flusher.flush(from, sizeof *from, Site::kVacatedEntry);
  return flusher.drain(Site::kVacatedDrain);
}

}  // namespace petps::index
