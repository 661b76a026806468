// Eviction: a full table that pushes feed deletes rows to make room for new ones. EVICTION.md.
#include <algorithm>
#include <chrono>
#include <random>

#include "base/prefetch.h"
#include "table/slice.h"

namespace petps::table {

using base::Code;
using base::Result;
using base::Status;

namespace {

constexpr uint64_t kGroupBuckets = 8;  // whose rows are compared with each other
constexpr size_t kOfGroup = 16;        // one of this number of rows goes
// Rows to evict at once, beyond those that a batch needs: the drains of their deletion are shared.
constexpr uint64_t kShareAtOnce = 512;  // of the capacity
constexpr uint64_t kMostAtOnce = 4096;
// The unit of a time as a stamp, and where it begins. Up to 2034 such stamps are below the versions
// that rows get once they expire.
constexpr uint64_t kMsOfStamp = 125;
constexpr int64_t kMsOf2026 = 1'767'225'600'000;
// Where less than this share of the capacity is free, batches take turns.
constexpr uint64_t kFullShare = 16;

}  // namespace

// Make room for the new keys of a batch, as far as there are rows to evict. What finds no room is
// refused later, as without eviction. The caller keeps `turn` until it has applied the batch, so
// that no other batch takes the room.
Status Table::Impl::make_room(const Batch& batch, std::unique_lock<std::mutex>* turn) {
  const WhenFull rule = when_full.load(std::memory_order_relaxed);
  if (rule == WhenFull::kRefuse) return Status();
  advance_push_stamp();
  const auto has_room = [&](uint64_t share) {
    const uint64_t most = capacity.load(std::memory_order_relaxed);
    return occupied.load() + batch.keys.size() <= most - most / share;
  };
  if (has_room(kFullShare)) return Status();
  *turn = std::unique_lock(evict_mutex);
  if (!walked()) owner.walk();
  if (!walked()) return Status();  // `occupied` still counts rows that do not exist
  if (has_room(UINT64_MAX)) return Status();
  epoch::Reader* const reader = epochs.lease();
  if (reader == nullptr) return Status();
  std::vector<uint64_t> own;
  for (size_t i = 0; i < batch.keys.size(); ++i) {
    if (batch.deleted.empty() || batch.deleted[i] == 0) own.push_back(batch.keys[i]);
  }
  std::sort(own.begin(), own.end());
  own.erase(std::unique(own.begin(), own.end()), own.end());
  Status status;
  for (bool goes_on = true; goes_on && status.ok();) {
    const uint64_t most = capacity.load(std::memory_order_relaxed);
    const uint64_t needed = occupied.load() + count_absent(own, *reader);
    if (needed <= most) break;
    const uint64_t spare = std::min(most / kShareAtOnce, kMostAtOnce);
    uint64_t deleted = 0;
    status = evict_rows(needed - most + spare, rule, own, *reader, &deleted);
    evicted.fetch_add(deleted, std::memory_order_relaxed);
    goes_on = deleted > 0;  // else every row is of this batch, or was written since the choice
  }
  epochs.release(reader);
  return status;
}

uint64_t Table::Impl::count_absent(std::span<const uint64_t> keys, epoch::Reader& reader) {
  std::vector<index::Entry*> entries(keys.size());
  std::vector<pool::SlotRef> refs(keys.size());
  const epoch::Pin pin = reader.pin();
  return keys.size() - index().locate(keys, entries.data(), refs.data());
}

// Evict `count` rows, those that are coldest or oldest among their neighbours, of random places.
// kept: keys to spare, ascending.
Status Table::Impl::evict_rows(uint64_t count, WhenFull rule, std::span<const uint64_t> kept,
                               epoch::Reader& reader, uint64_t* deleted) {
  if (Heat* const counted = heat.load(); counted != nullptr) counted->settle();
  std::vector<uint64_t> keys;
  std::vector<uint32_t> stamps;
  thread_local std::mt19937_64 random(std::random_device{}());
  for (uint64_t group = 0; group < count && keys.size() < count; ++group) {
    const epoch::Pin pin = reader.pin();
    choose_victims(random() % index().bucket_count(), rule, kept, &keys, &stamps);
  }
  // Few rows may go, so that random places miss them: look at all.
  for (uint64_t bucket = 0; keys.empty() && bucket < index().bucket_count();
       bucket += kGroupBuckets) {
    const epoch::Pin pin = reader.pin();
    choose_victims(bucket, rule, kept, &keys, &stamps);
  }
  if (keys.size() > count) {
    keys.resize(count);
    stamps.resize(count);
  }
  return delete_of_stamp(keys, stamps, deleted);
}

void Table::Impl::choose_victims(uint64_t bucket, WhenFull rule, std::span<const uint64_t> kept,
                                 std::vector<uint64_t>* keys, std::vector<uint32_t>* stamps) {
  struct Candidate {
    uint32_t heat;
    uint32_t age;
    uint32_t stamp;
    uint64_t key;
    pool::SlotRef ref;
  };
  std::vector<Candidate> candidates;
  const index::Index& array = index();
  for (uint64_t i = 0; i < std::min(kGroupBuckets, array.bucket_count()); ++i) {
    const index::Index::LiveEntries live = array.read_bucket((bucket + i) % array.bucket_count());
    for (size_t e = 0; e < live.count; ++e) {
      const index::Entry& entry = live.entries[e];
      if (std::binary_search(kept.begin(), kept.end(), entry.key)) continue;
      base::prefetch(slots.header(entry.ref), sizeof(pool::SlotHeader));
      candidates.push_back({0, 0, 0, entry.key, entry.ref});
    }
  }
  const Heat* const counted = heat.load();
  const auto now = static_cast<uint32_t>(push_stamp.load(std::memory_order_relaxed));
  for (Candidate& candidate : candidates) {
    candidate.stamp = slots.header(candidate.ref)->stamp;
    const uint32_t ahead = candidate.stamp - now;  // of a clock that has been set back
    candidate.age = ahead <= pool::kVersionsAhead ? 0 : now - candidate.stamp;
    if (rule == WhenFull::kEvictColdest && counted != nullptr)
      candidate.heat = counted->of(candidate.key);
  }
  const size_t chosen = std::min(candidates.size(), candidates.size() / kOfGroup + 1);
  std::partial_sort(candidates.begin(), candidates.begin() + static_cast<ptrdiff_t>(chosen),
                    candidates.end(), [](const Candidate& a, const Candidate& b) {
                      return a.heat != b.heat ? a.heat < b.heat : a.age > b.age;
                    });
  for (size_t i = 0; i < chosen; ++i) {
    keys->push_back(candidates[i].key);
    stamps->push_back(candidates[i].stamp);
  }
}

Status Tables::set_when_full(uint32_t id, WhenFull rule) {
  const Result<TablePointer> table = existing(id);
  if (!table.ok()) return table.status();
  Table::Impl& impl = table.value()->impl();
  if (rule != WhenFull::kRefuse && impl.record.spec.feed == pool::Feed::kDelta) {
    return Status(Code::kFailedPrecondition,
                  "table '" + impl.record.spec.name +
                      "' evicts nothing, because deltas feed it: its rows leave through the log or "
                      "by expiry (petps table expire)");
  }
  const std::lock_guard one(impl.expiry_mutex);
  if (impl.when_full.load() == rule) return Status();
  impl.when_full.store(rule, std::memory_order_relaxed);
  impl.renew_heat(impl.capacity.load());
  impl.refresh_push_stamp();
  return Status();
}

// Give a table that evicts its coldest rows the counters for `rows` rows.
void Table::Impl::renew_heat(uint64_t rows) {
  const std::lock_guard lock(heat_mutex);
  if (when_full.load() != WhenFull::kEvictColdest) {
    heat.store(nullptr, std::memory_order_release);
    return;
  }
  heats.push_back(std::make_unique<Heat>(rows));
  heat.store(heats.back().get(), std::memory_order_release);
}

uint64_t Table::Impl::time_as_stamp() {
  const auto now = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::system_clock::now().time_since_epoch());
  return std::max<uint64_t>(
      1, static_cast<uint64_t>(std::max<int64_t>(0, now.count() - kMsOf2026)) / kMsOfStamp);
}

// Give pushes the time as their stamp, if rows are evicted and do not expire.
void Table::Impl::advance_push_stamp() {
  if (when_full.load(std::memory_order_relaxed) == WhenFull::kRefuse || expire_after.load() > 0)
    return;
  const uint64_t stamp = time_as_stamp();
  uint64_t before = push_stamp.load();
  while (before < stamp && !push_stamp.compare_exchange_weak(before, stamp)) {
  }
}

void Table::note_pulled(std::span<const uint64_t> keys) const {
  Heat* const heat = impl_->heat.load(std::memory_order_acquire);
  if (heat != nullptr) heat->sample(keys);
}

}  // namespace petps::table
