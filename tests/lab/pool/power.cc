#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <iostream>

#include "commands.h"

namespace petps::lab {

using base::Code;
using base::Status;
using crash::Choices;
using crash::World;
using table::Tables;

namespace {

void say(const std::string& line) { std::cout << line << std::endl; }

// Write a random share of the pool's pages to the disk; the other pages stay in memory.
Status write_back(const std::string& path, uint64_t seed) {
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return base::errno_status(Code::kIoError, "open " + path, errno);
  struct stat attributes = {};
  int error_number = fstat(file, &attributes) == 0 ? 0 : errno;
  constexpr off_t kPageBytes = 4096;
  constexpr unsigned kWriteAndWait = SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  std::mt19937_64 random(seed);
  const uint64_t tenths = random() % 9 + 1;
  for (off_t at = 0; at < attributes.st_size && error_number == 0; at += kPageBytes) {
    if (random() % 10 < tenths && sync_file_range(file, at, kPageBytes, kWriteAndWait) != 0)
      error_number = errno;
  }
  ::close(file);
  if (error_number == 0) return Status();
  return base::errno_status(Code::kIoError, "write back " + path, error_number);
}

int wrong(const std::string& reason) {
  say("wrong: " + reason);
  return 1;
}

// Check a pool that is accepted after a loss of power. Every row must be whole and must have been
// written for its key at some time, unless verify reports a problem. Return the problem, or "".
std::string check_accepted(const table::TablesOptions& options, const std::vector<World>& worlds) {
  table::TablesOptions accepting = options;
  accepting.allow_lost_power = true;
  auto opened = Tables::open(accepting);
  if (!opened.ok()) return "";  // a refusal is allowed
  const Tables& tables = *opened.value();
  if (!tables.verify().clean()) return "";
  std::vector<std::string> names;
  for (const auto& table : tables.tables()) names.push_back(table->record().spec.name);
  for (const World& world : worlds) {
    std::vector<std::string> world_names;
    for (const auto& table : world.tables) world_names.push_back(table.shape->spec.name);
    if (world_names != names) continue;
    World seen = world;
    const std::string problem = crash::check_rows(tables, {world, world, worlds}, &seen);
    return problem.empty() ? "" : "verify is clean, but " + problem;
  }
  return "verify is clean, but the pool never had these tables";
}

// Check that a right pool still works: write to it, close it, open it. Return the problem, or "".
std::string check_further(const table::TablesOptions& options, std::unique_ptr<Tables> tables,
                          World world, uint64_t seed) {
  tables->walk();
  World seen;
  std::string problem = crash::check(*tables, {world, world}, &seen);
  if (!problem.empty()) return "after the walk: " + problem;
  uint64_t value = uint64_t{1} << 40;
  std::mt19937_64 random(seed);
  for (crash::TableWorld& table : world.tables) {
    const auto changes = random_changes(table, 20, 50, 10, &value, &random);
    expect(&table, changes);
    const Status status = apply(tables.get(), table.shape->spec.name, changes, 1);
    if (!status.ok()) return "a write afterwards: " + status.to_string();
  }
  const Status closed = tables->close();
  if (!closed.ok()) return "a close afterwards: " + closed.to_string();
  tables.reset();
  auto again = Tables::open(options);
  if (!again.ok()) return "an open afterwards: " + again.status().to_string();
  problem = crash::check(*again.value(), {world, world}, &seen);
  return problem.empty() ? "" : "after a write and a close: " + problem;
}

struct Expected {
  World before;
  World after;
  bool power = false;       // whether no acknowledged row may be missing
  bool is_created = false;  // whether the creation of the pool was acknowledged
  bool was_closed = false;
  std::vector<World> earlier;  // the worlds after every step, up to and including `after`
};

Expected expected_of(const std::vector<Step>& steps, size_t acknowledged) {
  Expected expected;
  const auto is_power = [](const Step& step) {
    return step.durability == media::Durability::kPower;
  };
  const Step& next = steps[std::min(acknowledged, steps.size() - 1)];
  expected.power = is_power(next);
  if (acknowledged > 0) {
    expected.before = steps[acknowledged - 1].after;
    expected.power = expected.power && is_power(steps[acknowledged - 1]);
    expected.is_created = true;
  }
  expected.after = next.after;
  for (size_t i = 0; i < acknowledged; ++i) {
    expected.earlier.push_back(steps[i].after);
    expected.was_closed = expected.was_closed || steps[i].is_closed;
  }
  expected.earlier.push_back(next.after);
  return expected;
}

// Return whether a pool may refuse to open. With `process` it may refuse after a power cut: before
// its first close, possibly nothing has reached the disk, and both superblocks may be torn.
bool may_refuse(const Expected& expected, const Status& status) {
  if (!expected.is_created) return true;
  if (expected.power) return false;
  if (status.code() == Code::kFailedPrecondition)
    return status.message().find("durability 'process'") != std::string_view::npos;
  return status.code() == Code::kDataLoss || !expected.was_closed;
}

}  // namespace

int perform_steps(const table::TablesOptions& options, uint64_t seed, Regime regime) {
  const std::vector<Step> steps = make_steps(seed, regime);
  say("steps " + std::to_string(steps.size()));
  Live live;
  live.options = options;
  size_t next = 0;
  for (std::string line; std::getline(std::cin, line);) {
    if (line != "step") {
      const Status status =
          write_back(options.pool.media.path, std::stoull(line.substr(line.find(' '))));
      say(status.ok() ? "done" : "failed: " + status.to_string());
      continue;
    }
    const Step& step = steps.at(next++);
    const Status status = step.perform(&live);
    say(status.ok() ? "done " + step.name : "failed " + step.name + ": " + status.to_string());
    if (!status.ok()) break;
  }
  std::cout.flush();
  _exit(0);  // leave the pool as a killed process leaves it
}

int check_steps(const table::TablesOptions& options, uint64_t seed, Regime regime,
                size_t acknowledged) {
  const Expected expected = expected_of(make_steps(seed, regime), acknowledged);
  auto opened = Tables::open(options);
  if (!opened.ok()) {
    const std::string error = opened.status().to_string();
    if (!may_refuse(expected, opened.status())) return wrong("it does not open: " + error);
    const std::string problem = check_accepted(options, expected.earlier);
    if (!problem.empty()) return wrong(problem);
    say("noticed: " + error);
    return 0;
  }
  World seen;
  std::string problem =
      crash::check(*opened.value(), Choices{expected.before, expected.after}, &seen);
  if (problem.empty())
    problem = check_further(options, std::move(opened).value(), seen, seed + acknowledged);
  if (!problem.empty()) return wrong(problem);
  say("right");
  return 0;
}

}  // namespace petps::lab
