#include <algorithm>
#include <chrono>
#include <set>

#include "base/check.h"
#include "table/impl.h"

namespace petps::table {

using base::Code;
using base::Result;
using base::Status;
using media::Flusher;
using media::Site;

namespace {

bool has_bit(std::span<const uint64_t> bitmap, uint64_t number) {
  return number / 64 < bitmap.size() && ((bitmap[number / 64] >> (number % 64)) & 1) != 0;
}

// Return whether the model's name has left the instance.
bool is_past(const pool::Names& names, const pool::InstanceRecord& record) {
  return record.frozen || std::ranges::any_of(names.aliases, [&](const pool::AliasRecord& alias) {
           return alias.name == record.model && alias.instance > record.id;
         });
}

// The pause between two checks for retired items to reclaim.
constexpr auto kBackgroundPause = std::chrono::milliseconds(100);
// How long a close waits for readers, in this process or another, to release replaced rows.
constexpr auto kClosePatience = std::chrono::seconds(2);
constexpr auto kWalkDelay = std::chrono::milliseconds(100);
// Re-home a table when it has lost 1/64 of its rows since the last re-homing.
constexpr uint64_t kRehomeShare = 64;
}  // namespace

Tables::Impl::Impl(std::unique_ptr<pool::Pool> opened) : pool(std::move(opened)) {
  for (const pool::TableRecord& record : pool->tables()) add(record);
  for (const pool::InstanceRecord& instance : pool->instances()) refresh_applied(instance.id);
}

Tables::Impl::~Impl() { stop_background(); }

TablePointer Tables::Impl::add(const pool::TableRecord& record) {
  auto table = std::make_shared<Table>(std::make_unique<Table::Impl>(*this, record));
  std::lock_guard lock(mutex);
  tables.push_back(table);
  return table;
}

Result<std::unique_ptr<Tables>> Tables::create(const TablesOptions& options) {
  auto pool = pool::Pool::create(options.pool);
  if (!pool.ok()) return pool.status();
  auto tables = attach(std::move(pool).value(), options.background);
  if (!tables.ok()) return pool::Pool::undo_create(options.pool, tables.status());
  return tables;
}

Result<std::unique_ptr<Tables>> Tables::open(const TablesOptions& options) {
  auto pool = pool::Pool::open(options.pool);
  if (!pool.ok()) return pool.status();
  if (pool.value()->lost_power() && pool.value()->read_only() && !options.allow_lost_power)
    return pool.value()->lost_power_refusal();
  return attach(std::move(pool).value(), options.background, options.accept_lost_power);
}

Result<std::unique_ptr<Tables>> Tables::attach(std::unique_ptr<pool::Pool> pool, bool background,
                                               bool accept_lost_power) {
  std::unique_ptr<epoch::ReadersFile> readers;
  if (!pool->read_only()) {
    if (pool->lost_power() && !accept_lost_power) return pool->lost_power_refusal();
    if (!pool->medium().path().empty()) {
      auto served = epoch::ReadersFile::serve(pool->medium().path(), pool->uuid());
      if (!served.ok()) return served.status();
      readers = std::move(served).value();
    }
    // Clears the clean flag on the disk before the first other write.
    PETPS_RETURN_IF_ERROR(pool->begin_writing());
    PETPS_RETURN_IF_ERROR(index::replay_journal(*pool));
    if (pool->lost_power()) PETPS_RETURN_IF_ERROR(pool->accept_lost_power());
  }
  auto impl = std::make_unique<Impl>(std::move(pool));
  if (readers != nullptr) {
    impl->epochs.share(std::move(readers));
    // Where other processes may still read free extents, hold them until the walk.
    impl->pool->hold_free_extents(impl->read_since_a_kill());
  }
  if (background && !impl->pool->read_only()) impl->start_background();
  return std::unique_ptr<Tables>(new Tables(std::move(impl)));
}

Tables::Tables(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tables::~Tables() = default;

pool::Pool& Tables::pool() { return *impl_->pool; }
epoch::Domain& Tables::epochs() { return impl_->epochs; }
void Tables::walk() { impl_->walk(); }
bool Tables::walked() const { return impl_->walked.load(std::memory_order_acquire); }
std::string Tables::readers_refused() const {
  const epoch::ReadersFile* const readers = impl_->epochs.shared();
  return readers == nullptr ? "the pool is in memory, or open read-only" : readers->refused();
}
size_t Tables::reclaim() { return impl_->epochs.reclaim(); }

Status Tables::close() {
  impl_->stop_background();
  if (impl_->pool->read_only()) return Status();
  impl_->walk();
  Flusher flusher(impl_->pool->medium());
  if (impl_->pool->medium().failed()) return flusher.drain(Site::kCloseDrain);  // the first error
  const bool is_reclaimed = impl_->await_reclaim();
  if (!is_reclaimed || !impl_->walked.load(std::memory_order_acquire)) {
    // Retired slots are in no free map: a clean close would lose them for ever.
    const bool outside = is_reclaimed || impl_->epochs.outside_pins();
    return Status(Code::kFailedPrecondition,
                  "pool '" + impl_->pool->medium().path() + "' is closed, but " +
                      (outside ? "a process that reads it" : "a read in progress") +
                      " holds rows that were replaced: the next open looks for free slots as after "
                      "a crash");
  }
  for (const auto& table : impl_->tables) {
    Table::Impl& t = table->impl();
    t.slots.store_free_maps(flusher);
    t.index().flush_words(flusher);
    impl_->pool->set_counts(t.record.id, t.index().rows(), t.index().displaced());
  }
  PETPS_RETURN_IF_ERROR(flusher.drain(Site::kCloseDrain));
  PETPS_RETURN_IF_ERROR(impl_->pool->finish_clean());
  if (impl_->epochs.shared() != nullptr) impl_->epochs.shared()->remove();
  return Status();
}

// Wait until everything retired is released, at most kClosePatience. Return true if it is.
bool Tables::Impl::await_reclaim() {
  const auto deadline = std::chrono::steady_clock::now() + kClosePatience;
  for (;;) {
    epochs.reclaim();
    if (epochs.retired_items() == 0) return true;
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Result<TablePointer> Tables::create_table(const pool::TableSpec& spec) {
  const std::lock_guard lock(impl_->catalogue_mutex);
  auto record = impl_->pool->create_table(spec);
  if (!record.ok()) return record.status();
  TablePointer table = impl_->add(record.value());
  table->impl().set_counts(0, 0);  // fresh buckets are empty
  return table;
}

Status Tables::switch_alias(const std::string& alias, uint32_t instance, bool unless_frozen) {
  uint64_t loaded = 0;
  uint64_t unfed = 0;  // records of partitions whose log was only passed over
  uint64_t expected = 0;
  bool begun = false;
  bool is_fed = false;
  std::string name;
  {
    const std::lock_guard lock(impl_->applied_mutex);
    for (const auto& record : impl_->pool->instances()) {
      if (record.id != instance) continue;
      name = record.name;
      expected = impl_->counted_partitions(record);
    }
    for (const pool::Progress& progress : impl_->pool->all_progress()) {
      if (progress.instance != instance || !impl_->counts(progress.partition)) continue;
      begun = true;
      const bool is_mixed = progress.state == pool::ProgressState::kCatchingUp ||
                            progress.state == pool::ProgressState::kLostPower;
      const bool has_applied = pool::has_applied(progress);
      is_fed = is_fed || is_mixed || has_applied || pool::is_blank(progress);
      (has_applied ? loaded : unfed) += is_mixed || pool::is_blank(progress) ? 0 : 1;
    }
  }
  if (!is_fed) loaded += unfed;  // `petps load` filled it
  if (begun && loaded < expected) {
    return Status(Code::kFailedPrecondition,
                  "instance '" + name + "' is loaded in " + std::to_string(loaded) + " of " +
                      std::to_string(expected) +
                      " partitions: wait for the others (petps status), then switch");
  }
  PETPS_RETURN_IF_ERROR(impl_->pool->set_alias(alias, instance, unless_frozen));
  for (const auto& record : impl_->pool->instances())  // others are past now
    impl_->refresh_applied(record.id);
  return {};
}

// Make the other instances of the model pass over what the dropped instance had read of the log.
// Otherwise they would read it again, and its base would bring the dropped instance back. An
// instance that has no record of a partition is not loaded there, and gets none: with one it would
// count as loaded. The instance that the model's name refers to is asked for such a partition, so
// it gets a record.
Status Tables::Impl::pass_over(uint32_t instance) {
  const auto fence = [](const pool::Progress& progress) {
    return progress.state == pool::ProgressState::kPassing ? progress.target : progress.run;
  };
  std::string model;
  for (const auto& record : pool->instances()) {
    if (record.id == instance) model = record.model;
  }
  uint32_t current = 0;
  for (const pool::AliasRecord& alias : pool->aliases()) {
    if (alias.name == model) current = alias.instance;
  }
  std::vector<pool::Progress> heirs;
  for (const pool::Progress& read : pool->all_progress()) {
    if (read.instance != instance) continue;
    for (const auto& heir : pool->instances()) {
      if (heir.model != model || heir.id == instance) continue;
      const auto known = pool->read_progress(heir.id, read.partition);
      const bool is_unloaded = !known.has_value() || pool::is_blank(*known);
      if (is_unloaded && current != 0 && heir.id != current) continue;
      pool::Progress own;
      own.instance = heir.id;
      own.partition = read.partition;
      own = known.value_or(own);
      if (pool::needs_base(own.state) || fence(own) >= fence(read)) continue;
      own.state = pool::ProgressState::kPassing;
      own.target = fence(read);
      own.offset = read.offset;
      heirs.push_back(own);
    }
  }
  Flusher flusher(pool->medium());
  PETPS_RETURN_IF_ERROR(pool->write_progress(heirs, flusher));
  return flusher.drain(Site::kProgressed);
}

Status Tables::drop_instance(uint32_t instance) {
  const std::lock_guard catalogue_lock(impl_->catalogue_mutex);
  PETPS_RETURN_IF_ERROR(impl_->pool->check_droppable(instance));
  PETPS_RETURN_IF_ERROR(impl_->pass_over(instance));
  PETPS_RETURN_IF_ERROR(impl_->pool->drop_instance(instance));
  const std::vector<uint64_t> ids = impl_->remove_tables(
      [&](const Table& table) { return table.record().spec.instance == instance; });
  {
    std::lock_guard lock(impl_->applied_mutex);
    for (Applied& applied : impl_->applied) {
      if (applied.instance.load(std::memory_order_relaxed) == instance)
        applied.instance.store(0, std::memory_order_release);
    }
  }
  impl_->epochs.retire(*impl_, ids);
  impl_->wake();
  return Status();
}

Status Tables::drop_table(uint32_t table) {
  const std::lock_guard catalogue_lock(impl_->catalogue_mutex);
  PETPS_RETURN_IF_ERROR(impl_->pool->drop_table(table));
  const auto is_it = [&](const Table& other) { return other.id() == table; };
  impl_->epochs.retire(*impl_, impl_->remove_tables(is_it));
  impl_->wake();
  return Status();
}

std::vector<uint64_t> Tables::Impl::remove_tables(
    const std::function<bool(const Table&)>& is_dropped) {
  std::vector<TablePointer> removed;
  {
    std::lock_guard lock(mutex);
    const auto kept =
        std::stable_partition(tables.begin(), tables.end(),
                              [&](const TablePointer& table) { return !is_dropped(*table); });
    removed.assign(kept, tables.end());
    tables.erase(kept, tables.end());
    dropped.insert(dropped.end(), removed.begin(), removed.end());
    change_count.fetch_add(1);
  }
  std::vector<uint64_t> ids;
  for (const TablePointer& table : removed) {
    table->impl().range_locks.take_all();
    table->impl().dropped = true;
    table->impl().range_locks.give(kAllRanges);
    ids.push_back(table->id());
  }
  return ids;
}

Result<uint64_t> Tables::shrink(const std::function<bool(uint64_t, uint64_t)>& progress) {
  if (!walked()) walk();
  static_cast<void>(impl_->await_reclaim());  // what is still read stays as it is
  for (const TablePointer& table : tables()) table->impl().finish_growing();
  return impl_->pool->shrink(progress);
}

// Free tables that no pin reads any more. A table whose own retired slots are queued behind it
// and not yet released is retired again.
void Tables::Impl::reclaim(std::span<const uint64_t> items) {
  std::vector<TablePointer> removed;
  std::vector<uint64_t> waiting;
  {
    std::lock_guard lock(mutex);
    for (const uint64_t id : items) {
      const auto at = std::find_if(dropped.begin(), dropped.end(),
                                   [&](const TablePointer& table) { return table->id() == id; });
      Table::Impl& table = (*at)->impl();
      const bool has_array = table.outgrown.retired.load() && !table.outgrown.unread.load();
      if (has_array || table.retired.load(std::memory_order_acquire) > 0) {
        waiting.push_back(id);
        continue;
      }
      removed.push_back(std::move(*at));
      dropped.erase(at);
    }
  }
  if (!waiting.empty()) epochs.retire(*this, waiting);
}

uint64_t Tables::change_count() const { return impl_->change_count.load(); }

TablePointer Tables::find(uint32_t id) const {
  std::lock_guard lock(impl_->mutex);
  for (const auto& table : impl_->tables) {
    if (table->id() == id) return table;
  }
  return nullptr;
}

TablePointer Tables::find(const std::string& instance, const std::string& name) const {
  for (const pool::InstanceRecord& record : impl_->pool->instances()) {
    if (record.name != instance) continue;
    std::lock_guard lock(impl_->mutex);
    for (const auto& table : impl_->tables) {
      if (table->record().spec.instance == record.id && table->record().spec.name == name)
        return table;
    }
  }
  return nullptr;
}

std::vector<TablePointer> Tables::Impl::list_tables() {
  std::lock_guard lock(mutex);
  return tables;
}

std::vector<TablePointer> Tables::tables() const { return impl_->list_tables(); }

Result<pool::InstanceRecord> Tables::resolve(const std::string& model) const {
  const auto [instances, aliases, sequence] = impl_->pool->names();
  for (const auto& alias : aliases) {
    if (alias.name != model) continue;
    for (const auto& instance : instances) {
      if (instance.id == alias.instance) return instance;
    }
  }
  std::string known;
  const pool::InstanceRecord* newest = nullptr;
  for (const auto& instance : instances) {
    if (instance.name == model) return instance;
    if (instance.model == model) newest = &instance;
    known += (known.empty() ? "" : ", ") + instance.name;
  }
  if (newest != nullptr) return *newest;
  return Status(Code::kNotFound, "there is no model, instance or alias '" + model +
                                     "'; this pool has: " + (known.empty() ? "none" : known));
}

// ---- progress ----

bool Tables::Impl::counts(uint64_t partition) const {
  return counted.empty() || has_bit(counted, partition);
}

uint64_t Tables::Impl::counted_partitions(const pool::InstanceRecord& instance) const {
  uint64_t count = 0;
  for (uint64_t p = 0; p < instance.partitions; ++p) count += counts(p) ? 1 : 0;
  return count;
}

void Tables::Impl::refresh_applied(uint32_t instance) {
  const std::lock_guard lock(applied_mutex);
  const pool::Names names = pool->names();
  const auto record = std::ranges::find(names.instances, instance, &pool::InstanceRecord::id);
  if (record == names.instances.end()) return;  // the instance was dropped
  const uint64_t expected = counted_partitions(*record);
  const bool has_left = is_past(names, *record);
  bool lacks_log = false;
  for (uint64_t p = 0; p < record->partitions; ++p)
    lacks_log = lacks_log || (counts(p) && is_unread(instance, p));
  uint64_t lowest = UINT64_MAX;
  uint64_t recorded = 0;
  uint64_t loaded = 0;
  bool is_fed = false;  // if not, `petps load` filled the instance, or nothing did
  for (const pool::Progress& progress : pool->all_progress()) {
    if (progress.instance != instance) continue;
    is_fed = is_fed || pool::has_applied(progress) || pool::is_blank(progress);
    if (!counts(progress.partition)) continue;
    loaded += pool::has_applied(progress) ? 1 : 0;
    recorded += 1;
    lowest = std::min(lowest, progress.version);
  }
  const auto find = [&](uint32_t id) {
    return std::find_if(applied.begin(), applied.end(),
                        [&](const Applied& place) { return place.instance.load() == id; });
  };
  auto at = find(instance);
  if (at == applied.end()) {
    at = find(0);  // a free place
    PETPS_CHECK(at != applied.end(), "more instances than a pool may have");
  }
  const bool is_partial = lacks_log || (has_left && is_fed && loaded < expected);
  const bool is_known = !lacks_log && recorded >= expected && recorded > 0;
  at->is_partial.store(is_partial, std::memory_order_release);
  at->version.store(is_known ? lowest : 0, std::memory_order_release);
  at->instance.store(instance, std::memory_order_release);
}

bool Tables::Impl::is_unread(uint32_t instance, uint64_t partition) const {
  const auto at = unread.find(instance);
  return at != unread.end() && has_bit(at->second, partition);
}

void Tables::count_partitions(std::span<const uint64_t> partitions) {
  {
    const std::lock_guard lock(impl_->applied_mutex);
    impl_->counted.assign(partitions.begin(), partitions.end());
  }
  for (const pool::InstanceRecord& instance : impl_->pool->instances())
    impl_->refresh_applied(instance.id);
}

void Tables::set_unread(uint32_t instance, std::span<const uint64_t> partitions) {
  {
    const std::lock_guard lock(impl_->applied_mutex);
    impl_->unread[instance].assign(partitions.begin(), partitions.end());
  }
  impl_->refresh_applied(instance);
}

Status Tables::record_progress(std::span<const pool::Progress> all,
                               std::span<const pool::Commit> commits) {
  Flusher flusher(impl_->pool->medium());
  if (!commits.empty()) {
    const Result<bool> changed = impl_->pool->write_clocks(commits, flusher);
    if (!changed.ok()) return changed.status();
    if (changed.value()) PETPS_RETURN_IF_ERROR(flusher.drain(Site::kClocked));
  }
  PETPS_RETURN_IF_ERROR(impl_->pool->write_progress(all, flusher));
  PETPS_RETURN_IF_ERROR(flusher.drain(Site::kProgressed));
  std::set<uint32_t> instances;
  for (const pool::Progress& progress : all) instances.insert(progress.instance);
  for (const uint32_t instance : instances) impl_->refresh_applied(instance);
  return Status();
}

uint64_t Tables::applied_version(uint32_t instance) const {
  for (const Applied& applied : impl_->applied) {
    if (applied.instance.load(std::memory_order_acquire) != instance) continue;
    const uint64_t version = applied.version.load(std::memory_order_acquire);
    // The place may have gone to another instance between the two loads.
    if (applied.instance.load(std::memory_order_acquire) == instance) return version;
  }
  return 0;
}

bool Tables::is_partial(uint32_t instance) const {
  const auto at = std::ranges::find_if(impl_->applied, [&](const Applied& place) {
    return place.instance.load(std::memory_order_acquire) == instance;
  });
  return at != impl_->applied.end() && at->is_partial.load(std::memory_order_acquire);
}

Lack Tables::lack_of(uint32_t instance, uint32_t partition) const {
  if (!is_partial(instance)) return Lack::kNone;
  const pool::Names names = impl_->pool->names();
  const auto record = std::ranges::find(names.instances, instance, &pool::InstanceRecord::id);
  if (record == names.instances.end()) return Lack::kNone;  // dropped
  const bool has_left = is_past(names, *record);
  {
    const std::lock_guard lock(impl_->applied_mutex);
    if (impl_->is_unread(instance, partition)) return has_left ? Lack::kCameLater : Lack::kUnread;
  }
  if (!has_left) return Lack::kNone;
  const auto progress = impl_->pool->read_progress(instance, partition);
  return progress.has_value() && pool::has_applied(*progress) ? Lack::kNone : Lack::kCameLater;
}

// ---- background ----

void Tables::Impl::walk() {
  std::lock_guard lock(walk_mutex);
  if (walked.load(std::memory_order_acquire)) return;
  // Do not free anything that the walk finds while such a process may read it.
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(kReclaimPatienceMs);
  while (read_since_a_kill()) {
    if (stopping.load() || std::chrono::steady_clock::now() > deadline) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  pool->hold_free_extents(false);
  for (const TablePointer& table : list_tables()) table->impl().walk();
  walked.store(true, std::memory_order_release);
}

void Tables::Impl::wake() {
  std::lock_guard lock(wake_mutex);
  work_waits = true;
  wake_signal.notify_one();
}

void Tables::Impl::start_background() {
  runs_background = true;
  thread = std::thread([this] { background(); });
}

void Tables::Impl::stop_background() {
  stopping.store(true);
  wake();
  if (thread.joinable()) thread.join();
  stopping.store(false);
}

void Tables::Impl::background() {
  {
    // Leave the processors to the first pulls after a restart. A writer that needs the walk does
    // not wait for this thread.
    std::unique_lock lock(wake_mutex);
    wake_signal.wait_for(lock, kWalkDelay, [this] { return stopping.load(); });
  }
  if (stopping.load()) return;
  walk();
  while (!stopping.load()) {
    if (!walked.load(std::memory_order_acquire)) walk();
    {
      std::unique_lock lock(wake_mutex);
      wake_signal.wait_for(lock, kBackgroundPause, [this] { return work_waits; });
      work_waits = false;
    }
    if (stopping.load()) return;
    epochs.reclaim();
    for (const TablePointer& table : list_tables()) {
      Table::Impl& t = table->impl();
      std::vector<uint64_t> hot;
      {
        std::lock_guard lock(t.hot_mutex);
        hot.swap(t.hot_keys);
      }
      // A failed drain has made the pool read-only, and every writer reports that; ignore it
      // here.
      if (!hot.empty() && !pool->medium().failed()) static_cast<void>(t.migrate(hot).ok());
      t.finish_growing();
      if (Heat* const heat = t.heat.load(); heat != nullptr) heat->settle();
      const bool lost_many =
          t.erased.load(std::memory_order_relaxed) > t.index().rows() / kRehomeShare;
      if (lost_many && t.index().displaced() > 0 && !pool->medium().failed())
        static_cast<void>(t.rehome().ok());
      uint64_t lowered = 0;
      for (int i = 0; i < kRecountSteps && t.wants_recount() && !stopping.load(); ++i) {
        if (t.recount_step(&lowered)) break;  // complete, or without memory until the next pause
      }
    }
  }
}

}  // namespace petps::table
