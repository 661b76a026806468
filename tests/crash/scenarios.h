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

}  // namespace petps::crash
