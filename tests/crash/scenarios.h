// Every kind of acknowledged step, each on a pool where it meets what makes it hard.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "driver.h"

namespace petps::crash {

struct Scenario {
  const char* name;
  // Sets a pool up, calls begin(), then performs the steps that are to be explored.
  std::function<void(Driver& driver, const std::function<void()>& begin)> run;
};

const std::vector<Scenario>& scenarios();
// Of pools with durability `process`: the same, but for those that lose what was not drained, and more.
// In process_scenarios.cc.
const std::vector<Scenario>& process_scenarios();

inline constexpr uint32_t kOddRow = 72;  // bytes: straddles lines

// Formats the pool and creates table "t" with `rows` rows.
void start(Driver& driver, const std::shared_ptr<const Shape>& shape, size_t rows);

// The shape of an instance's table.
std::shared_ptr<const Shape> of_instance(const std::string& instance, const pool::TableSpec& spec,
                                         size_t keys, uint64_t seed);

}  // namespace petps::crash
