#include "table/table.h"

#include <algorithm>

#include "table/impl.h"

namespace petps::table {

using base::Result;
using base::Status;

namespace {
// Lookup prefetches at most this number of a row's lines; the hardware prefetches the rest.
constexpr uint32_t kMaxRowLines = 8;

uint32_t lines_of(uint32_t row_bytes) {
  return std::min<uint32_t>(
      kMaxRowLines, static_cast<uint32_t>((row_bytes + media::kLineBytes - 1) / media::kLineBytes));
}
}  // namespace

Table::Impl::Impl(Tables::Impl& tables, const pool::TableRecord& table)
    : owner(tables),
      pool(*tables.pool),
      epochs(tables.epochs),
      record(table),
      slots(pool.slots(table.id)),
      capacity(table.spec.capacity),
      expire_after(table.spec.expire_after),
      row_lines(lines_of(table.spec.row_bytes)),
      hot(std::clamp(table.spec.capacity / kHotShare, kLeastHot, kMostHot)) {
  add_array({table.bucket_offset, table.bucket_count});
  refresh_push_stamp();
  if (pool.was_clean()) {
    set_counts(record.rows, record.displaced);
  } else {  // the largest possible count: no two rows share a slot or an entry
    index().request_recount();
    assumed_rows = std::min(slots.total(), index().bucket_count() * index::kEntries);
    occupied.store(assumed_rows);
  }
}

void Table::Impl::set_counts(uint64_t rows, uint64_t displaced) {
  index().set_walked(rows, displaced);
  assumed_rows = rows;
  occupied.store(rows);
}

Table::Impl::~Impl() {
  if (dropped) pool.free_table(record.id);
}

Table::Table(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Table::~Table() = default;

const pool::TableRecord& Table::record() const { return impl_->record; }
uint64_t Table::capacity() const { return impl_->capacity.load(std::memory_order_relaxed); }
pool::TableRecord Table::record_now() const {
  pool::TableRecord now = record();
  const index::Index& index = impl_->index();  // once: the table may be swapping it
  now.spec.capacity = capacity();
  now.spec.expire_after = impl_->expire_after.load(std::memory_order_relaxed);
  now.bucket_offset = index.bucket_offset();
  now.bucket_count = index.bucket_count();
  return now;
}
uint64_t Table::bucket_count() const { return impl_->index().bucket_count(); }

void Table::lookup(std::span<const uint64_t> keys, const std::byte** rows) const {
  impl_->index().find(keys, rows, impl_->row_lines);
}

void Table::lookup_in_step(std::span<const uint64_t> keys, const std::byte** rows, Visit visit,
                           void* context) const {
  static_assert(kNoKey == index::kNoKey);
  impl_->index().find(keys, rows, visit, context);
}

const std::byte* Table::lookup_one(uint64_t key) const {
  const index::Place place = impl_->index().find_one(key);
  return impl_->index().row_of(place.ref);
}

const std::byte* Table::default_row() const {
  return impl_->record.default_row == 0 ? nullptr : impl_->slots.row(impl_->record.default_row);
}

std::pair<uint64_t, uint64_t> Table::bucket_reads(std::span<const uint64_t> keys) const {
  uint64_t reads = 0;
  uint64_t hits = 0;
  for (const uint64_t key : keys) {
    const index::Place place = impl_->index().find_one(key);
    if (place.ref == 0) continue;
    reads += place.distance + 1;
    hits += 1;
  }
  return {reads, hits};
}

// ---- scan ----

Table::ScanGuard::ScanGuard(const Table& table) : table_(table) {
  table_.impl_->moves_gate.begin_scan();
}
Table::ScanGuard::~ScanGuard() { table_.impl_->moves_gate.end_scan(); }

ScanPage Table::scan(uint64_t from_bucket, uint64_t buckets) const {
  const index::Index& index = impl_->index();
  ScanPage page;
  const uint64_t end = std::min(index.bucket_count(), from_bucket + buckets);
  for (uint64_t number = from_bucket; number < end; ++number) {
    impl_->read_ahead(number);
    const index::Index::LiveEntries live = index.read_bucket(number);
    for (size_t i = 0; i < live.count; ++i) {
      const std::byte* const row = index.row_of(live.entries[i].ref);
      if (row == nullptr) continue;  // a damaged entry; verify reports it
      page.keys.push_back(live.entries[i].key);
      page.rows.push_back(row);
    }
  }
  page.next_bucket = end;
  return page;
}

TableStatus Table::status() const {
  const Impl& table = *impl_;
  TableStatus status;
  const bool is_counted = table.index().walked();
  status.rows =
      is_counted ? table.index().rows() : std::max(table.record.rows, table.index().rows());
  status.capacity = table.capacity.load(std::memory_order_relaxed);
  status.slots = table.slots.total();
  status.free_slots = table.slots.free_count();
  status.retired_slots = table.retired.load(std::memory_order_relaxed);
  status.index_bytes = table.index().bucket_count() * sizeof(index::Bucket) +
                       table.second_index_bytes.load(std::memory_order_relaxed);
  status.header_bytes = status.rows * sizeof(pool::SlotHeader);
  status.row_bytes_total = status.rows * table.record.spec.row_bytes;
  status.allocator_bytes = table.slots.allocator_bytes();
  status.displaced = table.index().displaced();
  status.walked = table.walked();
  table.describe_expiry(&status);
  status.evicted = table.evicted.load(std::memory_order_relaxed);
  status.missing_rows = table.missing_rows.load(std::memory_order_relaxed);
  status.damaged_slots = table.slots.kept_unused();
  const Heat* const heat = table.heat.load(std::memory_order_acquire);
  status.heat_bytes = heat == nullptr ? 0 : heat->bytes();
  return status;
}

// ---- hot placement ----

void Table::set_hot_keys(std::vector<uint64_t> keys) {
  {
    std::lock_guard lock(impl_->hot_mutex);
    std::vector<uint64_t>& pending = impl_->hot_keys;
    keys.resize(std::min(keys.size(), kMaxPendingHot - pending.size()));
    pending.insert(pending.end(), keys.begin(), keys.end());
  }
  impl_->owner.wake();
}

Result<uint64_t> Table::migrate(std::span<const uint64_t> hot_keys) {
  return impl_->migrate(hot_keys);
}
Result<uint64_t> Table::rehome() { return impl_->rehome(); }

Result<uint64_t> Table::recount() {
  if (!impl_->walked()) impl_->owner.walk();
  PETPS_RETURN_IF_ERROR(impl_->check_writable());
  uint64_t lowered = 0;
  while (!impl_->recount_step(&lowered)) {
  }
  return lowered;
}

Result<uint64_t> Table::Impl::migrate(std::span<const uint64_t> keys, HotKeys::Time now) {
  if (!walked()) owner.walk();
  PETPS_RETURN_IF_ERROR(check_writable());
  if (!walked()) return uint64_t{0};  // a reader in another process delays the walk: try later
  std::lock_guard lock(owner.moves_mutex);
  if (grows) return uint64_t{0};  // the client sends its hot set again
  hot.add(keys, now);
  uint64_t moves = 0;
  for (const uint64_t key : keys) {
    std::unique_lock gate(moves_gate, std::try_to_lock);
    if (!gate) {  // a scan is open: keep the keys for later, unless a newer set is pending
      std::lock_guard hot_lock(hot_mutex);
      if (hot_keys.empty()) hot_keys.assign(keys.begin(), keys.end());
      break;
    }
    if (hot.has_moved(key)) continue;
    auto moved = index().move_home(key, hot.spared());
    if (!moved.ok()) return moved;
    if (moved.value() > 0) hot.add_moved(key);
    moves += moved.value();
    if (owner.stopping.load(std::memory_order_relaxed) || (synced() && moves >= kMaxMovesSynced))
      break;
  }
  return moves;
}

Result<uint64_t> Table::Impl::rehome() {
  if (!walked()) owner.walk();
  PETPS_RETURN_IF_ERROR(check_writable());
  if (!walked()) return uint64_t{0};  // a reader in another process delays the walk: try later
  std::lock_guard lock(owner.moves_mutex);
  if (grows) return uint64_t{0};
  const uint64_t lost = erased.exchange(0, std::memory_order_relaxed);
  uint64_t moves = 0;
  // A place that an entry left may be another entry's home, so repeat until few entries move.
  for (uint64_t pass = 0, last = UINT64_MAX;
       pass < kRehomePasses && last > index().rows() / kRehomeEnough; ++pass) {
    const uint64_t before = moves;
    for (uint64_t number = 0; number < index().bucket_count(); ++number) {
      std::unique_lock gate(moves_gate, std::try_to_lock);
      if (!gate) {  // a scan is open: try later
        erased.fetch_add(lost, std::memory_order_relaxed);
        return moves;
      }
      auto moved = index().rehome_bucket(number);
      if (!moved.ok()) return moved;
      moves += moved.value();
      if (owner.stopping.load(std::memory_order_relaxed) || (synced() && moves >= kMaxMovesSynced))
        return moves;
    }
    last = moves - before;
  }
  return moves;
}

// With every range taken and no move in progress, each claim on a counter belongs to an entry
// that exists, and every erase is durable. So the counts are exact, now and on the medium. A
// writer that holds a range may wait for the walk, so the walk must not wait for a recount.
bool Table::Impl::recount_step(uint64_t* lowered) {
  if (!walked()) return true;
  std::lock_guard lock(owner.moves_mutex);
  if (grows) return true;
  if (recount == Recount::kNone) {
    if (!index().begin_recount()) return true;
    recount = Recount::kCounts;
    installed = 0;
  }
  if (recount == Recount::kCounts) {
    if (index().count_claims(kBucketsCounted)) recount = Recount::kInstalls;
    return false;
  }
  range_locks.take_all();
  const bool possible = !dropped && !pool.medium().failed();
  if (possible) *lowered += index().install_counters(installed, installed + kBucketsInstalled);
  installed += kBucketsInstalled;
  const bool complete = !possible || installed >= index().bucket_count();
  if (complete) {
    index().end_recount();
    recount = Recount::kNone;
  }
  range_locks.give(kAllRanges);
  return complete;
}

bool Table::Impl::wants_recount() {
  std::lock_guard lock(owner.moves_mutex);
  return walked() && !grows && !pool.medium().failed() &&
         (recount != Recount::kNone || index().wants_recount());
}

// ---- recovery ----

// Call before bucket `number` of a scan in order: a file reads ahead only where a scan is
// announced.
void Table::Impl::read_ahead(uint64_t number) const {
  constexpr uint64_t kPiece = 16384;  // buckets: 4 MiB
  if (number % kPiece != 0) return;
  const uint64_t buckets = std::min(kPiece, index().bucket_count() - number);
  pool.medium().expect_scan(index().bucket_offset() + number * sizeof(index::Bucket),
                            buckets * sizeof(index::Bucket));
}

void Table::Impl::walk() {
  if (walked()) return;
  if (slots.needs_walk() && pool.was_clean()) {
    std::unique_lock gate(walk_gate);
    slots.load_free_maps();
  }
  if (!walked()) {
    const auto mark = [this](uint64_t, pool::SlotRef ref) { slots.mark(ref); };
    media::Flusher flusher(pool.medium());
    for (uint64_t number = 0; number < index().bucket_count(); ++number) {
      read_ahead(number);
      index().walk_bucket(number, flusher, mark);
    }
    occupied.fetch_sub(assumed_rows - index().rows_at_open());
    assumed_rows = index().rows_at_open();
    // An entry that a killed process published or erased without a drain may revert at a power
    // cut, so nothing that it replaced may be freed before the entry is durable. A failed drain
    // has made the pool read-only; its slots then stay as they are.
    if (!flusher.drain(media::Site::kAdoptedDrain).ok()) return;
  }
  if (slots.needs_walk()) {
    std::unique_lock gate(walk_gate);
    // A batch whose drain failed has marked no slot that it replaced, and the medium may still name
    // them. It held the gate, so this sees the failure.
    if (pool.medium().failed()) return;
    if (record.default_row != 0) slots.mark(record.default_row);
    slots.finish_walk();
  }
}

}  // namespace petps::table
