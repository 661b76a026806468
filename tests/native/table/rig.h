// Tables over memory that outlives them, so that a test can forget a process and reopen its pool.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "table/impl.h"
#include "table/table.h"
#include "tests/native/pool/memory_pool.h"

namespace petps::table::testing {

using pool::testing_support::Memory;
using pool::testing_support::spec;

// Make a pool with one instance "model@1" of one partition.
inline std::unique_ptr<Tables> make_tables(Memory& memory, bool background = false) {
  return Tables::attach(memory.format(1), background).value();
}

inline void expect_clean(const Tables& tables) {
  const VerifyReport report = tables.verify();
  EXPECT_TRUE(report.clean()) << report.problem_count << " problems, first: "
                              << (report.problems.empty() ? "" : report.problems.front());
}

// A pool with one table "t".
struct Rig {
  explicit Rig(uint64_t capacity, uint32_t row_bytes = 64, bool background = false,
               uint64_t reserve = Memory::kReserve)
      : memory(reserve), tables(make_tables(memory, background)) {
    table = tables->create_table(spec("t", capacity, row_bytes)).value();
  }
  // Reopen the pool without a close, as after a kill.
  void reopen(bool background = false) {
    memory.keep(tables->pool());
    table.reset();
    tables.reset();
    tables = Tables::attach(memory.attach().value(), background).value();
    table = tables->find("model@1", "t");
  }
  const index::Index& index() const { return table->impl().index(); }
  // Return keys whose home is bucket `home`.
  std::vector<uint64_t> keys_of(uint64_t home, size_t count) const {
    std::vector<uint64_t> keys;
    for (uint64_t key = 1; keys.size() < count; ++key) {
      if (index().path_of(key).home == home) keys.push_back(key);
    }
    return keys;
  }

  Memory memory;
  std::unique_ptr<Tables> tables;
  TablePointer table;
};

}  // namespace petps::table::testing
