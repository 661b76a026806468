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

inline constexpr uint32_t kOddRow = 72;  // bytes; straddles lines

// Format the pool and create table "t" with `rows` rows.
void start(Driver& driver, const std::shared_ptr<const Shape>& shape, size_t rows);

// Return the shape of an instance's table.
std::shared_ptr<const Shape> of_instance(const std::string& instance, const pool::TableSpec& spec,
                                         size_t keys, uint64_t seed);

}  // namespace petps::crash
