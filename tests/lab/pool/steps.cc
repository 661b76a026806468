#include "steps.h"

#include <algorithm>

#include "base/check.h"

namespace petps::lab {

using base::Status;
using crash::Shape;
using crash::TableWorld;
using crash::World;
using table::Tables;

namespace {

table::TablePointer find_table(const Tables& tables, const std::string& name) {
  for (const auto& table : tables.tables()) {
    if (table->record().spec.name == name) return table;
  }
  return nullptr;
}

constexpr uint32_t kPartitions = 3;
constexpr uint64_t kSmallCapacity = 3000;
constexpr uint64_t kWideCapacity = 1200;
constexpr uint64_t kLateCapacity = 400;

// The builder of the list. Most functions add one step and update the expected world.
class Script {
 public:
  Script(uint64_t seed, Regime regime) : regime_(regime), random_(seed) {
    durability_ =
        regime == Regime::kProcess ? media::Durability::kProcess : media::Durability::kPower;
  }

  std::vector<Step> make() {
    create();
    create_instance("model@1");
    create_table("small", "model@1", kSmallCapacity, 64, false);
    create_table("wide", "model@1", kWideCapacity, 512, true);
    write("small", 500, 0, 0);
    write("wide", 200, 0, 0);
    some_writes();
    set_durability(media::Durability::kProcess);
    close_and_open();
    some_writes();
    create_instance("model@2");
    create_table("late", "model@2", kLateCapacity, 128, false);
    write("late", 200, 0, 0);
    set_durability(media::Durability::kPower);
    switch_alias("model@2");
    some_writes();
    switch_alias("model@1");
    write("small", 1200, 200, 100);  // the pool grows by several extents
    drop_instance("model@2");
    close_and_open();
    set_durability(media::Durability::kProcess);
    some_writes();
    close_and_open();
    set_durability(media::Durability::kPower);
    some_writes();
    close();
    return std::move(steps_);
  }

 private:
  void add(const std::string& name, std::function<Status(Live*)> perform) {
    steps_.push_back({name, std::move(perform), world_, durability_, closed_});
  }

  void create() {
    add("create", [](Live* live) {
      auto created = Tables::create(live->options);
      if (created.ok()) live->tables = std::move(created).value();
      return created.status();
    });
  }

  void close_and_open() {
    close();
    closed_ = false;
    add("open", [](Live* live) {
      auto opened = Tables::open(live->options);
      if (!opened.ok()) return opened.status();
      live->tables = std::move(opened).value();
      live->tables->walk();
      return Status();
    });
  }

  void close() {
    closed_ = true;
    add("close", [](Live* live) {
      const Status status = live->tables->close();
      live->tables.reset();
      return status;
    });
  }

  void create_instance(const std::string& name) {
    if (!world_.instances.empty())  // the plain name still refers to the first instance
      world_.aliases.try_emplace("model", crash::Alias{*world_.instances.begin(), ""});
    world_.instances.insert(name);
    add("create_instance " + name, [name](Live* live) {
      return live->tables->pool().create_instance("model", name, kPartitions).status();
    });
  }

  void create_table(const std::string& name, const std::string& instance, uint64_t capacity,
                    uint32_t row_bytes, bool with_default) {
    auto shape = std::make_shared<Shape>();
    shape->spec.name = name;
    shape->spec.dim = row_bytes / 4;
    shape->spec.row_bytes = row_bytes;
    shape->spec.capacity = capacity;
    shape->instance = instance;
    if (with_default) {
      shape->spec.default_row.resize(row_bytes);
      crash::write_row(0, 77, shape->spec.default_row.data(), row_bytes);
    }
    for (uint64_t i = 0; i < capacity; ++i) shape->keys.push_back(random_());
    std::sort(shape->keys.begin(), shape->keys.end());
    world_.tables.emplace_back(shape);
    add("create_table " + name, [shape](Live* live) {
      const auto resolved = live->tables->resolve(shape->instance);
      if (!resolved.ok()) return resolved.status();
      pool::TableSpec spec = shape->spec;
      spec.instance = resolved.value().id;
      return live->tables->create_table(spec).status();
    });
  }

  void switch_alias(const std::string& instance) {
    world_.switch_alias("model", instance);
    add("switch to " + instance, [instance](Live* live) {
      const auto resolved = live->tables->resolve(instance);
      if (!resolved.ok()) return resolved.status();
      return live->tables->pool().set_alias("model", resolved.value().id);
    });
  }

  void drop_instance(const std::string& name) {
    world_.instances.erase(name);
    world_.frozen.erase(name);
    std::erase_if(world_.tables, [&](const TableWorld& t) { return t.shape->instance == name; });
    for (auto& [alias_name, alias] : world_.aliases) {
      if (alias.previous == name) alias.previous = "";
    }
    add("drop " + name, [name](Live* live) {
      const auto resolved = live->tables->resolve(name);
      if (!resolved.ok()) return resolved.status();
      return live->tables->drop_instance(resolved.value().id);
    });
  }

