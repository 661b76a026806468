// The steps of a pool whose power is cut, and the world (the expected content) after each step. The
// list depends only on the seed and the regime.
//
// One process performs the steps on a real file system and prints which were acknowledged. After
// each cut, another process makes the same list again, and so knows what the pool must contain.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/crash/world.h"

namespace petps::lab {

// The durability of the pool while the steps are performed.
enum class Regime : uint8_t { kPower, kProcess, kChanging };

std::optional<Regime> regime_of(const std::string& name);  // "power", "process", "changing"

// The pool on which the steps are performed. `tables` is null while it is closed.
struct Live {
  table::TablesOptions options;
  std::unique_ptr<table::Tables> tables;
};

struct Step {
  std::string name;
  std::function<base::Status(Live*)> perform;
  // The state once the step is acknowledged: content, durability, whether the pool is closed.
  crash::World after;
  media::Durability durability = media::Durability::kPower;
  bool is_closed = false;
};

struct Change {
  uint64_t key;
  uint64_t value;  // 0 deletes
};

base::Status apply(table::Tables* tables, const std::string& table,
                   const std::vector<Change>& changes, uint32_t threads);

// Return the given numbers of random inserts, updates and deletions, or fewer if the table cannot
// take them. `*value` counts the values used so far.
std::vector<Change> random_changes(const crash::TableWorld& table, size_t inserts, size_t updates,
                                   size_t deletions, uint64_t* value, std::mt19937_64* random);
// Apply the changes to the expected table.
void expect(crash::TableWorld* table, const std::vector<Change>& changes);

std::vector<Step> make_steps(uint64_t seed, Regime regime);

}  // namespace petps::lab
