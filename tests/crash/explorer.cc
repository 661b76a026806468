#include "explorer.h"

#include <algorithm>

namespace petps::crash {

using base::Status;
using table::Tables;

namespace {

// A point with no more states than this gets all of them.
constexpr uint64_t kExhaustiveStates = 40;
constexpr int kSecondCrashes = 2;
constexpr size_t kFurtherSteps = 3;

std::shared_ptr<const Shape> late_shape(const std::string& instance) {
  static const std::shared_ptr<const Shape> shape =
      shape_of(table_spec("late", 40, 72, true), 40, 99);
  auto late = std::make_shared<Shape>(*shape);
  late->instance = instance;
  return late;
}

}  // namespace

void perform_random_steps(Driver* driver) {
  Driver& d = *driver;
  const size_t steps = 1 + d.random() % kFurtherSteps;
  for (size_t i = 0; i < steps && d.problem.empty(); ++i) {
    const uint64_t kind = d.random() % 24;
    const std::string instance = *d.world.instances.rbegin();
    if (kind == 0 && d.world.find("late") == nullptr) {
      d.create_table(late_shape(instance));
      d.apply("late", d.random_changes("late", 5, 0, 0));
      continue;
    }
    if (kind == 1) {
      d.set_alias("live", instance);
      continue;
    }
    if (kind <= 3) {
      d.record_progress({d.tables->resolve(instance).value().id,
                         static_cast<uint32_t>(d.random() % 3),
                         9,
                         d.next_value(),
                         d.random(),
                         1,
                         {},
                         0});
      continue;
    }
    if (kind == 4) {
      d.close();
      d.open();
    }
    if (d.world.tables.empty() || !d.problem.empty()) continue;
    const TableWorld& table = d.world.tables[d.random() % d.world.tables.size()];
    const std::string name = table.shape->spec.name;
    if (kind == 5) {
      d.rehome(name);
    } else if (kind <= 7) {
      std::vector<uint64_t> hot;
      for (int k = 0; k < 4; ++k)
        hot.push_back(table.shape->keys[d.random() % table.shape->keys.size()]);
      d.migrate(name, hot);
    } else if (kind == 8) {
      d.grow(name, table.shape->spec.capacity + 1 + d.random() % 64, [] {});
    } else if (kind == 9 && table.feed == pool::Feed::kPush && table.expire_after == 0) {
      d.push_full(name, d.random() % 8, d.random() % 4, table::WhenFull::kEvictOldest);
    } else {
      d.apply(name, d.random_changes(name, d.random() % 4, d.random() % 4, d.random() % 4));
    }
  }
}

void Explorer::report(const std::string& problem, const CrashMedium& medium,
                      const std::string& where) {
  if (problem_.empty()) problem_ = where + ": " + problem + "\n  " + medium.describe();
}

void Explorer::before_step(Driver& driver) {
  if (exploring_) driver.medium().settle();
}

void Explorer::after_step(Driver& driver, const Status& status, const World& after) {
  if (!exploring_ || !status.ok() || !problem_.empty()) return;
  steps_ += 1;
  const World before = driver.world;
  std::unique_ptr<Tables> live = std::move(driver.tables);
  explore(driver, before, after);
  driver.tables = std::move(live);
  if (!problem_.empty()) driver.problem = "explored";  // stop the scenario
}

// Give each point with few states all of them, until `until` states.
void Explorer::explore_exhaustively(Driver& driver, const World& before, const World& after,
                                    uint64_t until) {
  CrashMedium& medium = driver.medium();
  for (size_t point = medium.events() + 1; point-- > 0;) {
    const uint64_t count = medium.state_count(point);
    if (count > kExhaustiveStates) continue;
    const bool acknowledged = point == medium.events();
    for (uint64_t i = 0; i < count; ++i) {
      if (states_ >= until || !problem_.empty()) return;
      medium.crash_exhaustive(point, i);
      try_state(driver, acknowledged ? after : before, after, /*killed=*/false);
    }
  }
}

void Explorer::explore(Driver& driver, const World& before, const World& after) {
  CrashMedium& medium = driver.medium();
  const uint64_t until = states_ + budget_.states_per_step;
  explore_exhaustively(driver, before, after, states_ + budget_.states_per_step / 3);
  const size_t events = medium.events();
  const std::vector<size_t> drains = medium.drains();
  while (states_ < until && problem_.empty()) {
    size_t point = random_() % (events + 1);
    const uint64_t kind = random_() % 8;
    if (kind < 3 && !drains.empty()) point = drains[random_() % drains.size()];
    if (kind == 3) point = events;
    medium.set_any_word((random_() & 1) != 0);
    const bool killed = random_() % 4 == 0;
    if (killed) {
      medium.kill(point);
    } else {
      medium.crash(point, random_);
    }
    try_state(driver, point == events ? after : before, after, killed);
  }
}

std::unique_ptr<Tables> Explorer::reopen(CrashMedium& medium) {
  auto pool = pool::Pool::attach(medium.media());
  if (!pool.ok()) {
    report("the pool cannot be opened: " + pool.status().to_string(), medium, "attach");
    return nullptr;
  }
  auto tables = Tables::attach(std::move(pool).value(), /*background=*/false);
  if (!tables.ok()) {
    report("the tables cannot be opened: " + tables.status().to_string(), medium, "attach");
    return nullptr;
  }
  return std::move(tables).value();
}

void Explorer::try_state(Driver& live, const World& before, const World& after, bool killed) {
  CrashMedium& medium = live.medium();
  states_ += 1;
  const std::string where = "step " + std::to_string(steps_) + " (" + live.step_name + "), state " +
                            std::to_string(states_) + (killed ? ", killed, " : ", ") +
                            medium.describe();
  Driver driver(medium, random_());
  driver.tables = reopen(medium);
  Life life{before, after, live.reverted_worlds(before), killed, medium.events(), {}};
  if (driver.tables != nullptr) continue_life(&driver, &life, where);
  driver.drop();
  for (int i = 0; i < kSecondCrashes && problem_.empty(); ++i) second_crash(medium, life);
  if (!problem_.empty() && problem_.find(where) == std::string::npos)
    problem_ = where + "\n  then " + problem_;
  medium.undo();
}

// Check a reopened pool, write to it, walk it before or after that, and check again.
void Explorer::continue_life(Driver* driver, Life* life, const std::string& where) {
  CrashMedium& medium = driver->medium();
  World observed;
  std::string wrong =
      check(*driver->tables, {life->opened_before, life->opened_after, life->reverted}, &observed);
  if (!wrong.empty()) return report(wrong, medium, where + "\n  reopened");
  driver->adopt(observed);
  const bool walks_first = (random_() & 1) != 0;
  if (walks_first) {
    driver->walk();
    wrong = check(*driver->tables, {observed, observed}, &observed);
    if (!wrong.empty()) return report(wrong, medium, where + "\n  walked");
  }
  Boundaries boundaries(medium, driver->world);
  driver->listener = &boundaries;
  perform_random_steps(driver);
  life->acknowledged = std::move(boundaries.list);
  if (!driver->problem.empty())
    return report(driver->problem, medium, where + "\n  performing further steps");
  if (!walks_first) driver->walk();
  wrong = check(*driver->tables, {driver->world, driver->world}, &observed);
  if (!wrong.empty()) report(wrong, medium, where + "\n  after further steps");
}

// Crash again at any point of what the reopened pool did, including its opening.
void Explorer::second_crash(CrashMedium& medium, const Life& life) {
  const size_t events = medium.events();
  size_t point = random_() % (events + 1);
  const uint64_t kind = random_() % 4;
  if (kind == 0) point = events;
  if (kind == 1 && !medium.drains().empty())
    point = medium.drains()[random_() % medium.drains().size()];
  const auto& acknowledged = life.acknowledged;
  size_t done = 0;
  while (done + 1 < acknowledged.size() && acknowledged[done + 1].first <= point) ++done;
  Choices choices{acknowledged[done].second,
                  acknowledged[std::min(done + 1, acknowledged.size() - 1)].second};
  if (life.killed) {
    choices.reverted.push_back(reverted_to(life.opened_before, choices.before));
    choices.reverted.push_back(reverted_to(life.opened_after, choices.before));
    for (const World& world : life.reverted)
      choices.reverted.push_back(reverted_to(world, choices.before));
  }
  const bool opening = point < life.open_done;
  const Choices unopened{life.opened_before, life.opened_after, life.reverted};
  // Nothing that a kill left is durable before the open is complete.
  const Choices& allowed = opening && life.killed ? unopened : choices;
  medium.crash(point, random_);
  states_ += 1;
  const std::unique_ptr<Tables> tables = reopen(medium);
  if (tables != nullptr) {
    World observed;
    std::string wrong = check(*tables, allowed, &observed);
    // The new superblock copy may complete the torn one of an interrupted change. Then the change
    // has happened after all, whole.
    if (opening && wrong == kOtherCatalogue) wrong = check(*tables, unopened, &observed);
    if (!wrong.empty()) report(wrong, medium, "reopened after a second crash");
    if (problem_.empty() && (random_() & 1) != 0) {
      tables->walk();
      wrong = check(*tables, {observed, observed}, &observed);
      if (!wrong.empty()) report(wrong, medium, "walked after a second crash");
    }
  }
  medium.undo();
}

}  // namespace petps::crash
