// The crash suite over a file: the kernel writes pages back at any time.
#include "writeback.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "mutant.h"
#include "scale.h"
#include "scenarios.h"
#include "tests/seed.h"

namespace petps::crash {
namespace {

// Together, the scenarios of both suites exceed the 100,000 states that they promise.
constexpr uint64_t kPowerStates = 1'500;
constexpr uint64_t kProcessStates = 3'000;
constexpr uint64_t kLeastStates = 100;

class StepCounter : public Listener {
 public:
  bool counting = false;
  uint64_t steps = 0;
  void after_step(Driver&, const base::Status& status, const World&) override {
    steps += counting && status.ok() ? 1 : 0;
  }
};

uint64_t count_steps(const Scenario& scenario, media::Durability durability) {
  CrashMedium medium(CrashMedium::Keeps::kPages);
  Driver driver(medium, tests::seed());
  driver.durability = durability;
  StepCounter counter;
  driver.listener = &counter;
  scenario.run(driver, [&] { counter.counting = true; });
  EXPECT_EQ(driver.problem, "") << scenario.name << " without any crash";
  return std::max<uint64_t>(1, counter.steps);
}

std::string explore(const Scenario& scenario, uint64_t states_per_step, media::Site without,
                    WritebackExplorer::Counts* counts) {
  const Boot boot;
  CrashMedium medium(CrashMedium::Keeps::kPages);
  Driver driver(medium, tests::seed());
  driver.durability = media::Durability::kProcess;
  WritebackExplorer explorer(Budget{states_per_step}, tests::seed());
  driver.listener = &explorer;
  scenario.run(driver, [&] {
    if (without != media::Site::kCount) medium.suppress(without);
    explorer.begin();
  });
  *counts = explorer.counts();
  return explorer.problem() + (explorer.problem().empty() ? driver.problem : "");
}

// Return all scenarios but the one that changes the durability; PowerLossIsNoticed runs that one.
std::vector<Scenario> power_scenarios() {
  std::vector<Scenario> chosen = scenarios();
  std::erase_if(chosen,
                [](const Scenario& scenario) { return scenario.name == std::string("catalogue"); });
  return chosen;
}

class Writeback : public testing::TestWithParam<Scenario> {};

TEST_P(Writeback, PowerLosesNothing) {
  const Scenario& scenario = GetParam();
  const uint64_t promised = scaled(kPowerStates, kLeastStates);
  const uint64_t steps = count_steps(scenario, media::Durability::kPower);
  CrashMedium medium(CrashMedium::Keeps::kPages);
  Driver driver(medium, tests::seed());
  Explorer explorer(Budget{promised / steps + 1}, tests::seed());
  driver.listener = &explorer;
  scenario.run(driver, [&] { explorer.begin(); });
  std::cout << "[write-back] " << scenario.name << ", power: " << explorer.states() << " states"
            << std::endl;
  ASSERT_EQ(explorer.problem() + driver.problem, "") << "PETPS_SEED=" << tests::seed();
  EXPECT_GE(explorer.states(), promised);
}

INSTANTIATE_TEST_SUITE_P(Scenarios, Writeback, testing::ValuesIn(power_scenarios()),
                         [](const auto& scenario) { return std::string(scenario.param.name); });

class WritebackOfProcess : public testing::TestWithParam<Scenario> {};

TEST_P(WritebackOfProcess, PowerLossIsNoticed) {
  const Scenario& scenario = GetParam();
  const uint64_t promised = scaled(kProcessStates, kLeastStates);
  const uint64_t steps = count_steps(scenario, media::Durability::kProcess);
  const auto started = std::chrono::steady_clock::now();
  WritebackExplorer::Counts counts;
  const std::string problem = explore(scenario, promised / steps + 1, media::Site::kCount, &counts);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
  std::cout << "[write-back] " << scenario.name << ", process: " << counts.states << " states in "
            << seconds << " s: " << counts.killed << " killed, " << counts.trusted << " trusted, "
            << counts.accepted << " accepted, " << counts.faulty << " faulty" << std::endl;
  ASSERT_EQ(problem, "") << "PETPS_SEED=" << tests::seed();
  EXPECT_GE(counts.states, promised);
  EXPECT_GT(counts.accepted, 0u) << "no state is whole enough for anything but a refusal";
}

INSTANTIATE_TEST_SUITE_P(Scenarios, WritebackOfProcess, testing::ValuesIn(process_scenarios()),
                         [](const auto& scenario) { return std::string(scenario.param.name); });

// Let one sync of `act` fail and lose its pages, kill the process, and check the pool. The pages
// look clean, so no later sync writes them. Return false if `act` has fewer syncs.
bool fail_one_sync(size_t number, const std::function<base::Status(table::Tables&)>& act,
                   bool* lost_power) {
  const Boot boot;
  CrashMedium medium(CrashMedium::Keeps::kPages);
  Driver driver(medium, tests::seed());
  driver.durability = media::Durability::kProcess;
  driver.format();
  driver.create_table(shape_of(table_spec("t", 60, 72), 60, 60));
  for (int i = 0; i < 3; ++i) driver.apply("t", driver.random_changes("t", 10, 8, 2));
  EXPECT_EQ(driver.problem, "");
  medium.settle();
  medium.fail_sync(number);
  if (act(*driver.tables).ok()) return false;
  EXPECT_FALSE(driver.tables->close().ok()) << "a pool whose sync failed was closed as clean";
  driver.drop();
  medium.kill(medium.events());
  auto pool = pool::Pool::attach(medium.media());
  EXPECT_TRUE(pool.ok()) << pool.status().to_string();
  *lost_power = pool.ok() && pool.value()->lost_power();
  if (!pool.ok() || *lost_power) return true;
  {
    auto tables = table::Tables::attach(std::move(pool).value(), /*background=*/false);
    EXPECT_TRUE(tables.ok() && tables.value()->close().ok()) << "sync " << number;
  }
  std::mt19937_64 random(tests::seed());
  for (int i = 0; i < 100; ++i) {
    medium.crash(medium.events(), random);
    const Boot another;
    auto reopened = pool::Pool::attach(medium.media());
    auto tables = table::Tables::attach(std::move(reopened).value(), /*background=*/false);
    World observed;
    EXPECT_EQ(tables.ok() ? check(*tables.value(), {driver.world, driver.world}, &observed)
                          : tables.status().to_string(),
              "")
        << "sync " << number << ", PETPS_SEED=" << tests::seed() << ", " << medium.describe();
    tables = base::Status(base::Code::kInternal, "");
    medium.undo();
  }
  return true;
}

TEST(FailedSync, ThatLostRowsCountsAsALossOfPower) {
  const std::vector<std::function<base::Status(table::Tables&)>> acts = {
      [](table::Tables& tables) { return tables.close(); },
      [](table::Tables& tables) {
        return tables.pool().set_durability(media::Durability::kPower);
      }};
  for (const auto& act : acts) {
    size_t losses = 0;
    size_t syncs = 0;
    for (bool lost = false; fail_one_sync(syncs, act, &lost); ++syncs) losses += lost ? 1 : 0;
    EXPECT_GE(syncs, 2u);
    EXPECT_GE(losses, 1u);
  }
}

// The scenario that needs this real sync. Without the sync, some scenario must fail.
std::string scenario_of(media::Site site) {
  switch (site) {
    case media::Site::kAdoptedSync:
      return "killed_clean_close";
    case media::Site::kNewTableSync:
      return "table_creation";
    case media::Site::kGrownSync:
      return "growing";
    case media::Site::kReusedSync:
      return "same_keys_again";
    case media::Site::kPowerSync:
      return "durabilities";
    default:
      return "clean_close";
  }
}

class WithoutSync : public testing::TestWithParam<int> {};

TEST_P(WithoutSync, IsNoticed) {
  const auto site = static_cast<media::Site>(GetParam());
  // A torn superblock is one state in 200, so the scenario for a site gets more states than it
  // needs.
  constexpr uint64_t kStatesPerStep = 1'000;
  constexpr uint64_t kStatesOfItsOwn = 5'000;
  std::vector<Scenario> tried = process_scenarios();
  const auto own = std::stable_partition(tried.begin(), tried.end(), [&](const Scenario& scenario) {
    return scenario.name == scenario_of(site);
  });
  for (auto scenario = tried.begin(); scenario != tried.end(); ++scenario) {
    const uint64_t states = scenario < own ? kStatesOfItsOwn : kStatesPerStep;
    const std::string how = run_in_child([&]() -> std::string {
      WritebackExplorer::Counts counts;
      const std::string problem = explore(*scenario, states, site, &counts);
      if (problem.empty()) return "";
      return "after " + std::to_string(counts.states) + " states: " + problem;
    });
    if (how.empty()) continue;
    std::cout << "[mutant] " << site_name(site) << " killed by " << scenario->name << " "
              << how.substr(0, 600) << std::endl;
    return;
  }
  FAIL() << "nothing fails without " << site_name(site) << ", PETPS_SEED=" << tests::seed();
}

INSTANTIATE_TEST_SUITE_P(Sites, WithoutSync,
                         testing::Range(static_cast<int>(media::kFirstSync),
                                        static_cast<int>(kSites)),
                         [](const auto& site) {
                           return std::string(site_name(static_cast<media::Site>(site.param)));
                         });

}  // namespace
}  // namespace petps::crash
