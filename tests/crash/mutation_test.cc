// Checks that every persist call is needed: with any one site suppressed, some scenario must
// fail.
//
// A mutant runs in a child process, because it may break anything: it may give a wrong answer,
// fail a check, or hang. Each of these kills it. Suppression starts with the explored steps, so
// that a scenario kills a mutant by its explored steps and not by its set-up.
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <vector>

#include "explorer.h"
#include "mutant.h"
#include "scale.h"
#include "scenarios.h"
#include "tests/seed.h"

namespace petps::crash {
namespace {

using media::Site;

// A mutant survives if it lives through this number of states per step, in every scenario and
// with each seed.
constexpr uint64_t kStatesPerStep = 2000;
constexpr uint64_t kSeeds = 4;

// Return the sites that a scenario reaches in its explored steps.
CrashMedium::Sites sites_reached(const Scenario& scenario, uint64_t seed) {
  CrashMedium medium;
  Driver driver(medium, seed);
  scenario.run(driver, [&] { medium.forget_sites(); });
  EXPECT_EQ(driver.problem, "") << scenario.name;
  return medium.sites_reached();
}

const std::map<std::string, CrashMedium::Sites>& sites_by_scenario() {
  static const auto all = [] {
    std::map<std::string, CrashMedium::Sites> sites;
    for (const Scenario& scenario : scenarios())
      sites[scenario.name] = sites_reached(scenario, tests::seed());
    return sites;
  }();
  return all;
}

// Return the first problem that the scenario shows without the site; empty if it shows none.
std::string run_mutant(const Scenario& scenario, Site site, uint64_t seed) {
  CrashMedium medium;
  Driver driver(medium, seed);
  Explorer explorer(Budget{kStatesPerStep}, seed);
  driver.listener = &explorer;
  scenario.run(driver, [&] {
    medium.suppress(site);
    explorer.begin();
  });
  const std::string problem =
      explorer.problem() + (explorer.problem().empty() ? driver.problem : "");
  return problem.empty() ? ""
                         : "after " + std::to_string(explorer.states()) + " states: " + problem;
}

class Mutation : public testing::TestWithParam<int> {};

TEST_P(Mutation, IsKilled) {
  const Site site = static_cast<Site>(GetParam());
  const bool matrix = std::getenv("PETPS_MUTATION_MATRIX") != nullptr;
  bool is_reached = false;
  bool killed = false;
  // A seed may have no state that needs the site, so try other seeds before the mutant survives.
  for (uint64_t seed = tests::seed(); seed < tests::seed() + kSeeds && !killed; ++seed) {
    for (const Scenario& scenario : scenarios()) {
      if (!sites_by_scenario().at(scenario.name).test(static_cast<size_t>(site))) continue;
      is_reached = true;
      const std::string how = run_in_child([&] { return run_mutant(scenario, site, seed); });
      if (!how.empty()) {
        std::cout << "[mutant] " << site_name(site) << " killed by " << scenario.name << " " << how
                  << std::endl;
        killed = true;
        if (!matrix) break;
      } else if (matrix) {
        std::cout << "[mutant] " << site_name(site) << " survives " << scenario.name << std::endl;
      }
    }
  }
  EXPECT_TRUE(is_reached) << "no scenario reaches " << site_name(site)
                          << ": nothing tests it, or no code names it any more";
  EXPECT_TRUE(killed) << "nothing fails without " << site_name(site)
                      << ", PETPS_SEED=" << tests::seed()
                      << ": a scenario is too weak, or the persist call is not needed";
}

INSTANTIATE_TEST_SUITE_P(Sites, Mutation, testing::Range(0, static_cast<int>(media::kFirstSync)),
                         [](const auto& site) {
                           return std::string(site_name(static_cast<Site>(site.param)));
                         });

// A scenario that notices alone that a site is missing. Otherwise another scenario that deletes
// rows might hide that the one for expiry, eviction or scrubbing is too weak.
struct Watched {
  const char* scenario;
  Site site;
};

void PrintTo(const Watched& watched, std::ostream* out) {
  *out << watched.scenario << " " << site_name(watched.site);
}

class WatchedMutation : public testing::TestWithParam<Watched> {};

TEST_P(WatchedMutation, IsKilledByItsScenario) {
  const auto& [name, site] = GetParam();
  const auto scenario = std::ranges::find_if(
      scenarios(), [&](const Scenario& other) { return other.name == std::string(name); });
  ASSERT_NE(scenario, scenarios().end());
  std::string how;
  for (uint64_t seed = tests::seed(); seed < tests::seed() + kSeeds && how.empty(); ++seed)
    how = run_in_child([&] { return run_mutant(*scenario, site, seed); });
  std::cout << "[mutant] " << site_name(site) << " killed by " << name << " " << how << std::endl;
  EXPECT_NE(how, "") << name << " passes without " << site_name(site)
                     << ", PETPS_SEED=" << tests::seed();
}

INSTANTIATE_TEST_SUITE_P(Sites, WatchedMutation,
                         testing::ValuesIn(std::vector<Watched>{{"growing", Site::kCopiedDrain},
                                                                {"growing", Site::kEntry},
                                                                {"shrinking", Site::kSuperblock},
                                                                {"expiring", Site::kClock},
                                                                {"expiring", Site::kClocked},
                                                                {"expiring", Site::kErasedEntry},
                                                                {"evicting", Site::kErasedEntry},
                                                                {"evicting", Site::kEntry},
                                                                {"evicting", Site::kFilled},
                                                                {"evicting", Site::kPublished},
                                                                {"scrubbing", Site::kErasedEntry},
                                                                {"scrubbing", Site::kPublished}}),
                         [](const auto& watched) {
                           return std::string(watched.param.scenario) + "_" +
                                  site_name(watched.param.site);
                         });

}  // namespace
}  // namespace petps::crash
