// Each drain of each step of each scenario fails once. The step must return an error, the pool
// must refuse every write, pulls must go on, and reopening must find every acknowledged row.
#include <gtest/gtest.h>

#include <iostream>

#include "explorer.h"
#include "scale.h"
#include "scenarios.h"
#include "tests/seed.h"

namespace petps::crash {
namespace {

using base::Status;

// A listener that makes one drain of one explored step fail, and stops the scenario there.
class FailOnce : public Listener {
 public:
  FailOnce(size_t step, size_t drain, uint64_t seed) : step_(step), drain_(drain), random_(seed) {}

  void begin() { explored_ = true; }
  void before_step(Driver& driver) override {
    if (!explored_ || at_++ != step_) return;
    driver.medium().settle();
    driver.medium().fail_drain(drain_);
    driver.expects_failure = true;
    armed_ = true;
  }

  void after_step(Driver& driver, const Status& status, const World& after) override {
    if (!armed_) return;
    armed_ = false;
    driver.medium().fail_no_drain();
    driver.problem = "ended";  // the scenario stops here
    step_name = driver.step_name;
    if (driver.medium().drains().size() <= drain_) return;  // the step has fewer drains
    failed = true;
    if (status.ok()) {
      problem = "the step returned OK although its drain failed";
      return;
    }
    const World before = driver.world;
    if (driver.tables != nullptr) problem = check_refusals(driver, before, after);
    for (int i = 0; i < kStates && problem.empty(); ++i)
      problem = check_reopening(driver, before, after);
  }

  bool failed = false;
  size_t states = 0;
  std::string step_name;
  std::string problem;

 private:
  static constexpr int kStates = 6;

  static std::string check_refusals(Driver& driver, const World& before, const World& after) {
    table::Tables& tables = *driver.tables;
    World observed = tables.tables().size() == after.tables.size() ? after : before;
    std::string wrong = check_rows(tables, {before, after}, &observed);
    if (!wrong.empty()) return "pulls after the failed drain: " + wrong;
    pool::Pool& pool = tables.pool();
    std::vector<std::pair<const char*, Status>> writes = {
        {"create_instance", pool.create_instance("model", "model@9", 3).status()},
        {"set_alias", pool.set_alias("other", 1)},
        {"set_durability", pool.set_durability(media::Durability::kPower)},
        {"record_progress", tables.record_progress({1, 2, 99, 99, 99, 99, {}, 0})},
        {"close", tables.close()}};
    pool::TableSpec spec = table_spec("refused", 10, 64);
    spec.instance = 1;
    writes.emplace_back("create_table", tables.create_table(spec).status());
    for (const table::TablePointer& table : tables.tables()) {
      const uint64_t key = 5;
      std::vector<std::byte> row(table->record().spec.row_bytes);
      const uint8_t deleted = 1;
      writes.emplace_back("apply", table->apply({{&key, 1}, row.data(), {}, 0}).status());
      writes.emplace_back("delete", table->apply({{&key, 1}, nullptr, {&deleted, 1}, 0}).status());
      const auto feed =
          table->record().spec.feed == pool::Feed::kPush ? pool::Feed::kDelta : pool::Feed::kPush;
      writes.emplace_back("set_feed", pool.set_feed(table->id(), feed));
    }
    for (const auto& [name, status] : writes) {
      if (status.ok()) return std::string(name) + " was accepted after a failed drain";
    }
    wrong = check_rows(tables, {before, after}, &observed);
    return wrong.empty() ? "" : "pulls after refused writes: " + wrong;
  }

  std::string check_reopening(Driver& driver, const World& before, const World& after) {
    CrashMedium& medium = driver.medium();
    driver.drop();
    medium.crash(random_() % 3 == 0 ? random_() % (medium.events() + 1) : medium.events(), random_);
    states += 1;
    const std::vector<World> reverted = driver.reverted_worlds(before);
    std::string wrong;
    auto pool = pool::Pool::attach(medium.media());
    if (!pool.ok()) {
      wrong = pool.status().to_string();
    } else {
      auto tables = table::Tables::attach(std::move(pool).value(), false);
      World observed;
      wrong = tables.ok() ? check(*tables.value(), {before, after, reverted}, &observed)
                          : tables.status().to_string();
      if (wrong.empty()) {
        tables.value()->walk();
        wrong = check(*tables.value(), {observed, observed}, &observed);
      }
    }
    if (!wrong.empty()) wrong = "reopened: " + wrong + "\n  " + medium.describe();
    medium.undo();
    return wrong;
  }

  size_t step_;
  size_t drain_;
  std::mt19937_64 random_;
  bool explored_ = false;
  bool armed_ = false;
  size_t at_ = 0;
};

class FailedDrain : public testing::TestWithParam<Scenario> {};

TEST_P(FailedDrain, StopsWritingAndLosesNothing) {
  const Scenario& scenario = GetParam();
  const uint64_t seed = tests::seed();
  size_t failures = 0;
  size_t states = 0;
  const size_t last_step = scaled(60, 3);
  // The first steps of a random scenario may have no drain.
  for (size_t step = 0; step < last_step || failures == 0; ++step) {
    bool any = false;
    for (size_t drain = 0;; ++drain) {
      CrashMedium medium;
      Driver driver(medium, seed);
      FailOnce listener(step, drain, seed + drain);
      driver.listener = &listener;
      scenario.run(driver, [&] { listener.begin(); });
      ASSERT_TRUE(driver.problem == "ended" || driver.problem.empty()) << driver.problem;
      if (listener.step_name.empty()) break;  // no such step
      any = true;
      if (!listener.failed) break;
      ASSERT_EQ(listener.problem, "")
          << scenario.name << " step " << step << " (" << listener.step_name << "), drain " << drain
          << ", PETPS_SEED=" << seed;
      failures += 1;
      states += listener.states;
    }
    if (!any) break;
  }
  std::cout << "[failed drain] " << scenario.name << ": " << failures << " drains failed, "
            << states << " states" << std::endl;
  EXPECT_GT(failures, 0u);
}

INSTANTIATE_TEST_SUITE_P(Scenarios, FailedDrain, testing::ValuesIn(scenarios()),
                         [](const auto& scenario) { return std::string(scenario.param.name); });

}  // namespace
}  // namespace petps::crash
