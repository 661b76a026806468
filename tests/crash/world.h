// What a pool must hold: the slow, obvious model of the crash suite.
//
// A World is the acknowledged state. A crash in the middle of one step may leave, key by key and
// record by record, what was before the step or what it makes; check() says which, or what is wrong.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "table/table.h"

namespace petps::crash {

// What never changes of a table: its spec and every key that the scenario may ever use, ascending.
struct Shape {
  pool::TableSpec spec;
  std::string instance;
  std::vector<uint64_t> keys;
};

struct TableWorld {
  std::shared_ptr<const Shape> shape;
  std::vector<uint64_t> values;  // of shape->keys; 0 = the key is not there
  std::vector<uint8_t> written;  // of shape->keys; 1 = acknowledged since the pool was last opened
  pool::Feed feed = pool::Feed::kPush;

  explicit TableWorld(std::shared_ptr<const Shape> of)
      : shape(std::move(of)),
        values(shape->keys.size(), 0),
        written(shape->keys.size(), 0),
        feed(shape->spec.feed) {}
};

using Place = std::pair<uint32_t, uint32_t>;  // instance id, partition

struct Alias {
  std::string instance;
  std::string previous;  // empty: none
  bool operator==(const Alias&) const = default;
};

struct World {
  std::vector<TableWorld> tables;  // in the order they were created; no two of one name
  std::map<std::string, Alias> aliases;
  std::set<std::string> instances;
  std::set<std::string> frozen;  // instances
  std::map<Place, pool::Progress> progress;
  media::Durability durability = media::Durability::kPower;
  bool closed = false;

  TableWorld* find(const std::string& name);
  const TableWorld* find(const std::string& name) const;
  void switch_alias(const std::string& alias, std::string instance);
};

// Fills `row` so that a torn or foreign row is seen without asking anybody.
void write_row(uint64_t key, uint64_t value, std::byte* row, size_t bytes);

// What a crash may leave: instances, aliases, tables, feeds and progress as one of the two worlds has them, each row as any of
// them has it, or as one of `reverted` has it. The same world twice: nothing is under way.
struct Choices {
  const World& before;
  const World& after;
  std::vector<World> reverted = {};
};

// `now` with every key that was not written since it was opened as `then` had it: a killed process had changed it, and the change
// was never drained.
World reverted_to(const World& then, const World& now);

inline constexpr char kOtherCatalogue[] =
    "instances, aliases, tables or feeds are neither as before nor as after";

// Empty when the pool is clean and every thing in it is one of the choices, whole; then *observed is what is there. Else the problem.
std::string check(const table::Tables& tables, const Choices& choices, World* observed);

// Whether a row of `value` was ever written for the key of the table.
using WasWritten = std::function<bool(const std::string& table, uint64_t key, uint64_t value)>;

// Of a pool that lost power and was accepted: its names are as before or as after; each key is absent or
// has a whole row that was written for it at some time; every progress needs a base.
std::string check_accepted(const table::Tables& tables, const Choices& choices,
                           const WasWritten& was_written, World* observed);

// Pulls only: no verify, no catalogue. For a pool that refused a write.
std::string check_rows(const table::Tables& tables, const Choices& choices, World* observed);

}  // namespace petps::crash
