// Every kind of acknowledged step, each on a pool where it meets what makes it hard.
#pragma once

#include <functional>
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
const std::vector<Scenario>& process_scenarios();

}  // namespace petps::crash
