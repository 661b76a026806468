// A table takes exactly `capacity` keys, whatever writers run in parallel: it refuses no key
// below capacity and takes none above it.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "base/atomics.h"
#include "model.h"
#include "rig.h"
#include "tests/seed.h"

namespace petps::table {
namespace {

using testing::Change;
using testing::expect_clean;
using testing::Rig;

std::vector<Change> puts(uint64_t from, uint64_t to) {
  std::vector<Change> changes;
  for (uint64_t key = from; key < to; ++key) changes.push_back({key, 1, false});
  return changes;
}

TEST(Capacity, NoKeyIsRefusedBelowCapacity) {
  for (const uint32_t threads : {1u, 4u}) {
    for (int round = 0; round < 20; ++round) {
      Rig rig(20480);
      const auto report = testing::apply(*rig.table, puts(0, 20480), threads);
      ASSERT_TRUE(report.ok()) << report.status().to_string();
      ASSERT_EQ(report.value().refused, 0u) << threads << " threads, round " << round;
      ASSERT_EQ(rig.table->status().rows, 20480u);
    }
  }
}

TEST(Capacity, SeveralWritersFillTheTableExactly) {
  constexpr uint64_t kCapacity = 8000;
  constexpr uint64_t kEach = 3000;  // four writers bring more keys than the table has room for
  Rig rig(kCapacity);
  std::vector<ApplyReport> reports(4);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t at = 0; at < kEach; at += 100)
        reports[t] +=
            testing::apply(*rig.table, puts(t * kEach + at, t * kEach + at + 100)).value();
    });
  }
  for (std::thread& thread : threads) thread.join();
  ApplyReport sum;
  for (const ApplyReport& report : reports) sum += report;
  EXPECT_EQ(sum.inserted, kCapacity);
  EXPECT_EQ(sum.refused, 4 * kEach - kCapacity);
  EXPECT_EQ(rig.table->status().rows, kCapacity);
  expect_clean(*rig.tables);
}

