#include <cstring>
#include <iostream>
#include <mutex>
#include <thread>

#include "commands.h"

namespace petps::lab {

using base::Status;
using table::Tables;

namespace {

constexpr uint64_t kBatchRows = 200;
constexpr uint32_t kRowBytes = 256;
// A refused round may be present in part, and so may the round that was refused after it.
constexpr uint64_t kRefusedMax = 2;
constexpr uint64_t kCapacity = 1'000'000;  // the disk is full before the table is

void say(const std::string& line) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  std::cout << line << std::endl;
}

std::vector<Change> round_of(uint64_t first, uint64_t end, uint64_t round) {
  std::vector<Change> changes;
  for (uint64_t key = first; key < end; ++key) changes.push_back({key, round});
  return changes;
}

std::string name_of(uint64_t table) { return "table" + std::to_string(table); }

Status write(Tables* tables, const std::string& name, uint64_t rows, uint64_t round) {
  for (uint64_t first = 0; first < rows; first += kBatchRows) {
    const uint64_t end = std::min(rows, first + kBatchRows);
    const Status status = apply(tables, name, round_of(first, end, round), 1);
    if (!status.ok()) return status;
  }
  return Status();
}

// Check that rows 0..rows-1 are present, whole, and of rounds `oldest` to `newest`. Return the
// problem, or "".
std::string check(const table::Table& table, uint64_t rows, uint64_t oldest, uint64_t newest) {
  std::vector<std::byte> right(kRowBytes);
  for (uint64_t key = 0; key < rows; ++key) {
    const std::string name = table.record().spec.name + " key " + std::to_string(key);
    const std::byte* row = table.lookup_one(key);
    if (row == nullptr) return name + " is missing";
    uint64_t round;
    std::memcpy(&round, row, sizeof round);
    crash::write_row(key, round, right.data(), right.size());
    if (std::memcmp(right.data(), row, right.size()) != 0) return name + " has a torn row";
    if (round < oldest || round > newest)
      return name + " is of round " + std::to_string(round) + ", expected " +
             std::to_string(oldest) + " to " + std::to_string(newest);
  }
  return "";
}

std::string check_all(const Tables& tables, uint64_t rows, const std::vector<uint64_t>& rounds) {
  const table::VerifyReport report = tables.verify();
  if (!report.clean()) return "verify: " + report.problems.front();
  const auto found = tables.tables();
  if (found.size() != rounds.size()) return std::to_string(found.size()) + " tables";
  for (size_t i = 0; i < found.size(); ++i) {
    const std::string problem = check(*found[i], rows, rounds[i], rounds[i] + kRefusedMax);
    if (!problem.empty()) return problem;
  }
  return "";
}

int answer(const std::string& problem) {
  say(problem.empty() ? "right" : "wrong: " + problem);
  return problem.empty() ? 0 : 1;
}

// Open the pool, and walk it unless it is read-only. On an error, print it and return null.
std::unique_ptr<Tables> open(const table::TablesOptions& options) {
  auto opened = Tables::open(options);
  if (!opened.ok()) {
    say("refused to open: " + opened.status().to_string());
    return nullptr;
  }
  if (!opened.value()->pool().read_only()) opened.value()->walk();
  return std::move(opened).value();
}

void close(Tables* tables) {
  const Status status = tables->close();
  say(status.ok() ? "closed" : "refused to close: " + status.to_string());
}

// Write rounds until one is refused; print each acknowledged round. After the first error every
// further write must fail too.
void write_table_until_refused(Tables* tables, uint64_t table, uint64_t rows, uint64_t round) {
  for (;; ++round) {
    const Status status = write(tables, name_of(table), rows, round);
    if (!status.ok()) {
      say("refused " + std::to_string(table) + " " + status.to_string());
      break;
    }
    say("acknowledged " + std::to_string(table) + " " + std::to_string(round));
  }
  for (int more = 0; more < 20; ++more) {
    if (write(tables, name_of(table), 1, round).ok())
      say("wrong: a write after a failed one was acknowledged");
  }
}

}  // namespace

int make_rounds(const table::TablesOptions& options, uint64_t tables, uint64_t rows) {
  auto created = Tables::create(options);
  if (!created.ok()) {
    say("refused to create: " + created.status().to_string());
    return 0;
  }
  Tables* const opened = created.value().get();
  Status status = opened->pool().create_instance("model", "model@1", 1).status();
  for (uint64_t table = 0; table < tables && status.ok(); ++table) {
    pool::TableSpec spec;
    spec.name = name_of(table);
    spec.instance = 1;
    spec.dim = kRowBytes / 4;
    spec.row_bytes = kRowBytes;
    spec.capacity = std::min(kCapacity, 10 * rows);
    status = opened->create_table(spec).status();
    if (status.ok()) status = write(opened, spec.name, rows, 1);
  }
  say(status.ok() ? "made" : "refused to fill: " + status.to_string());
  close(opened);
  return 0;
}

int write_rounds(const table::TablesOptions& options, uint64_t rows, uint64_t first,
                 uint64_t last) {
  const auto tables = open(options);
  if (tables == nullptr) return 0;
  for (uint64_t round = first; round <= last; ++round) {
    const Status status = write(tables.get(), name_of(0), rows, round);
    if (!status.ok()) {
      say("refused to write: " + status.to_string());
      break;
    }
    say("acknowledged 0 " + std::to_string(round));
  }
  close(tables.get());
  return 0;
}

int grow_rounds(const table::TablesOptions& options, uint64_t rows) {
  const auto tables = open(options);
  if (tables == nullptr) return 0;
  Status status;
  for (;; rows += kBatchRows) {
    status = apply(tables.get(), name_of(0), round_of(rows, rows + kBatchRows, 1), 1);
    if (!status.ok()) break;
  }
  say("refused to grow: " + status.to_string());
  say("rows " + std::to_string(rows));
  const std::string problem = check_all(*tables, rows, {1});
  close(tables.get());
  return answer(problem);
}

int write_until_refused(const table::TablesOptions& options, uint64_t rows) {
  std::vector<uint64_t> rounds(2);
  while (std::cin >> rounds[0] >> rounds[1]) {
    const auto tables = open(options);
    if (tables == nullptr) continue;
    answer(check_all(*tables, rows, rounds));
    std::thread second(
        [&] { write_table_until_refused(tables.get(), 1, rows, rounds[1] + kRefusedMax + 1); });
    write_table_until_refused(tables.get(), 0, rows, rounds[0] + kRefusedMax + 1);
    second.join();
    for (const auto& table : tables->tables()) {
      const std::string problem = check(*table, rows, 1, UINT64_MAX);
      if (!problem.empty()) say("wrong: in memory " + problem);
    }
    say("stopped");
  }
  return 0;
}

int check_rounds(const table::TablesOptions& options, uint64_t rows,
                 const std::vector<uint64_t>& rounds) {
  table::TablesOptions only_read = options;
  only_read.pool.media.access = media::Access::kReadOnly;
  const auto tables = open(only_read);
  if (tables == nullptr) return 1;
  return answer(check_all(*tables, rows, rounds));
}

}  // namespace petps::lab