  // Add a step only if the regime is kChanging.
  void set_durability(media::Durability durability) {
    if (regime_ != Regime::kChanging) return;
    durability_ = durability;
    add("set_durability",
        [durability](Live* live) { return live->tables->pool().set_durability(durability); });
  }

  void record_progress() {
    pool::Progress progress;
    progress.instance = 1;
    progress.partition = static_cast<uint32_t>(random_() % kPartitions);
    progress.run = 1;
    progress.seq = ++value_;
    progress.offset = value_;
    progress.version = value_;
    world_.progress[{progress.instance, progress.partition}] = progress;
    add("record_progress",
        [progress](Live* live) { return live->tables->record_progress(progress); });
  }

  void migrate(const std::string& table) {
    std::vector<uint64_t> hot;
    const auto& keys = world_.find(table)->shape->keys;
    for (int i = 0; i < 50; ++i) hot.push_back(keys[random_() % keys.size()]);
    add("migrate " + table, [table, hot](Live* live) {
      const auto target = find_table(*live->tables, table);
      if (target == nullptr) return Status(base::Code::kInternal, "no table " + table);
      return target->migrate(hot).status();
    });
  }

  void write(const std::string& table, size_t inserts, size_t updates, size_t deletions) {
    TableWorld& target = *world_.find(table);
    const auto changes = random_changes(target, inserts, updates, deletions, &value_, &random_);
    expect(&target, changes);
    const auto threads = static_cast<uint32_t>(random_() % 2 + 1);
    add("apply " + table, [table, changes, threads](Live* live) {
      return apply(live->tables.get(), table, changes, threads);
    });
  }

  void some_writes() {
    for (int i = 0; i < 3; ++i) {
      const TableWorld& table = world_.tables[random_() % world_.tables.size()];
      const std::string name = table.shape->spec.name;
      write(name, random_() % 60, random_() % 60, random_() % 30);
    }
    record_progress();
    migrate(random_() % 2 == 0 ? "small" : "wide");
  }

  Regime regime_;
  std::mt19937_64 random_;
  media::Durability durability_;
  bool closed_ = false;
  uint64_t value_ = 0;
  World world_;
  std::vector<Step> steps_;
};

}  // namespace

std::optional<Regime> regime_of(const std::string& name) {
  if (name == "power") return Regime::kPower;
  if (name == "process") return Regime::kProcess;
  if (name == "changing") return Regime::kChanging;
  return std::nullopt;
}

std::vector<Step> make_steps(uint64_t seed, Regime regime) { return Script(seed, regime).make(); }

std::vector<Change> random_changes(const TableWorld& table, size_t inserts, size_t updates,
                                   size_t deletions, uint64_t* value, std::mt19937_64* random) {
  std::vector<size_t> present;
  std::vector<size_t> absent;
  for (size_t i = 0; i < table.values.size(); ++i)
    (table.values[i] != 0 ? present : absent).push_back(i);
  std::shuffle(present.begin(), present.end(), *random);
  std::shuffle(absent.begin(), absent.end(), *random);
  // Deletions in the same batch make no room, because a batch is planned before it is published.
  inserts = std::min(inserts, table.shape->spec.capacity - present.size());
  updates = std::min(updates, present.size());
  deletions = std::min(deletions, present.size() - updates);
  const auto& keys = table.shape->keys;
  std::vector<Change> changes;
  for (size_t i = 0; i < inserts; ++i) changes.push_back({keys[absent[i]], ++*value});
  for (size_t i = 0; i < updates; ++i) changes.push_back({keys[present[i]], ++*value});
  for (size_t i = 0; i < deletions; ++i) changes.push_back({keys[present[updates + i]], 0});
  std::shuffle(changes.begin(), changes.end(), *random);
  return changes;
}

void expect(TableWorld* table, const std::vector<Change>& changes) {
  const auto& keys = table->shape->keys;
  for (const Change& change : changes) {
    const auto at = std::lower_bound(keys.begin(), keys.end(), change.key);
    table->values[static_cast<size_t>(at - keys.begin())] = change.value;
  }
}

Status apply(Tables* tables, const std::string& name, const std::vector<Change>& changes,
             uint32_t threads) {
  const table::TablePointer table = find_table(*tables, name);
  if (table == nullptr) return Status(base::Code::kInternal, "no table " + name);
  const size_t bytes = table->record().spec.row_bytes;
  std::vector<uint64_t> keys;
  std::vector<uint8_t> deleted;
  std::vector<std::byte> rows(changes.size() * bytes);
  for (size_t i = 0; i < changes.size(); ++i) {
    keys.push_back(changes[i].key);
    deleted.push_back(changes[i].value == 0 ? 1 : 0);
    if (changes[i].value != 0)
      crash::write_row(changes[i].key, changes[i].value, rows.data() + i * bytes, bytes);
  }
  table::Batch batch;
  batch.keys = keys;
  batch.rows = rows.data();
  batch.deleted = deleted;
  batch.threads = threads;
  const auto report = table->apply(batch);
  if (!report.ok()) return report.status();
  PETPS_CHECK(report.value().refused == 0, "the batch has more keys than its table takes");
  return Status();
}

}  // namespace petps::lab