// Every writer deletes keys of its own, then inserts at most as many others, so that all writers
// together never need more room than exists. (They use two batches. A single batch with both is
// not one step: beside other writers it may need room for its new keys before its deletions have
// made that room.)
TEST(Capacity, WritersThatStayWithinCapacityAreNeverRefused) {
  for (const uint64_t capacity : {22, 200, 2000}) {
    Rig rig(capacity);
    std::atomic<uint64_t> refused{0};
    std::vector<std::thread> threads;
    const uint64_t share = capacity / 4;
    for (uint64_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937_64 random(tests::seed() + t);
        const uint64_t base = t << 32;
        std::vector<bool> present(4 * share, false);
        uint64_t rows = 0;
        for (int round = 0; round < 200; ++round) {
          std::vector<Change> changes;
          std::vector<bool> touched(present.size(), false);
          for (uint64_t i = 0; i < share; ++i) {
            const uint64_t key = random() % present.size();
            if (touched[key]) continue;
            touched[key] = true;
            const bool erase = present[key] && random() % 2 == 0;
            if (!present[key] && rows == share) continue;
            changes.push_back({base + key, 1, erase});
            rows += (erase ? 0 : 1) - (present[key] ? 1 : 0);
            present[key] = !erase;
          }
          const auto inserts = std::stable_partition(
              changes.begin(), changes.end(), [](const Change& change) { return change.erase; });
          (void)testing::apply(*rig.table, {changes.begin(), inserts}).value();
          refused += testing::apply(*rig.table, {inserts, changes.end()}).value().refused;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(refused.load(), 0u) << "capacity " << capacity;
    expect_clean(*rig.tables);
  }
}

// Another writer takes room while a divided batch runs. The last new keys of the batch then find no
// room until the batch has made its last deletions.
TEST(Capacity, ABatchUsesTheRoomOfItsOwnDeletions) {
  constexpr uint64_t kRows = 2000;
  constexpr uint64_t kNew = 16384;  // enough for two threads
  constexpr uint64_t kDeleted = 512;
  for (int round = 0; round < 30; ++round) {
    Rig rig(kRows + kNew + kDeleted);
    ASSERT_EQ(testing::apply(*rig.table, puts(0, kRows)).value().inserted, kRows);
    std::vector<Change> changes = puts(kRows, kRows + kNew);
    for (uint64_t key = 0; key < kDeleted; ++key) changes.push_back({key, 0, true});
    uint64_t others = 0;  // rows inserted; fewer if the thread runs late, before the deletions
    std::thread other([&] {
      while (rig.table->status().rows == kRows) base::yield();
      const uint64_t from = kRows + kNew;
      others = testing::apply(*rig.table, puts(from, from + 2 * kDeleted)).value().inserted;
    });
    const ApplyReport report = testing::apply(*rig.table, changes, 2).value();
    other.join();
    ASSERT_EQ(report.refused, 0u) << "round " << round;
    ASSERT_EQ(rig.table->status().rows, kRows + kNew - kDeleted + others);
    expect_clean(*rig.tables);
  }
}

// The batch has the new keys first, then the deletions that make room for them, in two buckets
// that cannot hold both.
TEST(Capacity, ABatchMayReplaceEveryKey) {
  Rig rig(22);
  ASSERT_EQ(testing::apply(*rig.table, puts(0, 22)).value().inserted, 22u);
  for (uint64_t round = 1; round < 20; ++round) {
    std::vector<Change> changes = puts(22 * round, 22 * round + 22);
    for (uint64_t key = 22 * round - 22; key < 22 * round; ++key) changes.push_back({key, 0, true});
    const ApplyReport report = testing::apply(*rig.table, changes).value();
    ASSERT_EQ(report.inserted, 22u) << "round " << round;
    ASSERT_EQ(report.refused, 0u) << "round " << round;
  }
  EXPECT_EQ(testing::apply(*rig.table, puts(9999, 10000)).value().refused, 1u);
  expect_clean(*rig.tables);
}

TEST(Capacity, IsExactAlsoBeforeTheWalk) {
  constexpr uint64_t kCapacity = 3000;
  for (const uint64_t rows : {kCapacity, kCapacity - 10, kCapacity / 2, uint64_t{0}}) {
    Rig rig(kCapacity);
    ASSERT_EQ(testing::apply(*rig.table, puts(0, rows)).value().inserted, rows);
    rig.reopen();
    ASSERT_FALSE(rig.tables->walked());
    ASSERT_EQ(testing::apply(*rig.table, {{0, 0, true}, {1, 0, true}}).value().deleted,
              rows == 0 ? 0u : 2u);
    const uint64_t left = kCapacity - (rows == 0 ? 0 : rows - 2);
    const ApplyReport report =
        testing::apply(*rig.table, puts(kCapacity, kCapacity + left + 5)).value();
    EXPECT_EQ(report.inserted, left) << rows << " rows";
    EXPECT_EQ(report.refused, 5u) << rows << " rows";
    rig.tables->walk();
    EXPECT_EQ(rig.table->status().rows, kCapacity);
    expect_clean(*rig.tables);
  }
}

// If the slots of an unclean open leave room, no writer waits.
TEST(Capacity, ATableWithRoomTakesKeysBeforeTheWalk) {
  Rig rig(100'000);
  ASSERT_EQ(testing::apply(*rig.table, puts(0, 20'000)).value().inserted, 20'000u);
  rig.reopen();
  EXPECT_EQ(testing::apply(*rig.table, puts(20'000, 60'000)).value().inserted, 40'000u);
  EXPECT_FALSE(rig.tables->walked());
  rig.tables->walk();
  EXPECT_EQ(rig.table->impl().occupied.load(), 60'000u);
  expect_clean(*rig.tables);
}

}  // namespace
}  // namespace petps::table
