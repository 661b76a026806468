// The locks of a table's ranges, and batches of several writers: their result equals that of the
// batches one after another.
#include "table/range_locks.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "index/index.h"
#include "model.h"
#include "rig.h"
#include "tests/seed.h"

namespace petps::table {
namespace {

using testing::Change;
using testing::expect_clean;
using testing::Model;
using testing::Rig;

void wait_until(const std::function<bool()>& condition) {
  while (!condition()) std::this_thread::yield();
}

TEST(RangeLocks, TwoWritersBeginAtOppositeEnds) {
  RangeLocks range_locks;
  EXPECT_EQ(range_locks.take_one(kAllRanges, 0), 0u);
  EXPECT_EQ(range_locks.take_one(kAllRanges, 1), kRanges - 1);
  EXPECT_EQ(range_locks.take_one(kAllRanges, 0), 1u);
  EXPECT_EQ(range_locks.take_one(kAllRanges, 1), kRanges - 2);
}

TEST(RangeLocks, AWriterWaitsForATakenRange) {
  RangeLocks range_locks;
  EXPECT_EQ(range_locks.take_one(0b0100, 0), 2u);
  std::atomic<bool> taken{false};
  std::thread other([&] {
    EXPECT_EQ(range_locks.take_one(0b0100, 1), 2u);
    taken = true;
    range_locks.give(0b0100);
  });
  EXPECT_EQ(range_locks.take_one(kAllRanges, 0), 0u);  // other ranges stay available
  EXPECT_FALSE(taken);
  range_locks.give(0b0100);
  other.join();
  EXPECT_TRUE(taken);
}

TEST(RangeLocks, AWriterOfAllRangesComesBeforeALaterWriterOfOne) {
  RangeLocks range_locks;
  ASSERT_EQ(range_locks.take_one(0b0001, 0), 0u);
  std::atomic<int> order{0};
  int all_taken_at = 0;
  std::atomic<bool> waits{false};
  std::thread whole([&] {
    waits = true;
    range_locks.take_all();
    all_taken_at = ++order;
    range_locks.give(kAllRanges);
  });
  wait_until([&] { return waits.load(); });
  // However long the spin lasts, repeated takes of a single range do not starve the writer of all
  // ranges.
  for (int i = 0; i < 1000 && order == 0; ++i) {
    range_locks.give(0b0001);
    ASSERT_EQ(range_locks.take_one(0b0001, 0), 0u);
    std::this_thread::yield();
  }
  range_locks.give(0b0001);
  whole.join();
  EXPECT_EQ(all_taken_at, 1);
}

TEST(Turns, OnlySoManyWritersHaveATurn) {
  Turns turns(2);
  {
    const std::scoped_lock first(turns);
    const std::scoped_lock second(turns);  // two have a turn
  }
  std::atomic<int> inside{0};
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 6; ++writer) {
    writers.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        const std::lock_guard turn(turns);
        EXPECT_LE(inside.fetch_add(1) + 1, 2);
        if (i % 16 == 0) std::this_thread::yield();
        inside.fetch_sub(1);
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
}

TEST(Turns, AreGivenInOrderOfArrival) {
  Turns turns(1);
  std::vector<size_t> order;
  std::vector<std::thread> writers;
  turns.lock();
  for (size_t writer = 0; writer < 4; ++writer) {
    writers.emplace_back([&, writer] {
      const std::lock_guard turn(turns);
      order.push_back(writer);
    });
    wait_until([&] { return turns.waiting() == writer + 1; });
  }
  turns.unlock();
  {
    const std::lock_guard newcomer(turns);
    order.push_back(4);
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(order, (std::vector<size_t>{0, 1, 2, 3, 4}));
}

// Two threads hold the shared side alternately, overlapping, so it is never empty unless a
// newcomer has to wait.
TEST(Gate, TheExclusiveSideIsNotStarvedByOverlappingSharedHolders) {
  constexpr uint64_t kEnough = 2'000'000;
  constexpr int kPatience = 20'000;  // yields, for a newcomer that waits for the exclusive side
  Gate gate;
  std::atomic<bool> stop{false};
  std::array<std::atomic<uint64_t>, 2> entered{};
  std::vector<std::thread> shared;
  for (size_t me = 0; me < 2; ++me) {
    shared.emplace_back([&, me] {
      while (!stop && entered[me] < kEnough) {
        const uint64_t seen = entered[1 - me];
        gate.lock_shared();
        entered[me] += 1;
        for (int i = 0; i < kPatience && entered[1 - me] == seen && !stop; ++i)
          std::this_thread::yield();
        gate.unlock_shared();
      }
    });
  }
  wait_until([&] { return entered[0] > 10 && entered[1] > 10; });
  for (int i = 0; i < 3; ++i) {
    gate.lock();
    gate.unlock();
  }
  EXPECT_LT(entered[0] + entered[1], 2 * kEnough) << "it waited until the others had finished";
  stop = true;
  for (std::thread& thread : shared) thread.join();
}

Rig make_rig(uint64_t capacity) {
  return Rig(capacity, 64, /*background=*/true, uint64_t{64} << 20);
}

// A scan may stay open for any time, and its owner may wait for a batch (a catch-up does). So a
// move that waits for the scan must not block the batch. The pending move runs once the scan has
// ended.
TEST(Scan, ABatchRunsBesideAMoveThatWaitsForTheScan) {
  constexpr uint64_t kKeys = 4000;
  Rig rig = make_rig(kKeys);
  Table& table = *rig.table;
  std::vector<Change> changes(kKeys);
  for (uint64_t key = 0; key < kKeys; ++key) changes[key] = {key, key + 1, false};
  ASSERT_TRUE(testing::apply(table, changes).ok());
  const auto displaced = [&](uint64_t key) {
    return table.bucket_reads(std::span(&key, 1)).first > 1;
  };
  std::vector<uint64_t> hot;
  for (uint64_t key = 0; key < kKeys && hot.size() < 8; ++key)
    if (displaced(key)) hot.push_back(key);
  ASSERT_FALSE(hot.empty());

  std::optional<Table::ScanGuard> scan(table);
  table.set_hot_keys(hot);
  std::future<base::Result<uint64_t>> move =
      std::async(std::launch::async, [&] { return table.migrate(hot); });
  std::future<void> batches = std::async(std::launch::async, [&] {
    const std::vector<Change> few(changes.begin(), changes.begin() + 10);
    for (int i = 0; i < 200; ++i) {
      ASSERT_TRUE(testing::apply(table, few).ok());
      std::this_thread::sleep_for(std::chrono::microseconds(100));  // lets the move run
    }
  });
  EXPECT_EQ(batches.wait_for(std::chrono::seconds(30)), std::future_status::ready)
      << "a batch waits for the scan";
  EXPECT_EQ(move.wait_for(std::chrono::seconds(30)), std::future_status::ready)
      << "a move waits for the scan";
  EXPECT_TRUE(displaced(hot.front()));
  scan.reset();
  batches.get();
  const auto moved = move.get();
  ASSERT_TRUE(moved.ok());
  EXPECT_EQ(moved.value(), 0u);
  wait_until([&] { return !displaced(hot.front()); });
  expect_clean(*rig.tables);
}

// Each writer owns the keys of one residue and sends batches of several slices, with repeated
// keys and deletions.
TEST(ParallelApply, ResultEqualsThatOfOneWriterAfterAnother) {
  constexpr uint64_t kWriters = 3;
  constexpr uint64_t kKeys = 9000;
  const uint64_t s = tests::seed();
  Rig rig = make_rig(kKeys);
  std::array<Model, kWriters> models;
  std::vector<std::thread> writers;
  for (uint64_t w = 0; w < kWriters; ++w) {
    writers.emplace_back([&, w] {
      std::mt19937_64 rng(s + w);
      uint64_t value = 1;
      for (int round = 0; round < 20; ++round) {
        std::vector<Change> changes(rng() % 6000 + 1);
        for (Change& change : changes)
          change = {rng() % (kKeys / kWriters) * kWriters + w, value++, rng() % 8 == 0};
        const auto report = testing::apply(*rig.table, changes);
        ASSERT_TRUE(report.ok()) << report.status().to_string();
        ASSERT_EQ(report.value().refused, 0u);
        testing::apply(&models[w], changes);
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  Model all;
  for (const Model& model : models) all.insert(model.begin(), model.end());
  std::vector<uint64_t> keys(kKeys);
  for (uint64_t key = 0; key < kKeys; ++key) keys[key] = key;
  EXPECT_EQ(testing::compare(*rig.table, all, keys), "");
  expect_clean(*rig.tables);
  EXPECT_EQ(rig.tables->verify().rows, all.size());
}

// Several threads apply one batch: counts and rows equal those of one thread, and the last entry
// of a repeated key counts.
TEST(ParallelApply, SeveralThreadsApplyABatchLikeOneThread) {
  constexpr uint64_t kKeys = 60'000;
  const uint64_t s = tests::seed();
  std::array<Rig, 2> rigs = {make_rig(kKeys), make_rig(kKeys)};
  std::mt19937_64 rng(s);
  Model model;
  for (uint64_t round = 0; round < 4; ++round) {
    std::vector<Change> changes(40'000 + rng() % 10'000);
    for (uint64_t i = 0; i < changes.size(); ++i)
      changes[i] = {rng() % kKeys, round << 32 | i, rng() % 8 == 0};
    const auto by_one = testing::apply(*rigs[0].table, changes, 1);
    const auto by_four = testing::apply(*rigs[1].table, changes, 4);
    ASSERT_TRUE(by_one.ok() && by_four.ok());
    testing::apply(&model, changes);
    // The reports of a key with two entries depend on whether both are in one slice; the sums do
    // not.
    EXPECT_EQ(by_one.value().inserted - by_one.value().deleted,
              by_four.value().inserted - by_four.value().deleted);
    EXPECT_EQ(by_four.value().refused, 0u);
    const ApplyReport& r = by_four.value();
    EXPECT_EQ(r.inserted + r.updated + r.deleted + r.absent + r.superseded, changes.size());
  }
  std::vector<uint64_t> keys(kKeys);
  for (uint64_t key = 0; key < kKeys; ++key) keys[key] = key;
  for (const Rig& rig : rigs) {
    EXPECT_EQ(testing::compare(*rig.table, model, keys), "");
    expect_clean(*rig.tables);
  }
}

// In a full table the deletions of a batch make room for its new keys, in any range, also beside
// another writer.
TEST(ParallelApply, InAFullTableDeletionsMakeRoom) {
  constexpr uint64_t kWriters = 2;
  constexpr uint64_t kRows = 512;  // of each writer; one slice replaces half of them
  Rig rig = make_rig(kWriters * kRows);
  std::vector<std::thread> writers;
  std::atomic<uint64_t> ready{0};
  for (uint64_t w = 0; w < kWriters; ++w) {
    writers.emplace_back([&, w] {
      std::vector<Change> first;
      for (uint64_t i = 0; i < kRows; ++i) first.push_back({(i << 8) + w, 1, false});
      ASSERT_TRUE(testing::apply(*rig.table, first).ok());
      ready += 1;
      wait_until([&] { return ready == kWriters; });
      for (uint64_t round = 0; round < 200; ++round) {
        std::vector<Change> changes;
        for (uint64_t i = 0; i < kRows / 2; ++i) {
          changes.push_back({((round * kRows / 2 + i) << 8) + w, 0, true});
          changes.push_back({((round * kRows / 2 + i + kRows) << 8) + w, round + 2, false});
        }
        const auto report = testing::apply(*rig.table, changes);
        ASSERT_TRUE(report.ok()) << report.status().to_string();
        ASSERT_EQ(report.value().refused, 0u) << "round " << round;
        ASSERT_EQ(report.value().deleted, kRows / 2);
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(rig.table->status().rows, kWriters * kRows);
  expect_clean(*rig.tables);
}

// The keys of a range have consecutive home buckets, and every range gets an equal share.
TEST(ParallelApply, RangesShareTheBucketsEvenly) {
  std::array<uint64_t, kRanges> count{};
  for (uint64_t key = 0; key < 40'000; ++key) count[index::Index::range_of(key, kRanges)] += 1;
  for (const uint64_t n : count) EXPECT_NEAR(static_cast<double>(n), 10'000, 500);
}

}  // namespace
}  // namespace petps::table
