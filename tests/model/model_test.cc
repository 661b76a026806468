// Interleavings of the rooms index and epoch. machine.h defines what is tried; index_scenarios.cc
// and epoch_scenarios.cc have the threads. PETPS_MODEL_FULL=1 tries wider bounds (minutes).
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "tests/model/argued.h"
#include "tests/model/scenarios.h"

namespace petps::model {
namespace {

bool full() { return std::getenv("PETPS_MODEL_FULL") != nullptr; }

// All orders of steps with up to three preemptions; fewer preemptions where loads may also take old
// values.
std::vector<Bounds> bounds() {
  if (full()) return {{3, 1}, {2, 2}, {1, 3}, {0, 6}};
  return {{3, 0}, {1, 1}, {0, 3}};
}

std::string report(const Result& result) {
  std::string text = result.failure;
  for (const std::string& line : result.trace) text += "\n  " + line;
  return text;
}

void expect_no_failure(const std::vector<Scenario>& scenarios) {
  for (const Scenario& scenario : scenarios) {
    uint64_t runs = 0;
    for (const Bounds& limits : bounds()) {
      const Result result = explore(scenario, limits);
      runs += result.runs;
      EXPECT_TRUE(result.failure.empty()) << scenario.name << ": " << report(result);
      EXPECT_TRUE(result.complete) << scenario.name;
    }
    std::cout << scenario.name << ": " << runs << " runs\n";
  }
}

TEST(Model, NoInterleavingOfTheIndexIsWrong) { expect_no_failure(index_scenarios()); }
TEST(Model, NoInterleavingOfPinsAndReclaimIsWrong) { expect_no_failure(epoch_scenarios()); }

std::vector<Scenario> all_scenarios() {
  std::vector<Scenario> all = index_scenarios();
  for (Scenario& scenario : epoch_scenarios()) all.push_back(std::move(scenario));
  return all;
}

using Sites = std::map<std::string, std::vector<Spoil>>;

Sites sites_of(const std::vector<Scenario>& scenarios) {
  Sites sites;
  for (const Scenario& scenario : scenarios) sites.merge(explore(scenario, {1, 0, 3000}).sites);
  return sites;
}

// Return the failure that the first scenario reports, or an empty string if no scenario notices the
// mutation.
std::string find_failure(const std::vector<Scenario>& scenarios, const Mutation& mutation) {
  for (const Bounds& limits : std::vector<Bounds>{
           {0, 2, 4000}, {1, 1, 4000}, {0, 4, 20000}, {1, 2, 40000}, {2, 0, 6000}, {2, 1, 20000}}) {
    for (const Scenario& scenario : scenarios) {
      const Result result = explore(scenario, limits, mutation);
      if (!result.failure.empty()) return scenario.name + ": " + result.failure;
    }
  }
  return "";
}

// Return a label for each site, such as "write.cc:fill_entry 2 store": the second site of the
// function, in the order of the source.
std::map<std::string, std::string> labels(const Sites& sites) {
  std::map<std::string, std::map<std::pair<int, int>, std::string>> functions;
  for (const auto& [site, spoils] : sites) {
    if (spoils.empty()) continue;
    const size_t at = site.find(" line ");
    int line = 0;
    int column = 0;
    std::sscanf(site.c_str() + at, " line %d.%d", &line, &column);
    functions[site.substr(0, at)][{line, column}] = site;
  }
  std::map<std::string, std::string> result;
  for (const auto& [function, places] : functions) {
    int number = 0;
    for (const auto& [place, site] : places)
      result[site] = function + " " + std::to_string(++number) + site.substr(site.rfind(' '));
  }
  return result;
}

// Some scenario catches each weakened order and each store left out, or argued.h gives the reason
// why none does.
TEST(Model, EveryMutationIsCaughtOrArgued) {
  const std::vector<Scenario> scenarios = all_scenarios();
  const Sites sites = sites_of(scenarios);
  const std::map<std::string, std::string> names = labels(sites);
  size_t count = 0;
  size_t not_caught = 0;
  for (const auto& [site, spoils] : sites) {
    for (const Spoil spoil : spoils) {
      const std::string name = names.at(site) + " " + to_string(spoil);
      const bool is_argued = argued().contains(name);
      count += 1;
      not_caught += is_argued ? 1 : 0;
      if (is_argued && !full()) continue;
      const std::string how = find_failure(scenarios, {site, spoil});
      if (is_argued) {
        EXPECT_EQ(how, "") << name << " is argued, but caught: take it off the list";
      } else {
        EXPECT_NE(how, "") << name << " is neither caught nor argued";
      }
    }
  }
  EXPECT_EQ(not_caught, argued().size()) << "argued.h names a site that does not exist";
  std::cout << count << " mutations, " << not_caught << " of them argued\n";
}

// Without the second change of a bucket's count, a reader misses a key that moves.
TEST(Model, WithoutTheSecondCountAMovingKeyIsMissed) {
  const std::vector<Scenario> scenarios = all_scenarios();
  size_t missed = 0;
  for (const auto& [site, spoils] : sites_of(scenarios)) {
    if (!site.starts_with("move.cc:move_locked")) continue;
    for (const Scenario& scenario : scenarios) {
      if (!scenario.name.starts_with("a key moves home")) continue;
      const Result result = explore(scenario, {3, 0}, Mutation{site, Spoil::kNoStore});
      missed += result.failure.find("false miss") != std::string::npos ? 1 : 0;
    }
  }
  EXPECT_EQ(missed, 2u) << "by a single find and by a batch";
}

}  // namespace
}  // namespace petps::model
