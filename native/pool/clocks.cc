// The event times of tables whose rows expire: two records of each partition, written alternately,
// so that a torn write leaves the other one whole.
#include <algorithm>
#include <cstring>
#include <set>

#include "pool/catalogue.h"

namespace petps::pool {

using base::Code;
using base::Result;
using base::Status;
using layout::ClockEntry;
using media::Flusher;
using media::Site;

namespace {

uint64_t entry_checksum(const ClockEntry& entry) {
  return base::checksum64(&entry, offsetof(ClockEntry, checksum));
}

// Return the newest whole record of the pair; its turn is 0 if neither is whole.
Clocks::Place read_pair(const std::byte* pair, uint32_t table, uint32_t partition) {
  Clocks::Place newest;
  for (uint64_t record = 0; record < 2; ++record) {
    ClockEntry entry;
    std::memcpy(&entry, pair + record * sizeof entry, sizeof entry);
    const bool is_whole = entry.checksum == entry_checksum(entry) && entry.table == table &&
                          entry.partition == partition;
    if (!is_whole || entry.turn <= newest.turn) continue;
    newest.turn = entry.turn;
    newest.value.cell_ns = entry.cell_ns;
    newest.value.time_ns = entry.time_ns;
    newest.value.version = entry.version;
    std::copy(std::begin(entry.bounds), std::end(entry.bounds), newest.value.bounds.begin());
    newest.value.shown_ns = entry.shown_ns;
    newest.value.debt_ns = entry.debt_ns;
  }
  return newest;
}

ClockEntry entry_of(const Clocks::Place& place, uint32_t table, uint32_t partition) {
  ClockEntry entry{};
  entry.table = table;
  entry.partition = partition;
  entry.turn = place.turn;
  entry.cell_ns = place.value.cell_ns;
  entry.time_ns = place.value.time_ns;
  entry.version = place.value.version;
  std::copy(place.value.bounds.begin(), place.value.bounds.end(), entry.bounds);
  entry.shown_ns = place.value.shown_ns;
  entry.debt_ns = place.value.debt_ns;
  entry.checksum = entry_checksum(entry);
  return entry;
}

}  // namespace

Status Pool::load_clocks(const TableRecord& table) {
  if (media_->is_read_beside()) return Status();  // a reader needs none
  const auto known = catalogue_->clocks.find(table.id);
  const bool exists = known != catalogue_->clocks.end();
  const uint32_t partitions = catalogue_->instance(table.spec.instance)->partitions;
  if (exists && known->second.bytes >= partitions * layout::kClockPairBytes) {
    known->second.expire_after = table.spec.expire_after;
    known->second.feed = table.spec.feed;
    const uint64_t cell = EventClock::cell_of(table.spec.expire_after);
    for (uint32_t partition = 0; partition < partitions; ++partition) {
      const uint64_t at = known->second.offset + partition * layout::kClockPairBytes;
      Clocks::Place place = read_pair(base_ + at, table.id, partition);
      if (place.turn == 0) place.value.cell_ns = cell;
      // A crash came between the change of the superblock and the next record.
      if (cell != 0 && place.value.cell_ns != cell) place.value.change_cell(cell);
      known->second.partitions.push_back(place);
    }
    return Status();
  }
  if (!exists && table.spec.expire_after == 0) return Status();
  return Status(Code::kDataLoss, "table '" + table.spec.name + "' of pool '" + media_->path() +
                                     "' lacks the times by which its rows expire; restore the "
                                     "pool from a base (petps load)");
}

Status Pool::check_expiry(uint32_t seconds) const {
  if (seconds > kMaxExpireAfter) {
    return Status(Code::kInvalidArgument, "expire_after must be at most 100 years (" +
                                              std::to_string(kMaxExpireAfter) +
                                              " seconds), it is " + std::to_string(seconds));
  }
  if (seconds == 0 || map_ == &layout::kMap) return Status();
  return Status(Code::kFailedPrecondition,
                "pool '" + media_->path() + "' has format version " +
                    std::to_string(format_version_) +
                    ", in which rows cannot expire: export it into a new pool");
}

// Give the table an extent of clocks, all zero.
Status Pool::add_clocks(const TableRecord& record) {
  uint32_t partitions = 0;
  for (const InstanceRecord& instance : instances()) {
    if (instance.id == record.spec.instance) partitions = instance.partitions;
  }
  if (partitions == 0) {
    return Status(Code::kNotFound,
                  "instance " + std::to_string(record.spec.instance) + " was dropped");
  }
  const uint64_t bytes = partitions * layout::kClockPairBytes;
  auto extent = add_extent(static_cast<uint32_t>(layout::ExtentKind::kClocks), record.id,
                           length_of_buckets(bytes));
  if (!extent.ok()) return extent.status();
  Clocks clocks;
  clocks.expire_after = record.spec.expire_after;
  clocks.feed = record.spec.feed;
  clocks.offset = extent.value().offset;
  clocks.bytes = extent.value().bytes;
  Clocks::Place none;
  none.value.cell_ns = EventClock::cell_of(record.spec.expire_after);
  clocks.partitions.assign(partitions, none);
  const std::lock_guard state(state_mutex_);
  catalogue_->clocks[record.id] = std::move(clocks);
  return Status();
}

// Let the clocks of a table begin again. On the disk when it returns.
Status Pool::forget_clocks(uint32_t table, Clocks* clocks, uint64_t cell_ns) {
  {
    const std::lock_guard state(state_mutex_);
    for (Clocks::Place& place : clocks->partitions) {
      place.value.forget(cell_ns);
      place.turn += 1;
    }
  }
  Flusher flusher(*media_);
  for (uint32_t partition = 0; partition < clocks->partitions.size(); ++partition)
    write_clock_entry(table, partition, *clocks, flusher);
  PETPS_RETURN_IF_ERROR(flusher.drain(Site::kClocked));
  return media_->sync_range(base_ + clocks->offset,
                            clocks->partitions.size() * layout::kClockPairBytes, Site::kReusedSync);
}

Status Pool::set_expiry(uint32_t table, uint32_t seconds) {
  std::lock_guard lock(mutex_);
  PETPS_RETURN_IF_ERROR(check_writable());
  PETPS_RETURN_IF_ERROR(check_expiry(seconds));
  TableRecord* record = catalogue_->table(table);
  if (record == nullptr)
    return Status(Code::kNotFound, "table id " + std::to_string(table) + " does not exist");
  const TableRecord before = *record;
  if (before.spec.expire_after == seconds) return Status();
  TableRecord after = before;
  after.spec.expire_after = seconds;
  if (before.spec.expire_after == 0) {
    PETPS_RETURN_IF_ERROR(write_as_expiring());
    // Times of an earlier expiry must not count again.
    if (Clocks* const known = find_clocks(table); known == nullptr) {
      PETPS_RETURN_IF_ERROR(add_clocks(after));
    } else {
      PETPS_RETURN_IF_ERROR(forget_clocks(table, known, EventClock::cell_of(seconds)));
    }
    size_t records = 0;
    {
      const std::lock_guard state(state_mutex_);
      records = catalogue_->extents.size();
    }
    PETPS_RETURN_IF_ERROR(
        media_->sync_range(base_ + map_->extents(), records * 8, Site::kNewTableSync));
  }
  *record = after;
  if (Status status = write_superblock(); !status.ok()) {
    *record = before;
    return status;
  }
  const std::lock_guard state(state_mutex_);
  Clocks& clocks = catalogue_->clocks.at(table);
  clocks.expire_after = seconds;
  if (seconds == 0 || before.spec.expire_after == 0) return Status();
  for (Clocks::Place& place : clocks.partitions)
    place.value.change_cell(EventClock::cell_of(seconds));
  return Status();
}

// Return the clocks of a table of the catalogue, which stay while the caller holds mutex_; or null.
Clocks* Pool::find_clocks(uint32_t table) {
  const std::lock_guard state(state_mutex_);
  const auto known = catalogue_->clocks.find(table);
  return known == catalogue_->clocks.end() ? nullptr : &known->second;
}

// From the first extent of clocks on, a release that does not know them must refuse the pool. The
// caller holds mutex_.
Status Pool::write_as_expiring() {
  if (format_version_ >= layout::kExpiryFormatVersion) return Status();
  const uint32_t before = format_version_;
  format_version_ = layout::kExpiryFormatVersion;
  Status status = write_superblock();
  if (!status.ok()) format_version_ = before;
  return status;
}

std::vector<EventClock> Pool::clocks(uint32_t table) const {
  const std::lock_guard state(state_mutex_);
  std::vector<EventClock> all;
  const auto known = catalogue_->clocks.find(table);
  if (known == catalogue_->clocks.end() || known->second.expire_after == 0) return all;
  const Clocks& clocks = known->second;
  const size_t used = clocks.feed == Feed::kPush ? 1 : clocks.partitions.size();
  all.reserve(used);
  for (size_t i = 0; i < used && i < clocks.partitions.size(); ++i)
    all.push_back(clocks.partitions[i].value);
  return all;
}

// Count the commits of one table's instance, and write each changed partition once: two records of
// a pair without a drain between them could both be torn.
bool Pool::write_table_clocks(const TableRecord& table, std::span<const Commit> commits,
                              Flusher& flusher) {
  Clocks* clocks = nullptr;
  std::set<uint32_t> changed;
  {
    const std::lock_guard state(state_mutex_);
    clocks = &catalogue_->clocks.at(table.id);  // of a table in the catalogue: it stays
    for (const Commit& commit : commits) {
      if (commit.instance != table.spec.instance) continue;
      Clocks::Place& place = clocks->partitions.at(commit.partition);
      if (!place.value.commit(commit.version, commit.time_ns)) continue;
      if (changed.insert(commit.partition).second) place.turn += 1;
    }
  }
  for (const uint32_t partition : changed) write_clock_entry(table.id, partition, *clocks, flusher);
  return !changed.empty();
}

// Write the newest record of a partition. The caller holds mutex_, so nobody changes the record
// during this call.
void Pool::write_clock_entry(uint32_t table, uint32_t partition, const Clocks& clocks,
                             Flusher& flusher) {
  const Clocks::Place& place = clocks.partitions[partition];
  const ClockEntry entry = entry_of(place, table, partition);
  flusher.copy(
      base_ + clocks.offset + partition * layout::kClockPairBytes + (place.turn % 2) * sizeof entry,
      &entry, sizeof entry, Site::kClock);
}

Result<bool> Pool::write_clocks(std::span<const Commit> commits, Flusher& flusher) {
  std::lock_guard lock(mutex_);
  PETPS_RETURN_IF_ERROR(check_writable());
  for (const Commit& commit : commits) {
    const InstanceRecord* instance = catalogue_->instance(commit.instance);
    if (instance != nullptr && commit.partition >= instance->partitions) {
      return Status(Code::kInvalidArgument, "instance '" + instance->name + "' has " +
                                                std::to_string(instance->partitions) +
                                                " partitions, a commit names partition " +
                                                std::to_string(commit.partition));
    }
  }
  bool changed = false;
  for (const TableRecord& table : catalogue_->tables) {
    if (table.spec.expire_after > 0 && table.spec.feed == Feed::kDelta)
      changed = write_table_clocks(table, commits, flusher) || changed;
  }
  return changed;
}

// Return the record of a table that may be written. The caller holds mutex_.
Result<const TableRecord*> Pool::writable_table(uint32_t table) const {
  PETPS_RETURN_IF_ERROR(check_writable());
  const TableRecord* record = catalogue_->table(table);
  if (record == nullptr)
    return Status(Code::kNotFound, "table id " + std::to_string(table) + " does not exist");
  return record;
}

Result<bool> Pool::adopt_clock(uint32_t table, uint32_t partition, const EventClock& clock,
                               Flusher& flusher) {
  std::lock_guard lock(mutex_);
  const Result<const TableRecord*> found = writable_table(table);
  if (!found.ok()) return found.status();
  const TableRecord* const record = found.value();
  if (record->spec.expire_after == 0 || clock.time_ns == 0 || clock.cell_ns == 0) return false;
  Clocks* clocks = nullptr;
  {
    const std::lock_guard state(state_mutex_);
    clocks = &catalogue_->clocks.at(table);
    if (partition >= clocks->partitions.size()) {
      return Status(Code::kInvalidArgument, "table '" + record->spec.name + "' has no partition " +
                                                std::to_string(partition));
    }
    Clocks::Place& place = clocks->partitions[partition];
    if (place.value.time_ns != 0 && place.value.version >= clock.version) return false;
    const uint64_t cell = place.value.cell_ns;
    place.value = clock;
    if (clock.cell_ns != cell) place.value.change_cell(cell);
    place.turn += 1;
  }
  write_clock_entry(table, partition, *clocks, flusher);
  return true;
}

Result<bool> Pool::write_clock(uint32_t table, uint64_t version, uint64_t time_ns,
                               Flusher& flusher) {
  std::lock_guard lock(mutex_);
  const Result<const TableRecord*> found = writable_table(table);
  if (!found.ok()) return found.status();
  const TableRecord* const record = found.value();
  if (record->spec.expire_after == 0) return false;
  const Commit commit{record->spec.instance, 0, version, time_ns};
  return write_table_clocks(*record, {&commit, 1}, flusher);
}

}  // namespace petps::pool
