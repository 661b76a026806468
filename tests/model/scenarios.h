// The scenarios of the rooms index and epoch, one list for each.
#pragma once

#include <vector>

#include "tests/model/machine.h"

namespace petps::model {

std::vector<Scenario> index_scenarios();
std::vector<Scenario> epoch_scenarios();

}  // namespace petps::model
