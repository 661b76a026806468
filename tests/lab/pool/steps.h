// The life of a pool whose power is cut: a list of steps, the same for the same seed, and the world
// that each of them leaves.
//
// One process performs the steps on a real file system and says which were acknowledged. Others,
// after each cut, make the same list again and know what must be there.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/crash/world.h"

namespace petps::lab {

// What a pool's durability is while the steps are performed.
enum class Regime : uint8_t { kPower, kProcess, kChanging };

std::optional<Regime> regime_of(const std::string& name);  // "power", "process", "changing"

// The pool that the steps are performed on; null while it is closed.
struct Live {
  table::TablesOptions options;
  std::unique_ptr<table::Tables> tables;
};

struct Step {
  std::string name;
  std::function<base::Status(Live*)> perform;
  crash::World after;  // what is there once it is acknowledged
  media::Durability durability = media::Durability::kPower;  // once it is acknowledged
  bool is_closed = false;                                    // the pool, once it is acknowledged
};

struct Change {
  uint64_t key;
  uint64_t value;  // 0 deletes
};

base::Status apply(table::Tables* tables, const std::string& table,
                   const std::vector<Change>& changes, uint32_t threads);

// Inserts, updates and deletions that the table can take. `*value` counts the values given.
std::vector<Change> random_changes(const crash::TableWorld& table, size_t inserts, size_t updates,
                                   size_t deletions, uint64_t* value, std::mt19937_64* random);
void expect(crash::TableWorld* table, const std::vector<Change>& changes);

std::vector<Step> make_steps(uint64_t seed, Regime regime);

}  // namespace petps::lab
