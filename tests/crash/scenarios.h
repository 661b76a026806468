// Every kind of acknowledged step, each on a pool that makes the step hard.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "driver.h"

namespace petps::crash {

struct Scenario {
  const char* name;
  // Set a pool up, call begin(), then perform the steps to explore.
  std::function<void(Driver& driver, const std::function<void()>& begin)> run;
};

const std::vector<Scenario>& scenarios();
// The scenarios for pools with durability `process`: those above, except the one that loses what
// was not drained, and more. In process_scenarios.cc.
const std::vector<Scenario>& process_scenarios();

// Those of tables that grow, pools that shrink, and rows that expire or are damaged: part of
// scenarios(). In growth_scenarios.cc.
const std::vector<Scenario>& growth_scenarios();

inline constexpr uint32_t kOddRow = 72;  // bytes; straddles lines

// A capacity beyond the slots in the first extents of kOddRow rows. After a kill a table counts
// all its slots as rows, so with a smaller capacity it takes new keys only after the walk.
inline constexpr uint64_t kMoreThanSlots = 1500;

// Format the pool and create table "t" with `rows` rows.
void start(Driver& driver, const std::shared_ptr<const Shape>& shape, size_t rows);

// Return the shape of an instance's table.
std::shared_ptr<const Shape> of_instance(const std::string& instance, const pool::TableSpec& spec,
                                         size_t keys, uint64_t seed);

// Make two instances with tables of one shape, "t" and "u". Once the first is dropped, its space
// goes to new tables of the second.
void two_instances(Driver& driver);

}  // namespace petps::crash
