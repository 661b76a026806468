#include "driver.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <iterator>
#include <mutex>
#include <thread>

#include "base/check.h"
#include "table/impl.h"

namespace petps::crash {

using base::Status;
using media::Site;
using table::Tables;

const char* site_name(Site site) {
  static constexpr const char* kNames[] = {"kRow",
                                           "kRowHeader",
                                           "kRaisedCounter",
                                           "kEntry",
                                           "kErasedEntry",
                                           "kProgress",
                                           "kProgressMark",
                                           "kClock",
                                           "kSuperblock",
                                           "kExtentRecord",
                                           "kReusedExtent",
                                           "kJournal",
                                           "kMovedEntry",
                                           "kVacatedEntry",
                                           "kFreeMap",
                                           "kBucketWord",
                                           "kAdoptedMetadata",
                                           "kAdoptedBucket",
                                           "kAdoptedPath",
                                           "kFilled",
                                           "kPublished",
                                           "kProgressed",
                                           "kProgressMarked",
                                           "kClocked",
                                           "kSuperblockDrain",
                                           "kExtentRecordDrain",
                                           "kJournalDrain",
                                           "kMovedDrain",
                                           "kVacatedDrain",
                                           "kCloseDrain",
                                           "kCopiedDrain",
                                           "kAdoptedDrain",
                                           "kAdoptedSync",
                                           "kSuperblockSync",
                                           "kNewTableSync",
                                           "kGrownSync",
                                           "kReusedSync",
                                           "kPowerSync",
                                           "kCloseSync"};
  static_assert(std::size(kNames) == kSites, "a name for each site, in the order of media::Site");
  return kNames[static_cast<size_t>(site)];
}

bool History::has(const std::string& table, uint64_t key, uint64_t value) const {
  const auto rows = of_table_.find(table);
  if (rows != of_table_.end() && rows->second.contains({key, value})) return true;
  return earlier_ != nullptr && earlier_->has(table, key, value);
}

void Driver::step(const std::string& name, const std::function<Status()>& act,
                  const std::function<void(World*)>& expect) {
  if (!problem.empty()) return;
  step_name = name;
  if (listener != nullptr) listener->before_step(*this);
  const Status status = act();
  World after = world;
  expect(&after);
  if (!status.ok() && !expects_failure && problem.empty())
    problem = name + " failed: " + status.to_string();
  if (listener != nullptr) listener->after_step(*this, status, after);
  if (status.ok()) world = std::move(after);
}

void Driver::adopt(const World& observed) {
  world = observed;
  for (TableWorld& table : world.tables) std::fill(table.written.begin(), table.written.end(), 0);
}

std::vector<World> Driver::reverted_worlds(const World& now) const {
  std::vector<World> worlds;
  for (const World& earlier : killed_from) worlds.push_back(reverted_to(earlier, now));
  return worlds;
}

void Driver::kill_before_drain(size_t drain, bool seen, const std::function<void()>& perform) {
  medium_->settle();
  const World before = world;
  perform();
  PETPS_CHECK(problem.empty() && drain < medium_->drains().size(),
              "a step to be killed has fewer drains");
  drop();
  medium_->kill(medium_->drains()[drain]);
  if (!seen) world = before;
  killed_from = reverted_worlds(before);
  killed_from.push_back(before);
  adopt(World(world));
}

void Driver::format() {
  auto medium = medium_->media(kMetadataBytes);
  medium->set_durability(durability);
  world.durability = durability;
  auto pool = pool::Pool::format(std::move(medium), pool::kTestUnitBytes);
  PETPS_CHECK(pool.ok(), pool.status().to_string());
  PETPS_CHECK(pool.value()->create_instance("model", "model@1", 3).ok(),
              "an empty pool must accept an instance");
  world.instances.insert("model@1");
  auto attached = Tables::attach(std::move(pool).value(), /*background=*/false);
  PETPS_CHECK(attached.ok(), attached.status().to_string());
  tables = std::move(attached).value();
}

void Driver::open() {
  step(
      "open",
      [this]() -> Status {
        drop();
        auto pool = pool::Pool::attach(medium_->media());
        if (!pool.ok()) return pool.status();
        auto attached = Tables::attach(std::move(pool).value(), /*background=*/false);
        if (!attached.ok()) return attached.status();
        tables = std::move(attached).value();
        return Status();
      },
      [](World* w) { w->closed = false; });
}

void Driver::close() {
  step(
      "close", [this] { return tables->close(); }, [](World* w) { w->closed = true; });
}

void Driver::walk() {
  if (problem.empty() && tables != nullptr) tables->walk();
}

void Driver::create_instance(const std::string& name) {
  step(
      "create_instance", [&] { return tables->pool().create_instance("model", name, 3).status(); },
      [&](World* w) {
        w->aliases.try_emplace("model", Alias{"model@1", ""});  // before, there was one instance
        w->instances.insert(name);
      });
}

void Driver::drop_instance(const std::string& name) {
  const uint32_t id = problem.empty() ? tables->resolve(name).value().id : 0;
  step(
      "drop_instance", [&] { return tables->drop_instance(id); },
      [&](World* w) {
        w->instances.erase(name);
        w->frozen.erase(name);
        std::erase_if(w->tables, [&](const TableWorld& t) { return t.shape->instance == name; });
        std::erase_if(w->progress, [&](const auto& entry) { return entry.first.first == id; });
        for (auto& [name_of_alias, alias] : w->aliases) {
          if (alias.previous == name) alias.previous = "";
        }
      });
}

void Driver::create_table(std::shared_ptr<const Shape> shape) {
  step(
      "create_table",
      [&] {
        pool::TableSpec spec = shape->spec;
        spec.instance = tables->resolve(shape->instance).value().id;
        return tables->create_table(spec).status();
      },
      [&](World* w) { w->tables.emplace_back(shape); });
}

void Driver::drop_table(const std::string& name) {
  const uint32_t id = problem.empty() ? table(name).id() : 0;
  step(
      "drop_table", [&] { return tables->drop_table(id); },
      [&](World* w) {
        std::erase_if(w->tables, [&](const TableWorld& t) { return t.shape->spec.name == name; });
      });
}

void Driver::set_feed(const std::string& name, pool::Feed feed) {
  step(
      "set_feed", [&] { return tables->pool().set_feed(table(name).id(), feed); },
      [&](World* w) { w->find(name)->feed = feed; });
}

void Driver::set_alias(const std::string& alias, const std::string& instance) {
  step(
      "set_alias",
      [&] { return tables->pool().set_alias(alias, tables->resolve(instance).value().id); },
      [&](World* w) { w->switch_alias(alias, instance); });
}

void Driver::set_durability(media::Durability to) {
  step(
      "set_durability", [&] { return tables->pool().set_durability(to); },
      [&](World* w) { w->durability = to; });
}

void Driver::record_progress(const std::vector<pool::Progress>& all) {
  step(
      "record_progress of " + std::to_string(all.size()),
      [&] { return tables->record_progress(all); },
      [&](World* w) {
        for (const pool::Progress& progress : all)
          w->progress[{progress.instance, progress.partition}] = progress;
      });
}

Status Driver::write(const std::string& name, const std::vector<Change>& changes, bool is_group) {
  table::Table& target = table(name);
  const size_t bytes = target.record().spec.row_bytes;
  std::vector<uint64_t> keys;
  std::vector<uint8_t> deleted;
  std::vector<uint32_t> stamps;
  std::vector<std::byte> rows(changes.size() * bytes);
  for (const Change& change : changes) history.add(name, change.key, change.value);
  for (size_t i = 0; i < changes.size(); ++i) {
    keys.push_back(changes[i].key);
    stamps.push_back(static_cast<uint32_t>(changes[i].value));
    deleted.push_back(changes[i].value == 0 ? 1 : 0);
    if (changes[i].value != 0)
      write_row(changes[i].key, changes[i].value, rows.data() + i * bytes, bytes);
  }
  table::Batch batch;
  batch.keys = keys;
  batch.rows = rows.data();
  batch.deleted = deleted;
  uint64_t refused = 0;
  if (is_group) {
    table::Batch rest = batch;
    const size_t half = keys.size() / 2;
    batch.keys = batch.keys.first(half);
    batch.deleted = batch.deleted.first(half);
    rest.keys = rest.keys.subspan(half);
    rest.deleted = rest.deleted.subspan(half);
    rest.rows += half * bytes;
    const std::array<table::Batch, 2> both = {batch, rest};
    std::array<table::ApplyReport, 2> reports;
    PETPS_RETURN_IF_ERROR(target.apply_together(both, reports));
    refused = reports[0].refused + reports[1].refused;
  } else {
    batch.stamps = stamps;
    const auto report = target.apply(batch);
    if (!report.ok()) return report.status();
    refused = report.value().refused;
  }
  PETPS_CHECK(refused == 0, "a scenario wrote more keys than its table holds");
  return Status();
}

void Driver::apply(const std::string& name, const std::vector<Change>& changes) {
  step(
      "apply", [&] { return write(name, changes, /*is_group=*/false); },
      [&](World* w) {
        for (const Change& change : changes) w->find(name)->write(change.key, change.value);
      });
}

void Driver::push_full(const std::string& name, size_t inserts, size_t updates,
                       table::WhenFull rule, bool is_group) {
  if (!problem.empty()) return;
  const std::vector<Change> changes = choose_changes(name, inserts, updates, 0);
  const TableWorld& known = *world.find(name);
  const Shape& shape = *known.shape;
  inserts = std::min(inserts, static_cast<size_t>(std::ranges::count(known.values, 0u)));
  std::vector<const std::byte*> rows(shape.keys.size());
  const auto count_rows = [&] {
    table(name).lookup(shape.keys, rows.data());
    return rows.size() - static_cast<size_t>(std::ranges::count(rows, nullptr));
  };
  const auto act = [&]() -> Status {
    PETPS_RETURN_IF_ERROR(tables->set_when_full(table(name).id(), rule));
    table(name).note_pulled(shape.keys);
    const size_t before = count_rows();
    PETPS_RETURN_IF_ERROR(write(name, changes, is_group));
    const size_t expected = std::min<size_t>(before + inserts, shape.spec.capacity);
    if (count_rows() == expected) return Status();
    return Status(base::Code::kInternal, "an eviction left " + std::to_string(count_rows()) +
                                             " rows, not " + std::to_string(expected));
  };
  step("push_full", act, [&](World* w) {
    TableWorld& target = *w->find(name);
    count_rows();
    // The table chose which rows go. Those of the batch stay, whatever it chose.
    for (size_t i = 0; i < rows.size(); ++i) {
      if (rows[i] == nullptr && target.values[i] != 0) target.write(shape.keys[i], 0);
    }
    for (const Change& change : changes) target.write(change.key, change.value);
  });
}

void Driver::commit(const std::vector<uint32_t>& partitions, uint64_t second) {
  constexpr uint64_t kFirst = uint64_t{1'700'000'000} * pool::kNsPerSecond;
  const uint64_t version = next_value();
  next_value();
  std::vector<pool::Progress> all;
  std::vector<pool::Commit> commits;
  for (const uint32_t partition : partitions) {
    all.push_back({1, partition, 1, version, 0, version + 1});
    // Two versions of a partition, as in one window of ingest.
    commits.push_back({1, partition, version, kFirst + second * pool::kNsPerSecond});
    commits.push_back({1, partition, version + 1, kFirst + second * pool::kNsPerSecond + 1});
  }
  step(
      "commit", [&] { return tables->record_progress(all, commits); },
      [&](World* w) {
        for (const pool::Progress& progress : all) w->progress[{1, progress.partition}] = progress;
        for (const pool::Commit& commit : commits) {
          for (TableWorld& table : w->tables) {
            if (table.expire_after > 0 && table.feed == pool::Feed::kDelta)
              table.clocks[commit.partition].commit(commit.version, commit.time_ns);
          }
        }
      });
}

void Driver::expire(const std::string& name) {
  step(
      "expire",
      [&] {
        return table(name).expire({false, nullptr}).status();
      },
      [&](World* w) { w->find(name)->delete_expired(); });
}

void Driver::scrub(const std::string& name, size_t rows) {
  const std::vector<Change> removed = random_changes(name, 0, 0, rows);
  const auto damage = [&]() -> Status {
    table::Table::Impl& target = table(name).impl();
    media::Flusher flusher(target.pool.medium());
    for (const Change& change : removed) {
      pool::SlotHeader* const at = target.slots.header(target.index().find_one(change.key).ref);
      pool::SlotHeader header = *at;
      header.crc ^= 1;
      flusher.copy(at, &header, sizeof header, Site::kRowHeader);
    }
    return flusher.drain(Site::kFilled);
  };
  step("damage", damage, [&](World* w) { w->find(name)->damaged += removed.size(); });
  const auto act = [&]() -> Status {
    table::ScrubCursor cursor;
    std::vector<table::DamagedRow> found;
    for (bool complete = false; !complete;) {
      const auto one = table(name).scrub(&cursor, 1 << 12);
      if (!one.ok()) return one.status();
      found.insert(found.end(), one.value().damaged.begin(), one.value().damaged.end());
      complete = one.value().complete;
    }
    const auto count = table(name).remove_damaged(found);
    if (!count.ok()) return count.status();
    PETPS_CHECK(count.value() == removed.size(), "scrubbing removed other rows than the damaged");
    return Status();
  };
  step("scrub", act, [&](World* w) {
    for (const Change& change : removed) w->find(name)->write(change.key, 0);
  });
}

void Driver::set_expiry(const std::string& name, uint32_t seconds) {
  step(
      "set_expiry", [&] { return tables->set_expiry(table(name).id(), seconds); },
      [&](World* w) { w->find(name)->set_expiry(seconds); });
}

void Driver::migrate(const std::string& name, const std::vector<uint64_t>& hot) {
  step(
      "migrate", [&] { return table(name).migrate(hot).status(); }, [](World*) {});
}

void Driver::rehome(const std::string& name) {
  step(
      "rehome", [&] { return table(name).rehome().status(); }, [](World*) {});
}

void Driver::recount(const std::string& name) {
  step(
      "recount", [&] { return table(name).recount().status(); }, [](World*) {});
}

// A growth in a thread of its own, which runs only while advance() waits for it.
class Driver::Growth {
 public:
  Growth(table::Table& table, uint64_t capacity) {
    table::GrowOptions options{capacity, false, [this](uint64_t, uint64_t) { return pause(); }};
    thread_ = std::thread([this, &table, options] {
      wait_for_turn();
      result_ = table.grow(options);
      const std::lock_guard lock(mutex_);
      runs_ = false;
      ended_ = true;
      signal_.notify_all();
    });
  }
  ~Growth() {
    cancelled_ = true;
    while (!ended_) static_cast<void>(advance());
    thread_.join();
  }
  // Let it run to its next pause or its end.
  Status advance() {
    std::unique_lock lock(mutex_);
    runs_ = true;
    signal_.notify_all();
    signal_.wait(lock, [&] { return !runs_; });
    return result_;
  }
  bool ended() const { return ended_; }

 private:
  void wait_for_turn() {
    std::unique_lock lock(mutex_);
    signal_.wait(lock, [&] { return runs_; });
  }
  bool pause() {
    {
      const std::lock_guard lock(mutex_);
      runs_ = false;
      signal_.notify_all();
    }
    wait_for_turn();
    return !cancelled_;
  }

  std::mutex mutex_;
  std::condition_variable signal_;
  bool runs_ = false;
  bool ended_ = false;
  bool cancelled_ = false;
  Status result_;
  std::thread thread_;
};

void Driver::shrink() {
  step(
      "shrink", [&] { return tables->pool().shrink(nullptr).status(); }, [](World*) {});
}

void Driver::grow(const std::string& name, uint64_t capacity, const std::function<void()>& between,
                  const std::function<void()>& behind) {
  if (!problem.empty()) return;
  epoch::Reader* const reader = behind ? tables->epochs().lease() : nullptr;
  if (reader != nullptr) pin_ = reader->pin();
  const uint64_t parts = table::kBucketsCopied;
  const uint64_t buckets = table(name).impl().index().bucket_count();
  const uint64_t copies = (buckets + parts - 1) / parts;
  growth_ = std::make_shared<Growth>(table(name), capacity);
  for (uint64_t part = 0; part <= copies && !growth_->ended(); ++part) {
    const bool is_last = part == copies;
    step(
        "grow, part " + std::to_string(part),
        [&] {
          const Status status = growth_->advance();
          const bool ends = is_last && !behind;
          PETPS_CHECK(!status.ok() || growth_->ended() == ends, "the parts of a growth");
          return status;
        },
        [&](World* w) {
          if (!is_last) return;
          TableWorld& grown = *w->find(name);
          auto shape = std::make_shared<Shape>(*grown.shape);
          shape->spec.capacity = capacity;
          grown.shape = shape;
        });
    if (problem.empty() && !is_last && !growth_->ended()) between();
    if (!problem.empty()) break;
  }
  if (behind && problem.empty() && !growth_->ended()) behind();
  pin_.drop();
  if (reader != nullptr && tables != nullptr) tables->epochs().release(reader);
  while (problem.empty() && !growth_->ended()) static_cast<void>(growth_->advance());
  growth_.reset();
}

table::Table& Driver::table(const std::string& name) {
  for (const table::TablePointer& t : tables->tables()) {
    if (t->record().spec.name == name) return *t;
  }
  PETPS_CHECK(false, "a scenario names a table that does not exist");
  std::abort();
}

std::vector<Change> Driver::random_changes(const std::string& name, size_t inserts, size_t updates,
                                           size_t deletions) {
  if (!problem.empty()) return {};  // no further step is performed
  const TableWorld& target = *world.find(name);
  // Keep within capacity without counting on the room that this batch's deletions make.
  const auto absent = static_cast<size_t>(std::ranges::count(target.values, 0u));
  const size_t present = target.values.size() - absent;
  const size_t room = static_cast<size_t>(target.shape->spec.capacity) - present;
  return choose_changes(name, std::min(inserts, room), updates, deletions);
}

std::vector<Change> Driver::choose_changes(const std::string& name, size_t inserts, size_t updates,
                                           size_t deletions) {
  const TableWorld& target = *world.find(name);
  std::vector<size_t> present;
  std::vector<size_t> absent;
  for (size_t i = 0; i < target.values.size(); ++i)
    (target.values[i] != 0 ? present : absent).push_back(i);
  std::shuffle(present.begin(), present.end(), random);
  std::shuffle(absent.begin(), absent.end(), random);
  inserts = std::min(inserts, absent.size());
  updates = std::min(updates, present.size());
  deletions = std::min(deletions, present.size() - updates);
  std::vector<Change> changes;
  for (size_t i = 0; i < inserts; ++i)
    changes.push_back({target.shape->keys[absent[i]], next_value()});
  for (size_t i = 0; i < updates; ++i)
    changes.push_back({target.shape->keys[present[i]], next_value()});
  for (size_t i = 0; i < deletions; ++i)
    changes.push_back({target.shape->keys[present[updates + i]], 0});
  std::shuffle(changes.begin(), changes.end(), random);
  return changes;
}

pool::TableSpec table_spec(const std::string& name, uint64_t capacity, uint32_t row_bytes,
                           bool with_default) {
  pool::TableSpec spec;
  spec.name = name;
  spec.dim = row_bytes / 4;
  spec.row_bytes = row_bytes;
  spec.capacity = capacity;
  if (with_default) {
    spec.default_row.resize(row_bytes);
    write_row(0, 77, spec.default_row.data(), row_bytes);
  }
  return spec;
}

namespace {

// Return a table with `chosen` random keys for which `is_chosen` is true, and `others` random keys.
std::shared_ptr<const Shape> make_shape(const pool::TableSpec& spec, size_t chosen, size_t others,
                                        uint64_t seed,
                                        const std::function<bool(uint64_t)>& is_chosen) {
  auto shape = std::make_shared<Shape>();
  shape->spec = spec;
  shape->instance = "model@1";
  std::mt19937_64 random(seed);
  while (shape->keys.size() < chosen) {
    const uint64_t key = random();
    if (is_chosen(key)) shape->keys.push_back(key);
  }
  for (size_t i = 0; i < others; ++i) shape->keys.push_back(random());
  std::sort(shape->keys.begin(), shape->keys.end());
  return shape;
}

}  // namespace

std::shared_ptr<const Shape> shape_of(const pool::TableSpec& spec, size_t keys, uint64_t seed) {
  return make_shape(spec, 0, keys, seed, [](uint64_t) { return true; });
}

std::shared_ptr<const Shape> crowded_shape(const pool::TableSpec& spec, size_t keys, size_t others,
                                           uint64_t seed) {
  // A scratch pool shows how many buckets the table gets and which bucket is a key's home.
  media::SimulatedMedium scratch(kMediumBytes);
  auto pool = pool::Pool::format(scratch.media(kMetadataBytes), pool::kTestUnitBytes);
  PETPS_CHECK(pool.ok() && pool.value()->create_instance("model", "model@1", 1).ok(),
              "a scratch pool");
  pool::TableSpec named = spec;
  named.instance = 1;
  const auto record = pool.value()->create_table(named);
  PETPS_CHECK(record.ok(), record.status().to_string());
  const index::Index index(*pool.value(), record.value().bucket_offset,
                           record.value().bucket_count);
  return make_shape(spec, keys, others, seed,
                    [&](uint64_t key) { return index.path_of(key).home == 0; });
}

}  // namespace petps::crash
