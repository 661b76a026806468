#include "world.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "base/check.h"
#include "base/hash.h"

namespace petps::crash {

namespace {

using table::Table;
using table::Tables;

uint64_t row_word(uint64_t key, uint64_t value, size_t i) {
  return i == 0 ? value : (key * 0x9E3779B97F4A7C15 ^ value * 0xC2B2AE3D27D4EB4F) + i;
}

// Return the value that a whole row of `key` was written with; 0 if the row is torn or another
// key's.
uint64_t value_of(uint64_t key, const std::byte* row, size_t bytes) {
  uint64_t value;
  std::memcpy(&value, row, sizeof value);
  uint64_t different = 0;
  for (size_t i = 1; i < bytes / 8; ++i) {
    uint64_t word;
    std::memcpy(&word, row + i * 8, sizeof word);
    different |= word ^ row_word(key, value, i);
  }
  return different == 0 ? value : 0;
}

bool is_same(const pool::Progress& a, const pool::Progress& b) {
  return a.run == b.run && a.seq == b.seq && a.offset == b.offset && a.version == b.version &&
         a.state == b.state && a.target == b.target;
}

bool has_same_format(const pool::TableSpec& a, const pool::TableSpec& b) {
  return a.dtype == b.dtype && a.dim == b.dim && a.row_bytes == b.row_bytes &&
         a.capacity == b.capacity;
}

// Instances, aliases, tables and their feeds are in one superblock: all old or all new.
bool catalogue_is(const Tables& tables, const World& world) {
  const pool::Pool& pool = const_cast<Tables&>(tables).pool();
  std::set<std::string> instances;
  std::set<std::string> frozen;
  std::map<uint32_t, std::string> names;
  for (const auto& instance : pool.instances()) {
    instances.insert(instance.name);
    if (instance.frozen) frozen.insert(instance.name);
    names[instance.id] = instance.name;
  }
  std::map<std::string, Alias> aliases;
  for (const auto& alias : pool.aliases())
    aliases[alias.name] = {names[alias.instance], names[alias.previous]};
  if (instances != world.instances || frozen != world.frozen || aliases != world.aliases)
    return false;
  const auto records = pool.tables();
  if (records.size() != world.tables.size()) return false;
  for (size_t i = 0; i < records.size(); ++i) {
    const TableWorld& expected = world.tables[i];
    if (records[i].spec.name != expected.shape->spec.name ||
        records[i].spec.feed != expected.feed ||
        records[i].spec.expire_after != expected.expire_after ||
        names[records[i].spec.instance] != expected.shape->instance ||
        !has_same_format(records[i].spec, expected.shape->spec)) {
      return false;
    }
  }
  return true;
}

std::string check_default(const Table& table, const pool::TableSpec& spec) {
  const std::byte* row = table.default_row();
  const bool is_right =
      spec.default_row.empty()
          ? row == nullptr
          : row != nullptr && std::memcmp(row, spec.default_row.data(), spec.row_bytes) == 0;
  return is_right ? "" : "table '" + spec.name + "' has another default row";
}

// Check every key of the shape by batched lookup; store the values found in `observed`.
std::string check_keys(const Table& table, std::span<const TableWorld* const> choices,
                       TableWorld* observed) {
  const Shape& shape = *choices[0]->shape;
  const std::vector<uint64_t>& keys = shape.keys;
  std::vector<const std::byte*> rows(keys.size());
  table.lookup(keys, rows.data());
  for (size_t i = 0; i < keys.size(); ++i) {
    const uint64_t value =
        rows[i] == nullptr ? 0 : value_of(keys[i], rows[i], shape.spec.row_bytes);
    bool allowed = false;
    for (const TableWorld* choice : choices) allowed = allowed || value == choice->values[i];
    if (allowed && (rows[i] != nullptr) == (value != 0)) {
      observed->values[i] = value;
      continue;
    }
    const std::string name = "table '" + shape.spec.name + "' key " + std::to_string(keys[i]);
    if (rows[i] != nullptr && value == 0) return name + " has a torn row";
    std::string expected;
    for (const TableWorld* choice : choices) {
      expected += (expected.empty() ? "" : " or ") + std::to_string(choice->values[i]);
    }
    return name +
           (rows[i] == nullptr ? " is missing" : " has the row of value " + std::to_string(value)) +
           ", expected value " + expected;
  }
  return "";
}

// Check that a scan shows exactly the keys that lookups find, each once.
std::string check_scan(const Table& table, const TableWorld& observed) {
  std::vector<uint64_t> expected;
  for (size_t i = 0; i < observed.values.size(); ++i) {
    if (observed.values[i] != 0) expected.push_back(observed.shape->keys[i]);
  }
  std::vector<uint64_t> scanned = table.scan(0, UINT64_MAX / 2).keys;
  std::sort(scanned.begin(), scanned.end());
  if (scanned == expected) return "";
  return "table '" + observed.shape->spec.name + "': a scan shows " +
         std::to_string(scanned.size()) + " keys, lookups find " + std::to_string(expected.size());
}

std::string check_progress(const Tables& tables, const World& before, const World& after,
                           World* observed) {
  std::map<Place, pool::Progress> all;  // a copy, because *observed may be one of the two worlds
  for (const pool::Progress& progress : const_cast<Tables&>(tables).pool().all_progress()) {
    const Place place{progress.instance, progress.partition};
    const auto old = before.progress.find(place);
    const auto fresh = after.progress.find(place);
    const bool known = (old != before.progress.end() && is_same(old->second, progress)) ||
                       (fresh != after.progress.end() && is_same(fresh->second, progress));
    if (!known) {
      return "progress of partition " + std::to_string(place.second) + " is seq " +
             std::to_string(progress.seq) + ", which no caller wrote last";
    }
    all[place] = progress;
  }
  for (const auto& [place, value] : before.progress) {
    // A dropped instance's progress is dropped with it.
    if (!all.contains(place) && after.progress.contains(place)) {
      return "progress of partition " + std::to_string(place.second) + " is gone";
    }
  }
  observed->progress = std::move(all);
  return "";
}

// Check that each event time is as in one of the two worlds, and not older than the progress that
// covers its commit.
std::string check_clocks(const Tables& tables, const Choices& choices, World* observed) {
  const pool::Pool& pool = const_cast<Tables&>(tables).pool();
  const auto opened = tables.tables();
  for (size_t i = 0; i < opened.size(); ++i) {
    const std::vector<pool::EventClock> clocks = pool.clocks(opened[i]->id());
    TableWorld& seen = observed->tables[i];
    const std::string& name = seen.shape->spec.name;
    if (clocks.size() != seen.shown_clocks().size())
      return "table '" + name + "' has " + std::to_string(clocks.size()) + " event times";
    const uint32_t instance = opened[i]->record().spec.instance;
    for (uint32_t p = 0; p < clocks.size(); ++p) {
      const auto is_as_in = [&](const World& world) {
        const TableWorld* of = world.find(name);
        return of != nullptr && of->expire_after == seen.expire_after && of->clocks[p] == clocks[p];
      };
      const auto old = choices.before.progress.find({instance, p});
      const auto now = observed->progress.find({instance, p});
      const bool is_covered =
          now != observed->progress.end() &&
          (old == choices.before.progress.end() || !is_same(old->second, now->second));
      if (is_as_in(choices.after) || (!is_covered && is_as_in(choices.before))) continue;
      return "table '" + name + "': the event time of partition " + std::to_string(p) +
             " is that of version " + std::to_string(clocks[p].version) +
             (is_covered ? ", older than the progress" : ", which no step left");
    }
    if (!clocks.empty()) seen.clocks = clocks;
  }
  return "";
}

// Like check_keys, for a pool that lost power.
std::string check_old_keys(const Table& table, const WasWritten& was_written,
                           TableWorld* observed) {
  const Shape& shape = *observed->shape;
  std::vector<const std::byte*> rows(shape.keys.size());
  table.lookup(shape.keys, rows.data());
  for (size_t i = 0; i < shape.keys.size(); ++i) {
    observed->values[i] = 0;
    if (rows[i] == nullptr) continue;
    const uint64_t value = value_of(shape.keys[i], rows[i], shape.spec.row_bytes);
    if (value == 0 || !was_written(shape.spec.name, shape.keys[i], value)) {
      return "table '" + shape.spec.name + "' key " + std::to_string(shape.keys[i]) +
             (value == 0 ? " has a torn row"
                         : " has a row of value " + std::to_string(value) +
                               ", which was never written to this table");
    }
    observed->values[i] = value;
  }
  return "";
}

std::string check_lowered_progress(const Tables& tables, const Choices& choices, World* observed) {
  observed->progress.clear();
  for (const pool::Progress& progress : const_cast<Tables&>(tables).pool().all_progress()) {
    const Place place{progress.instance, progress.partition};
    const std::string name = "progress of partition " + std::to_string(place.second);
    if (progress.state != pool::ProgressState::kLostPower || progress.version != 0 ||
        progress.seq != 0)
      return name + " does not need a base";
    if (!choices.before.progress.contains(place) && !choices.after.progress.contains(place))
      return name + " was never recorded";
    observed->progress[place] = progress;
  }
  return "";
}

}  // namespace

std::string check_accepted(const Tables& tables, const Choices& choices,
                           const WasWritten& was_written, World* observed) {
  const bool is_new = catalogue_is(tables, choices.after);
  if (!is_new && !catalogue_is(tables, choices.before)) return kOtherCatalogue;
  World seen = is_new ? choices.after : choices.before;
  seen.closed = false;
  const auto opened = tables.tables();
  for (size_t i = 0; i < opened.size(); ++i) {
    TableWorld& table = seen.tables[i];
    std::string problem = check_old_keys(*opened[i], was_written, &table);
    if (problem.empty()) problem = check_scan(*opened[i], table);
    if (problem.empty()) problem = check_default(*opened[i], table.shape->spec);
    if (!problem.empty()) return problem;
    const auto clocks = const_cast<Tables&>(tables).pool().clocks(opened[i]->id());
    if (!clocks.empty()) table.clocks = clocks;  // perhaps older
  }
  const std::string problem = check_lowered_progress(tables, choices, &seen);
  *observed = std::move(seen);
  return problem;
}

void TableWorld::write(uint64_t key, uint64_t value) {
  const auto at = std::lower_bound(shape->keys.begin(), shape->keys.end(), key);
  PETPS_CHECK(at != shape->keys.end() && *at == key, "a key that the table's shape does not name");
  values[static_cast<size_t>(at - shape->keys.begin())] = value;
  written[static_cast<size_t>(at - shape->keys.begin())] = 1;
}

void TableWorld::set_expiry(uint32_t seconds) {
  const uint64_t cell = pool::EventClock::cell_of(seconds);
  if (clocks.empty() && seconds > 0) clocks.resize(feed == pool::Feed::kPush ? 1 : 3);
  for (pool::EventClock& clock : clocks) {
    if (seconds == 0) continue;
    if (expire_after == 0) {
      clock.forget(cell);
    } else {
      clock.change_cell(cell);
    }
  }
  expire_after = seconds;
}

std::vector<pool::EventClock> TableWorld::shown_clocks() const {
  return expire_after == 0 ? std::vector<pool::EventClock>() : clocks;
}

void TableWorld::delete_expired() {
  for (size_t i = 0; i < values.size(); ++i) {
    const uint64_t key = shape->keys[i];
    const size_t p = base::partition_hash(key) % clocks.size();
    if (values[i] != 0 && clocks[p].expires(static_cast<uint32_t>(values[i]))) write(key, 0);
  }
}

TableWorld* World::find(const std::string& name) {
  for (TableWorld& table : tables) {
    if (table.shape->spec.name == name) return &table;
  }
  return nullptr;
}

const TableWorld* World::find(const std::string& name) const {
  return const_cast<World*>(this)->find(name);
}

void World::switch_alias(const std::string& alias, std::string instance) {
  Alias& record = aliases[alias];
  if (record.instance == instance) return;
  const std::string left = record.instance;
  record = {instance, left};
  frozen.erase(instance);
  const bool has_alias = std::any_of(aliases.begin(), aliases.end(),
                                     [&](const auto& a) { return a.second.instance == left; });
  if (!left.empty() && !has_alias) frozen.insert(left);
}

void write_row(uint64_t key, uint64_t value, std::byte* row, size_t bytes) {
  for (size_t i = 0; i < bytes / 8; ++i) {
    const uint64_t word = row_word(key, value, i);
    std::memcpy(row + i * 8, &word, 8);
  }
}

World reverted_to(const World& then, const World& now) {
  World world = now;
  for (TableWorld& table : world.tables) {
    const TableWorld* earlier = then.find(table.shape->spec.name);
    for (size_t i = 0; earlier != nullptr && i < table.values.size(); ++i) {
      if (table.written[i] == 0) table.values[i] = earlier->values[i];
    }
  }
  return world;
}

std::string check_rows(const Tables& tables, const Choices& choices, World* observed) {
  const auto opened = tables.tables();
  for (size_t i = 0; i < opened.size(); ++i) {
    std::vector<const TableWorld*> worlds;
    const std::string& name = opened[i]->record().spec.name;
    const auto add = [&](const World& world) {
      if (world.find(name) != nullptr) worlds.push_back(world.find(name));
    };
    add(choices.before);
    add(choices.after);
    for (const World& world : choices.reverted) add(world);
    TableWorld seen = observed->tables[i];
    std::string problem = check_keys(*opened[i], worlds, &seen);
    if (problem.empty()) problem = check_scan(*opened[i], seen);
    if (problem.empty()) problem = check_default(*opened[i], seen.shape->spec);
    if (!problem.empty()) return problem;
    if (opened[i]->status().damaged_slots > seen.damaged)
      return "table '" + name + "' released a slot that was no row's, or released it twice";
    // Rows that had gone for others may revert after a kill; otherwise no crash brings them back.
    const auto absent = static_cast<uint64_t>(std::ranges::count(seen.values, 0u));
    if (choices.reverted.empty() && seen.values.size() - absent > seen.shape->spec.capacity)
      return "table '" + name + "' has more rows than its capacity";
    observed->tables[i] = std::move(seen);
  }
  return "";
}

std::string check(const Tables& tables, const Choices& choices, World* observed) {
  const table::VerifyReport report = tables.verify();
  uint64_t damaged = 0;
  for (const TableWorld& table : choices.after.tables) damaged += table.damaged;
  const bool are_damaged_rows =
      report.problem_count <= damaged &&
      std::ranges::all_of(report.problems, [](const std::string& problem) {
        return problem.find("has a row whose checksum fails") != std::string::npos;
      });
  if (!report.clean() && !are_damaged_rows) {
    return "verify found " + std::to_string(report.problem_count) +
           " problems, the first: " + report.problems.front();
  }
  if (tables.walked() && report.stale_tags != 0) return "stale tags are left after the walk";
  if (tables.walked() && report.unreachable_slots > damaged) {
    return std::to_string(report.unreachable_slots) + " slots are lost after the walk";
  }
  const bool is_new = catalogue_is(tables, choices.after);
  if (!is_new && !catalogue_is(tables, choices.before)) {
    return kOtherCatalogue;
  }
  World seen = is_new ? choices.after : choices.before;
  std::string problem = check_rows(tables, choices, &seen);
  if (problem.empty()) problem = check_progress(tables, choices.before, choices.after, &seen);
  if (problem.empty()) problem = check_clocks(tables, choices, &seen);
  *observed = std::move(seen);
  return problem;
}

}  // namespace petps::crash
