// What a pool must hold: the slow, obvious model of the crash suite.
//
// A World is the acknowledged state. A crash in the middle of a step may leave, for each key and
// each record, the content before or after the step. check() reports which one, or what is wrong.
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

// The constant parts of a table: its spec and every key that the scenario may ever use,
// ascending.
struct Shape {
  pool::TableSpec spec;
  std::string instance;
  std::vector<uint64_t> keys;
};

struct TableWorld {
  std::shared_ptr<const Shape> shape;
  std::vector<uint64_t> values;  // of shape->keys; 0 = the key is absent
  std::vector<uint8_t> written;  // of shape->keys; 1 = acknowledged since the pool was last opened
  pool::Feed feed = pool::Feed::kPush;
  uint32_t expire_after = 0;
  std::vector<pool::EventClock> clocks;  // by partition, once rows have expired
  // Rows whose headers were damaged so far: verify may find as many, and as many slots stay unused.
  uint64_t damaged = 0;

  explicit TableWorld(std::shared_ptr<const Shape> of)
      : shape(std::move(of)),
        values(shape->keys.size(), 0),
        written(shape->keys.size(), 0),
        feed(shape->spec.feed) {
    set_expiry(shape->spec.expire_after);
  }
  void write(uint64_t key, uint64_t value);  // 0 deletes the key
  void set_expiry(uint32_t seconds);
  std::vector<pool::EventClock> shown_clocks() const;
  void delete_expired();  // a row's value is the version that wrote it
};

using Place = std::pair<uint32_t, uint32_t>;  // instance id, partition

struct Alias {
  std::string instance;
  std::string previous;  // empty if there is none
  bool operator==(const Alias&) const = default;
};

struct World {
  std::vector<TableWorld> tables;  // in the order of creation; names are unique
  std::map<std::string, Alias> aliases;
  std::set<std::string> instances;
  std::set<std::string> frozen;  // the frozen instances
  std::map<Place, pool::Progress> progress;
  media::Durability durability = media::Durability::kPower;
  bool closed = false;

  TableWorld* find(const std::string& name);
  const TableWorld* find(const std::string& name) const;
  void switch_alias(const std::string& alias, std::string instance);
};

// Fill `row` so that a test can detect a torn or foreign row without a model.
void write_row(uint64_t key, uint64_t value, std::byte* row, size_t bytes);

// What a crash may leave. Instances, aliases, tables, feeds and progress are as in one of the two
// worlds. Each row is as in one of the two, or as in one of `reverted`. The same world twice: no
// step is in progress.
struct Choices {
  const World& before;
  const World& after;
  std::vector<World> reverted = {};
};

// Return `now`, but with every key that was not written since the open as in `then`: the killed
// process had changed it, and the change was never drained.
World reverted_to(const World& then, const World& now);

inline constexpr char kOtherCatalogue[] =
    "instances, aliases, tables or feeds are neither those before nor those after the step";

// Return an empty string if the pool is clean and everything in it is one of the choices, whole;
// *observed is then its content. Otherwise return the problem.
std::string check(const table::Tables& tables, const Choices& choices, World* observed);

// Returns whether a row of `value` was ever written for the key of the table.
using WasWritten = std::function<bool(const std::string& table, uint64_t key, uint64_t value)>;

// Check a pool that lost power and was accepted. Its names are as before or as after. Each key is
// absent or has a whole row that was written for it at some time. Every progress needs a base.
std::string check_accepted(const table::Tables& tables, const Choices& choices,
                           const WasWritten& was_written, World* observed);

// Check pulls only, without verify and catalogue. For a pool that refused a write.
std::string check_rows(const table::Tables& tables, const Choices& choices, World* observed);

}  // namespace petps::crash
