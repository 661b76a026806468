// Expiry: a walk deletes the rows whose version has grown too old in event time. EXPIRY.md explains
// why a crash, or a write beside the walk, never loses a row that has not expired.
#include <algorithm>
#include <chrono>
#include <thread>

#include "base/hash.h"
#include "base/prefetch.h"
#include "table/slice.h"

namespace petps::table {

using base::Code;
using base::Result;
using base::Status;
using media::Flusher;
using media::Site;
using pool::EventClock;
using SteadyClock = std::chrono::steady_clock;

namespace {

constexpr uint64_t kBucketsInStep = 64;  // for which a pin is held
// Deleted with the drains of one batch; more where a drain flushes the disk.
constexpr size_t kDeletedTogether = 512;
constexpr size_t kDeletedTogetherSynced = 16384;
// The shortest work of a paced walk before a pause, because a pause costs 60 us more.
constexpr auto kWorkBeforePause = std::chrono::microseconds(300);

double seconds(uint64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1e9; }

}  // namespace

Result<uint64_t> Table::expire(const ExpireOptions& options) { return impl_->expire(options); }

Result<uint64_t> Table::Impl::expire(const ExpireOptions& options) {
  const std::lock_guard one(expire_mutex);
  PETPS_RETURN_IF_ERROR(check_writable());
  uint64_t rule_then = 0;
  {
    const std::lock_guard held(rule_mutex);
    rule_then = expiry_rule;
  }
  const std::vector<EventClock> clocks = due_clocks();
  const auto is_due = [](const EventClock& clock) { return clock.bounds.back() > 0; };
  uint64_t deleted = 0;
  if (std::any_of(clocks.begin(), clocks.end(), is_due)) {
    epoch::Reader* const reader = epochs.lease();
    if (reader == nullptr) {
      return Status(Code::kUnavailable, "table '" + record.spec.name +
                                            "': no reader place is free for the walk that expires "
                                            "rows; close some connections");
    }
    const Result<bool> complete = walk_expired(options, rule_then, *reader, &deleted);
    epochs.release(reader);
    expired.fetch_add(deleted, std::memory_order_relaxed);
    if (!complete.ok()) return complete.status();
    if (!complete.value()) return deleted;
  }
  const std::lock_guard held(rule_mutex);
  if (expiry_rule != rule_then) return deleted;
  const std::lock_guard state(expiry_state_mutex);
  expired_until.clear();
  for (const EventClock& clock : clocks) expired_until.push_back(clock.time_ns);
  return deleted;
}

// Return the clocks. Those of partitions that catch up expire nothing: the versions of their rows
// may be far above what the clock knows.
std::vector<EventClock> Table::Impl::due_clocks() const {
  std::vector<EventClock> clocks = pool.clocks(record.id);
  if (record.spec.feed != pool::Feed::kDelta || clocks.empty()) return clocks;
  for (const pool::Progress& progress : pool.all_progress()) {
    if (progress.instance == record.spec.instance && progress.partition < clocks.size() &&
        progress.state == pool::ProgressState::kCatchingUp)
      clocks[progress.partition].bounds.fill(0);
  }
  return clocks;
}

// Return false if it was ended early.
Result<bool> Table::Impl::walk_expired(const ExpireOptions& options, uint64_t rule_then,
                                       epoch::Reader& reader, uint64_t* deleted) {
  const size_t together = synced() ? kDeletedTogetherSynced : kDeletedTogether;
  const index::Index* array = nullptr;
  std::vector<uint64_t> keys;
  std::vector<uint32_t> stamps;
  std::vector<EventClock> clocks;
  uint64_t number = 0;
  uint64_t count = 0;
  auto since = SteadyClock::now();
  do {
    // Anew for each batch: rows of versions that were committed since must not look older than the
    // ones that an earlier clock knows.
    if (keys.empty()) clocks = due_clocks();
    if (clocks.empty()) return false;  // dropped, or the rows never expire any more
    {
      const epoch::Pin pin = reader.pin();
      if (array != &index()) {  // the table has grown, and each key has another bucket
        array = &index();
        count = array->bucket_count();
        number = 0;
      }
      collect_expired(*array, clocks, number, &keys, &stamps);
      number = std::min(count, number + kBucketsInStep);
    }
    if (keys.size() >= together || number == count) {
      bool ends = false;
      PETPS_RETURN_IF_ERROR(delete_expired(rule_then, &keys, &stamps, deleted, &ends));
      if (ends) return false;
    }
    if (options.progress != nullptr && !options.progress(number, count)) return false;
    const auto worked = SteadyClock::now() - since;
    if (!options.paced || worked < kWorkBeforePause) continue;
    std::this_thread::sleep_for(kPace * worked);
    since = SteadyClock::now();
  } while (number < count);
  return true;
}

// Delete the rows, unless the rule has changed since the walk began.
Status Table::Impl::delete_expired(uint64_t rule_then, std::vector<uint64_t>* keys,
                                   std::vector<uint32_t>* stamps, uint64_t* deleted, bool* ends) {
  const std::lock_guard held(rule_mutex);
  *ends = expiry_rule != rule_then;
  if (!*ends) PETPS_RETURN_IF_ERROR(delete_of_stamp(*keys, *stamps, deleted));
  keys->clear();
  stamps->clear();
  return Status();
}

// Append the expired rows of kBucketsInStep buckets. The caller holds a pin, so no slot that an
// entry names is reused.
void Table::Impl::collect_expired(const index::Index& array, const std::vector<EventClock>& clocks,
                                  uint64_t from, std::vector<uint64_t>* keys,
                                  std::vector<uint32_t>* stamps) const {
  std::vector<index::Entry> entries;
  read_ahead(from);
  for (uint64_t i = from; i < std::min(array.bucket_count(), from + kBucketsInStep); ++i) {
    const index::Index::LiveEntries live = array.read_bucket(i);
    for (size_t e = 0; e < live.count; ++e) {
      base::prefetch(slots.header(live.entries[e].ref), sizeof(pool::SlotHeader));
      entries.push_back(live.entries[e]);
    }
  }
  for (const index::Entry& entry : entries) {
    const pool::SlotHeader& header = *slots.header(entry.ref);
    const uint64_t partition =
        clocks.size() == 1 ? 0 : base::partition_hash(entry.key) % clocks.size();
    if (header.key != entry.key || !clocks[partition].expires(header.stamp)) continue;
    keys->push_back(entry.key);
    stamps->push_back(header.stamp);
  }
}

Status Table::Impl::delete_of_stamp(std::span<const uint64_t> keys,
                                    std::span<const uint32_t> stamps, uint64_t* deleted) {
  if (keys.empty()) return Status();
  const std::vector<uint8_t> all(keys.size(), 1);
  Batch batch;
  batch.keys = keys;
  batch.deleted = all;
  batch.stamps = stamps;
  batch.only_of_stamp = true;
  const Result<ApplyReport> report = apply_batch(*this, batch, nullptr);
  if (report.ok()) *deleted += report.value().deleted;
  return report.status();
}

void Table::Impl::refresh_push_stamp() {
  uint64_t stamp = when_full.load() == WhenFull::kRefuse ? 0 : time_as_stamp();
  if (record.spec.feed == pool::Feed::kPush && expire_after.load() > 0) {
    const std::vector<EventClock> clocks = pool.clocks(record.id);
    if (!clocks.empty()) stamp = std::max(pool::kFirstPushVersion, clocks[0].version + 1);
  }
  push_stamp.store(stamp, std::memory_order_release);
}

void Table::Impl::describe_expiry(TableStatus* status) const {
  status->expire_after = expire_after.load(std::memory_order_relaxed);
  status->expired = expired.load(std::memory_order_relaxed);
  if (status->expire_after == 0) return;
  const std::vector<EventClock> clocks = pool.clocks(record.id);
  const std::lock_guard state(expiry_state_mutex);
  for (size_t p = 0; p < clocks.size(); ++p) {
    const EventClock& clock = clocks[p];
    if (clock.time_ns == 0) continue;
    if (status->event_time_ns == 0 || clock.time_ns < status->event_time_ns)
      status->event_time_ns = clock.time_ns;
    if (clock.bounds.back() == 0 || status->expiry_delay < 0) continue;  // nothing is due
    const uint64_t until = p < expired_until.size() ? expired_until[p] : 0;
    const uint64_t since = clock.time_ns - std::min(clock.time_ns, until);
    const double behind = seconds(since + 2 * clock.cell_ns);
    status->expiry_delay = until == 0 ? -1.0 : std::max(status->expiry_delay, behind);
  }
}

Result<TablePointer> Tables::existing(uint32_t id) const {
  TablePointer table = find(id);
  if (table == nullptr)
    return Status(Code::kNotFound, "table id " + std::to_string(id) + " does not exist");
  return table;
}

Status Tables::set_expiry(uint32_t id, uint32_t seconds) {
  const Result<TablePointer> table = existing(id);
  if (!table.ok()) return table.status();
  Table::Impl& impl = table.value()->impl();
  const std::lock_guard one(impl.expiry_mutex);
  const std::lock_guard held(impl.rule_mutex);
  PETPS_RETURN_IF_ERROR(impl_->pool->set_expiry(id, seconds));
  impl.expiry_rule += 1;
  {
    const std::lock_guard state(impl.expiry_state_mutex);
    impl.expired_until.clear();
  }
  impl.expire_after.store(seconds, std::memory_order_relaxed);
  impl.refresh_push_stamp();
  return Status();
}

Status Tables::tick(uint32_t id, uint64_t now_ns) {
  const Result<TablePointer> table = existing(id);
  if (!table.ok()) return table.status();
  Table::Impl& impl = table.value()->impl();
  const std::lock_guard one(impl.expiry_mutex);
  const uint64_t version = impl.push_stamp.load();
  if (impl.expire_after.load() == 0 || version == 0) {
    return Status(
        Code::kFailedPrecondition,
        "table '" + impl.record.spec.name +
            "' takes no event time from a clock: its rows never expire, or deltas feed it");
  }
  const std::vector<EventClock> clocks = pool().clocks(id);
  if (clocks.empty())
    return Status(Code::kNotFound, "table '" + impl.record.spec.name + "' was dropped");
  const EventClock& clock = clocks[0];
  // A tick is also needed to see that the server's clock goes back, and to pay for that.
  const bool goes_on = clock.time_ns != 0 && clock.debt_ns == 0 && now_ns >= clock.shown_ns;
  if (goes_on && clock.time_after(now_ns) / clock.cell_ns == clock.time_ns / clock.cell_ns)
    return Status();
  Flusher flusher(impl.pool.medium());
  const Result<bool> changed = impl.pool.write_clock(id, version, now_ns, flusher);
  if (!changed.ok()) return changed.status();
  PETPS_RETURN_IF_ERROR(flusher.drain(Site::kClocked));
  impl.refresh_push_stamp();
  return Status();
}

uint32_t Table::stamp_of(const std::byte* row) const {
  return impl_->slots.header(static_cast<uint64_t>(row - impl_->pool.at(0)))->stamp;
}

Status Tables::adopt_clock(uint32_t table, uint32_t partition, const EventClock& clock) {
  Flusher flusher(pool().medium());
  const Result<bool> changed = pool().adopt_clock(table, partition, clock, flusher);
  if (!changed.ok()) return changed.status();
  return changed.value() ? flusher.drain(Site::kClocked) : Status();
}

}  // namespace petps::table
