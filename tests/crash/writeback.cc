#include "writeback.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

namespace petps::crash {

using base::Result;
using base::Status;
using table::Tables;

namespace {

constexpr uint64_t kExhaustiveStates = 40;

uint64_t g_boots = 0;

void use_boot(uint64_t number) {
  std::array<uint8_t, 16> id{};
  std::memcpy(id.data(), &number, sizeof number);
  pool::set_boot_id_for_test(number == 0 ? std::nullopt : std::optional(id));
}

// Return what a crash at `point` may leave.
Choices choices_at(const Boundaries& boundaries, size_t point) {
  const auto& list = boundaries.list;
  size_t done = 0;
  while (done + 1 < list.size() && list[done + 1].first <= point) ++done;
  const bool acknowledged = point == list[done].first;
  return {list[done].second,
          acknowledged ? list[done].second : list[std::min(done + 1, list.size() - 1)].second};
}

Result<std::unique_ptr<Tables>> open(CrashMedium& medium, bool accept) {
  auto pool = pool::Pool::attach(medium.media());
  if (!pool.ok()) return pool.status();
  return Tables::attach(std::move(pool).value(), /*background=*/false, accept);
}

}  // namespace

Boot::Boot() : number_(++g_boots) { use_boot(number_); }
Boot::~Boot() { use_boot(--g_boots); }

void WritebackExplorer::report(const std::string& problem, const std::string& where) {
  if (problem_.empty()) problem_ = where + ": " + problem;
}

void WritebackExplorer::before_step(Driver& driver) {
  if (!exploring_) return;
  driver.medium().settle();
  first_ = driver.medium().events();  // earlier events are stores that nothing has synced yet
}

void WritebackExplorer::after_step(Driver& driver, const Status& status, const World& after) {
  if (!exploring_ || !status.ok() || !problem_.empty()) return;
  steps_ += 1;
  CrashMedium& medium = driver.medium();
  const World before = driver.world;
  std::unique_ptr<Tables> live = std::move(driver.tables);
  const size_t events = medium.events();
  const uint64_t until = counts_.states + budget_.states_per_step;
  const uint64_t exhaustive_until = counts_.states + budget_.states_per_step / 6;
  const std::vector<size_t> syncs = medium.syncs();
  for (size_t point = events + 1; point-- > first_ && problem_.empty();) {
    const uint64_t count = medium.state_count(point);
    if (count > kExhaustiveStates) continue;
    for (uint64_t i = 0; i < count && counts_.states < exhaustive_until && problem_.empty(); ++i) {
      medium.crash_exhaustive(point, i);
      try_power_loss(driver, point, point == events ? after : before, after);
    }
  }
  while (counts_.states < until && problem_.empty()) {
    size_t point = first_ + random_() % (events - first_ + 1);
    const uint64_t kind = random_() % 8;
    // Prefer points just before a sync, and the end of the step; the other points are random.
    if (kind < 3 && !syncs.empty()) point = syncs[random_() % syncs.size()];
    if (kind == 3) point = events;
    const World& least = point == events ? after : before;
    if (random_() % 4 == 0) {
      medium.kill(point);
      try_kill(driver, point, least, after);
    } else {
      medium.crash(point, random_);
      try_power_loss(driver, point, least, after);
    }
  }
  driver.tables = std::move(live);
  if (!problem_.empty()) driver.problem = "explored";  // stop the scenario
}

// The medium was just crashed. Check it, then undo the crash.
void WritebackExplorer::try_power_loss(Driver& live, size_t point, const World& before,
                                       const World& after) {
  CrashMedium& medium = live.medium();
  const std::string where = "step " + std::to_string(steps_) + " (" + live.step_name + "), state " +
                            std::to_string(counts_.states + 1) + " at point " +
                            std::to_string(point) + "\n  power loss: " + medium.describe();
  judge(medium, {before, after}, live.history, where);
  medium.undo();
}

// The process was just killed. The next process sees what was stored, and then the power fails.
void WritebackExplorer::try_kill(Driver& live, size_t point, const World& before,
                                 const World& after) {
  CrashMedium& medium = live.medium();
  counts_.states += 1;
  counts_.killed += 1;
  const std::string where = "step " + std::to_string(steps_) + " (" + live.step_name + "), state " +
                            std::to_string(counts_.states) + "\n  killed at point " +
                            std::to_string(point);
  const size_t killed_at = medium.events();
  Driver driver(medium, random_(), &live.history);
  auto tables = open(medium, /*accept=*/false);
  if (!tables.ok()) {
    report("the pool cannot be opened: " + tables.status().to_string(), where);
  } else {
    driver.tables = std::move(tables).value();
    World observed;
    const std::string wrong = check(*driver.tables, {before, after}, &observed);
    if (!wrong.empty()) report(wrong, where + "\n  reopened");
    observed.closed = false;
    observed.durability = driver.tables->pool().medium().durability();
    driver.adopt(observed);
  }
  if (problem_.empty()) {
    Boundaries boundaries(medium, driver.world);
    driver.listener = &boundaries;
    continue_life(&driver, where);
    driver.drop();
    const size_t point_after = killed_at + random_() % (medium.events() - killed_at + 1);
    const bool opening_still = point_after < boundaries.list.front().first;
    World opened_before = before;
    World opened_after = after;
    opened_before.closed = opened_after.closed = false;
    const Choices choices =
        opening_still ? Choices{opened_before, opened_after} : choices_at(boundaries, point_after);
    medium.crash(point_after, random_);
    judge(medium, choices, driver.history,
          where + "\n  then power loss at point " + std::to_string(point_after) + ": " +
              medium.describe());
    medium.undo();
  }
  driver.drop();
  medium.undo();
}

void WritebackExplorer::judge(CrashMedium& medium, const Choices& choices, const History& history,
                              const std::string& where) {
  counts_.states += 1;
  const Boot boot;
  auto attached = pool::Pool::attach(medium.media());
  if (!attached.ok())
    return report("the pool cannot be attached: " + attached.status().to_string(), where);
  std::unique_ptr<pool::Pool> pool = std::move(attached).value();
  const bool process = choices.before.durability == media::Durability::kProcess ||
                       choices.after.durability == media::Durability::kProcess;
  if (pool->lost_power()) {
    if (!process) return report("a pool of durability power says that it lost power", where);
    if (choices.before.closed && choices.after.closed)
      return report("a pool that was closed says that it lost power", where);
    return accept(medium, std::move(pool), choices, history, where);
  }
  counts_.trusted += 1;
  auto tables = Tables::attach(std::move(pool), /*background=*/false);
  if (!tables.ok()) return report("it cannot be opened: " + tables.status().to_string(), where);
  World observed;
  const std::string wrong = check(*tables.value(), choices, &observed);
  if (!wrong.empty()) return report(wrong, where + "\n  trusted");
  if (random_() % 4 != 0) return;
  Driver driver(medium, random_(), &history);
  driver.tables = std::move(tables).value();
  observed.closed = false;
  driver.adopt(observed);
  continue_life(&driver, where + "\n  trusted");
}

// Perform random further steps; the pool must be right after them.
void WritebackExplorer::continue_life(Driver* driver, const std::string& where) {
  if ((random_() & 1) != 0) driver->walk();
  perform_random_steps(driver);
  if (driver->problem.empty()) {
    World observed;
    driver->problem = check(*driver->tables, {driver->world, driver->world}, &observed);
  }
  if (!driver->problem.empty()) report(driver->problem, where + "\n  performing further steps");
}

void WritebackExplorer::accept(CrashMedium& medium, std::unique_ptr<pool::Pool> pool,
                               const Choices& choices, const History& history,
                               const std::string& where) {
  const uint64_t sequence = pool->sequence();
  auto tables = Tables::attach(std::move(pool), /*background=*/false, /*accept_lost_power=*/true);
  if (!tables.ok()) return report("it cannot be accepted: " + tables.status().to_string(), where);
  if (!tables.value()->verify().clean()) {  // allowed after a power loss
    counts_.faulty += 1;
    return;
  }
  counts_.accepted += 1;
  World observed;
  const std::string wrong = check_accepted(*tables.value(), choices, history.finder(), &observed);
  if (!wrong.empty()) return report(wrong, where + "\n  accepted");
  if (tables.value()->pool().sequence() < sequence + pool::kAcceptedStep)
    return report("the sequence did not advance by kAcceptedStep", where + "\n  accepted");
  const size_t events = medium.events();
  if (random_() % 4 == 0) {
    tables.value().reset();
    return crash_accepting(medium, events, choices, history, where);
  }
  Driver driver(medium, random_(), &history);
  driver.tables = std::move(tables).value();
  driver.adopt(observed);
  Boundaries boundaries(medium, driver.world);
  driver.listener = &boundaries;
  continue_life(&driver, where + "\n  accepted");
  if ((random_() & 1) != 0) driver.close();
  if (!problem_.empty() || !driver.problem.empty()) return report(driver.problem, where);
  driver.drop();
  if (!driver.world.closed) return;
  // Every boot trusts a clean close.
  medium.crash(medium.events(), random_);
  {
    const Boot boot;
    auto reopened = open(medium, /*accept=*/false);
    const std::string problem =
        reopened.ok() ? check(*reopened.value(), {driver.world, driver.world}, &observed)
                      : reopened.status().to_string();
    if (!problem.empty()) report(problem, where + "\n  accepted, closed, power loss");
  }
  medium.undo();
}

// Kill, or fail the power again, during the acceptance: the pool is accepted whole or not at all.
void WritebackExplorer::crash_accepting(CrashMedium& medium, size_t events, const Choices& choices,
                                        const History& history, const std::string& where) {
  const size_t point = random_() % (events + 1);
  const bool killed = (random_() & 1) != 0;
  counts_.states += 1;
  if (killed) {
    medium.kill(point);
  } else {
    medium.crash(point, random_);
  }
  const std::string here = where + (killed ? "\n  killed" : "\n  power loss") +
                           " while it was accepted, at point " + std::to_string(point);
  {
    std::unique_ptr<Boot> boot = killed ? nullptr : std::make_unique<Boot>();
    auto pool = pool::Pool::attach(medium.media());
    if (!pool.ok()) {
      report("the pool cannot be attached: " + pool.status().to_string(), here);
    } else if (!pool.value()->lost_power()) {
      auto tables = Tables::attach(std::move(pool).value(), /*background=*/false);
      World observed;
      const std::string wrong =
          !killed       ? "it is trusted although it was never closed"
          : tables.ok() ? check_accepted(*tables.value(), choices, history.finder(), &observed)
                        : tables.status().to_string();
      if (!wrong.empty()) report(wrong, here);
    }
  }
  medium.undo();
}

}  // namespace petps::crash
