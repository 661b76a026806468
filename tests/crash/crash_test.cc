// Explores crash states of every step of every scenario.
#include <gtest/gtest.h>

#include <chrono>
#include <iostream>

#include "explorer.h"
#include "scale.h"
#include "scenarios.h"
#include "tests/seed.h"

namespace petps::crash {
namespace {

// The suite promises 200,000 states; 38 scenarios with 15,000 states each are more.
constexpr uint64_t kStatesPerScenario = 15'000;
constexpr uint64_t kLeastStates = 150;

class Crash : public testing::TestWithParam<Scenario> {};

// Count the steps that a scenario explores, by running it without crashes.
uint64_t count_steps(const Scenario& scenario, uint64_t seed) {
  CrashMedium medium;
  Driver driver(medium, seed);
  Explorer counter(Budget{0}, seed);
  driver.listener = &counter;
  scenario.run(driver, [&] { counter.begin(); });
  EXPECT_EQ(driver.problem, "") << scenario.name
                                << " without any crash, PETPS_SEED=" << tests::seed();
  return counter.steps();
}

TEST_P(Crash, EveryStateReopensWhole) {
  const Scenario& scenario = GetParam();
  const uint64_t seed = tests::seed();
  const uint64_t steps = count_steps(scenario, seed);
  ASSERT_GT(steps, 0u);
  const uint64_t promised = scaled(kStatesPerScenario, kLeastStates);
  const auto started = std::chrono::steady_clock::now();
  CrashMedium medium;
  Driver driver(medium, seed);
  Explorer explorer(Budget{promised / steps + 1}, seed);
  driver.listener = &explorer;
  scenario.run(driver, [&] { explorer.begin(); });
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  std::cout << "[crash] " << scenario.name << ": " << explorer.states() << " states of " << steps
            << " steps in " << seconds << " s" << std::endl;
  RecordProperty("states", std::to_string(explorer.states()));
  if (!explorer.problem().empty() || !driver.problem.empty()) {
    FAIL() << scenario.name << ", PETPS_SEED=" << seed << ": " << explorer.problem()
           << driver.problem;
  }
  EXPECT_EQ(explorer.steps(), steps);
  EXPECT_GE(explorer.states(), promised) << "fewer crash states than the suite promises";
}

INSTANTIATE_TEST_SUITE_P(Scenarios, Crash, testing::ValuesIn(scenarios()),
                         [](const auto& scenario) { return std::string(scenario.param.name); });

}  // namespace
}  // namespace petps::crash
