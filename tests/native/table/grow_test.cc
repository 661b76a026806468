// A table grows while it is read and written: no key is missed, none comes back, and after a kill
// the table has one whole index.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <thread>

#include "model.h"
#include "rig.h"
#include "tests/seed.h"

namespace petps::table {
namespace {

using base::Code;
using testing::Change;
using testing::Model;
using testing::Rig;

std::vector<uint64_t> keys_up_to(uint64_t count) {
  std::vector<uint64_t> keys(count);
  for (uint64_t i = 0; i < count; ++i) keys[i] = i + 1;
  return keys;
}

std::vector<Change> changes_of(const std::vector<uint64_t>& keys, uint64_t value,
                               bool erase = false) {
  std::vector<Change> changes;
  for (const uint64_t key : keys) changes.push_back({key, value, erase});
  return changes;
}

uint64_t refused(Rig& rig, const std::vector<uint64_t>& keys, uint64_t value) {
  const auto report = testing::apply(*rig.table, changes_of(keys, value));
  EXPECT_TRUE(report.ok()) << report.status().to_string();
  return report.value().refused;
}

GrowOptions unpaced(uint64_t capacity) { return {capacity, false, nullptr}; }

// Call `visit` between the steps of a growth, the swap included.
GrowOptions stepping(uint64_t capacity, std::function<bool(uint64_t, uint64_t)> visit) {
  return {capacity, false, std::move(visit)};
}

TEST(Grow, AFullTableTakesNewKeysAgain) {
  Rig rig(1000);
  const std::vector<uint64_t> keys = keys_up_to(5000);
  EXPECT_EQ(refused(rig, keys, 7), 4000u);
  const std::vector<uint64_t> held(keys.begin(), keys.begin() + 1000);
  Model model;
  testing::apply(&model, changes_of(held, 7));
  EXPECT_EQ(testing::compare(*rig.table, model, keys), "");
  ASSERT_TRUE(rig.table->grow(unpaced(5000)).ok());
  EXPECT_EQ(rig.table->capacity(), 5000u);
  EXPECT_EQ(rig.table->status().capacity, 5000u);
  EXPECT_EQ(rig.table->status().rows, 1000u);
  EXPECT_EQ(testing::compare(*rig.table, model, keys), "");
  EXPECT_EQ(refused(rig, keys, 8), 0u);
  testing::apply(&model, changes_of(keys, 8));
  EXPECT_EQ(testing::compare(*rig.table, model, keys), "");
  testing::expect_clean(*rig.tables);
  EXPECT_EQ(refused(rig, keys_up_to(5001), 8), 1u) << "the new capacity is a limit too";
}

TEST(Grow, SurvivesAKillAndAClose) {
  Rig rig(1000);
  Model model;
  for (const uint64_t capacity : {2000u, 4000u, 4001u}) {
    const auto keys = keys_up_to(capacity / 2);
    ASSERT_EQ(refused(rig, keys, capacity), 0u);
    testing::apply(&model, changes_of(keys, capacity));
    ASSERT_TRUE(rig.table->grow(unpaced(capacity)).ok());
    rig.reopen();
    EXPECT_EQ(rig.table->capacity(), capacity);
    EXPECT_EQ(testing::compare(*rig.table, model, keys_up_to(5000)), "");
    rig.tables->walk();
    testing::expect_clean(*rig.tables);
    EXPECT_EQ(rig.table->status().rows, model.size());
  }
  ASSERT_TRUE(rig.tables->close().ok());
  rig.reopen();
  EXPECT_EQ(rig.table->status().rows, model.size());
  EXPECT_EQ(testing::compare(*rig.table, model, keys_up_to(5000)), "");
  testing::expect_clean(*rig.tables);
}

TEST(Grow, TheArrayOfBeforeIsFreeAndIsUsedAgain) {
  Rig rig(3000);
  ASSERT_EQ(refused(rig, keys_up_to(3000), 1), 0u);
  const uint64_t first = rig.table->status().index_bytes;
  ASSERT_TRUE(rig.table->grow(unpaced(6000)).ok());
  const uint64_t free = rig.tables->pool().free_bytes();
  EXPECT_GE(free, first);
  EXPECT_LT(free, first + rig.tables->pool().unit_bytes());
  rig.reopen();
  EXPECT_EQ(rig.tables->pool().free_bytes(), free) << "a reopen finds the same space free";
  const uint64_t size = rig.tables->pool().medium().size();
  ASSERT_TRUE(rig.tables->create_table(testing::spec("other", 3000, 64)).ok());
  EXPECT_LT(rig.tables->pool().free_bytes(), free);
  EXPECT_LE(rig.tables->pool().medium().size(), size);
}

TEST(Grow, NewRowsUseTheSpaceOfTheIndexOfBefore) {
  Rig rig(20'000);
  ASSERT_EQ(refused(rig, keys_up_to(20'000), 1), 0u);
  ASSERT_TRUE(rig.table->grow(unpaced(40'000)).ok());
  ASSERT_GT(rig.tables->pool().free_bytes(), 4 * rig.tables->pool().unit_bytes());
  ASSERT_EQ(refused(rig, keys_up_to(40'000), 2), 0u);
  EXPECT_EQ(rig.tables->pool().free_bytes(), 0u);
  rig.reopen();
  rig.tables->walk();
  EXPECT_EQ(rig.table->status().rows, 40'000u);
  testing::expect_clean(*rig.tables);
}

TEST(Grow, RefusesWhatItCannotDo) {
  Rig rig(1000);
  for (const uint64_t capacity : {uint64_t{0}, uint64_t{999}, uint64_t{1000}, uint64_t{1} << 41}) {
    const base::Status status = rig.table->grow(unpaced(capacity));
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << capacity;
    EXPECT_NE(std::string(status.message()).find("has capacity 1000"), std::string::npos);
  }
  const base::Status full = rig.table->grow(unpaced(uint64_t{1} << 40));
  EXPECT_EQ(full.code(), Code::kResourceExhausted) << full.to_string();
  EXPECT_EQ(rig.tables->pool().free_bytes(), 0u);
  ASSERT_TRUE(rig.table->grow(unpaced(1001)).ok()) << "a refusal leaves nothing behind";
}

TEST(Grow, ACancelledGrowthLeavesTheTableAsItWas) {
  Rig rig(2000);
  const auto keys = keys_up_to(2000);
  ASSERT_EQ(refused(rig, keys, 1), 0u);
  Model model;
  testing::apply(&model, changes_of(keys, 1));
  for (const uint64_t steps : {0u, 1u, 2u}) {
    uint64_t left = steps;
    const auto status =
        rig.table->grow(stepping(4000, [&](uint64_t, uint64_t) { return left-- > 0; }));
    EXPECT_EQ(status.code(), Code::kFailedPrecondition) << status.to_string();
    EXPECT_EQ(rig.table->capacity(), 2000u);
    EXPECT_EQ(testing::compare(*rig.table, model, keys), "");
    EXPECT_GT(rig.tables->pool().free_bytes(), 0u);
    testing::expect_clean(*rig.tables);
  }
  rig.reopen();
  EXPECT_EQ(testing::compare(*rig.table, model, keys), "");
  ASSERT_TRUE(rig.table->grow(unpaced(4000)).ok());
  EXPECT_EQ(testing::compare(*rig.table, model, keys), "");
}

// Between all steps: insert, replace, delete, bring back, in buckets that are copied and in those
// that are not. Then kill the process at that moment, or let it go on.
TEST(Grow, EveryKindOfWriteBetweenTheSteps) {
  std::mt19937_64 random(tests::seed());
  for (int round = 0; round < 12; ++round) {
    Rig rig(3000);
    Model model;
    const auto change = [&](uint64_t count, uint64_t value) {
      std::vector<Change> changes;
      for (uint64_t i = 0; i < count; ++i)
        changes.push_back({1 + random() % 4000, value, random() % 3 == 0});
      const auto report = testing::apply(*rig.table, changes);
      ASSERT_TRUE(report.ok());
      ASSERT_EQ(report.value().refused, 0u);
      testing::apply(&model, changes);
    };
    for (uint64_t i = 0; i < 40; ++i) change(60, i);
    const uint64_t killed_at = random() % 12;
    uint64_t step = 0;
    const auto status = rig.table->grow(stepping(9000, [&](uint64_t, uint64_t) {
      change(40, 1000 + step);
      EXPECT_EQ(testing::compare(*rig.table, model, keys_up_to(4000)), "");
      return step++ != killed_at;
    }));
    EXPECT_EQ(status.ok(), step <= killed_at);
    if (round % 2 == 0) rig.reopen();
    EXPECT_EQ(testing::compare(*rig.table, model, keys_up_to(4000)), "");
    rig.tables->walk();
    testing::expect_clean(*rig.tables);
    EXPECT_EQ(rig.table->status().rows, model.size());
    for (uint64_t i = 0; i < 20; ++i) change(60, 5000 + i);
    EXPECT_EQ(testing::compare(*rig.table, model, keys_up_to(4000)), "");
    testing::expect_clean(*rig.tables);
  }
}

TEST(Grow, APinKeepsTheArrayOfBefore) {
  Rig rig(2000);
  const auto keys = keys_up_to(2000);
  ASSERT_EQ(refused(rig, keys, 1), 0u);
  epoch::Reader* const reader = rig.tables->epochs().lease();
  const index::Index& before = rig.index();
  std::atomic<bool> grown{false};
  std::thread grower;
  {
    const epoch::Pin pin = reader->pin();
    grower = std::thread([&] {
      EXPECT_TRUE(rig.table->grow(unpaced(8000)).ok());
      grown = true;
    });
    while (rig.table->capacity() == 2000) std::this_thread::yield();
    // Writers keep the array of before equal: a pull that still searches it misses nothing.
    ASSERT_EQ(refused(rig, keys_up_to(2100), 2), 0u);
    EXPECT_EQ(rig.tables->pool().free_bytes(), 0u);
    std::vector<pool::SlotRef> refs(2100), now(2100);
    before.find_refs(keys_up_to(2100), refs.data());
    rig.index().find_refs(keys_up_to(2100), now.data());
    EXPECT_TRUE(std::equal(refs.begin(), refs.begin() + 2000, now.begin()));
    // No search that began before the swap has to find a newer key, and there may be no room.
    EXPECT_EQ(refs, [&] {
      std::fill(now.begin() + 2000, now.end(), 0);
      return now;
    }());
    EXPECT_FALSE(grown.load());
    EXPECT_EQ(rig.table->grow(unpaced(9000)).code(), Code::kFailedPrecondition);
  }
  grower.join();
  rig.tables->epochs().release(reader);
  EXPECT_GT(rig.tables->pool().free_bytes(), 0u);
  ASSERT_EQ(refused(rig, keys_up_to(8000), 3), 0u);
  testing::expect_clean(*rig.tables);
}

TEST(Grow, AFailureKeepsTheRequestOfARecount) {
  Rig rig(2000);
  rig.tables->walk();
  rig.table->impl().index().request_recount();
  uint64_t lowered = 0;
  ASSERT_FALSE(rig.table->impl().recount_step(&lowered)) << "it has begun";
  EXPECT_FALSE(rig.table->grow(unpaced(1)).ok());
  EXPECT_TRUE(rig.index().wants_recount());
}

TEST(Grow, AScanHoldsOffTheSwap) {
  Rig rig(2000);
  ASSERT_EQ(refused(rig, keys_up_to(2000), 1), 0u);
  std::atomic<bool> waits{false};
  std::thread grower;
  {
    const Table::ScanGuard guard(*rig.table);
    grower = std::thread([&] {
      EXPECT_TRUE(rig.table
                      ->grow(stepping(8000,
                                      [&](uint64_t copied, uint64_t all) {
                                        waits = copied == all;
                                        return true;
                                      }))
                      .ok());
    });
    while (!waits) std::this_thread::yield();
    EXPECT_EQ(rig.table->capacity(), 2000u);
    EXPECT_EQ(rig.table->scan(0, rig.index().bucket_count()).keys.size(), 2000u);
  }
  grower.join();
  EXPECT_EQ(rig.table->capacity(), 8000u);
  EXPECT_EQ(rig.table->scan(0, rig.index().bucket_count()).keys.size(), 2000u);
}

TEST(Grow, ADroppedTableStopsGrowing) {
  Rig rig(2000);
  ASSERT_EQ(refused(rig, keys_up_to(2000), 1), 0u);
  const auto instance = rig.tables->pool().create_instance("model", "model@2", 1);
  ASSERT_TRUE(instance.ok());
  auto spec = testing::spec("t", 2000, 64);
  spec.instance = instance.value().id;
  const uint64_t before_table = rig.tables->pool().medium().size();
  TablePointer table = rig.tables->create_table(spec).value();
  ASSERT_TRUE(testing::apply(*table, changes_of(keys_up_to(2000), 1)).ok());
  const auto status = table->grow(stepping(9000, [&](uint64_t copied, uint64_t) {
    if (copied > 0 && rig.tables->find(table->id()) != nullptr) {
      EXPECT_TRUE(rig.tables->drop_instance(instance.value().id).ok());
    }
    return true;
  }));
  EXPECT_EQ(status.code(), Code::kNotFound) << status.to_string();
  table.reset();
  rig.tables->reclaim();
  testing::expect_clean(*rig.tables);
  // All that the dropped table had is free, once, and the array that it did not get is too.
  EXPECT_EQ(rig.tables->pool().free_bytes(), rig.tables->pool().medium().size() - before_table);
  rig.reopen();
  testing::expect_clean(*rig.tables);
  EXPECT_EQ(rig.tables->pool().free_bytes(), rig.tables->pool().medium().size() - before_table);
}

// Two writers, two readers and hot moves beside several growths. Each writer owns its keys and
// knows what they must be; keys that nobody changes are never missed.
TEST(Grow, BesideWritersReadersAndMoves) {
  Rig rig(3000, 64, /*background=*/true);
  constexpr uint64_t kStable = 1000;
  std::vector<Change> stable;
  for (uint64_t key = 1; key <= kStable; ++key) stable.push_back({key, 1, false});
  ASSERT_TRUE(testing::apply(*rig.table, stable).ok());
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  std::array<Model, 2> models;
  for (uint64_t t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(tests::seed() + t);
      for (uint64_t value = 1; !stop.load(); ++value) {
        std::vector<Change> changes;
        for (uint64_t i = 0; i < 1 + random() % 64; ++i)
          changes.push_back({10'000 * (t + 1) + random() % 600, value, random() % 4 == 0});
        const auto report = testing::apply(*rig.table, changes, 1 + random() % 2);
        ASSERT_TRUE(report.ok()) << report.status().to_string();
        ASSERT_EQ(report.value().refused, 0u);
        testing::apply(&models[t], changes);
      }
    });
  }
  std::atomic<uint64_t> pulls{0};
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&] {
      epoch::Reader* const reader = rig.tables->epochs().lease();
      std::vector<uint64_t> keys = keys_up_to(kStable);
      std::vector<const std::byte*> rows(keys.size());
      while (!stop.load()) {
        const epoch::Pin pin = reader->pin();
        rig.table->lookup(keys, rows.data());
        for (size_t i = 0; i < keys.size(); ++i) {
          uint64_t value = 0;
          ASSERT_NE(rows[i], nullptr) << "key " << keys[i] << " is missed";
          ASSERT_TRUE(testing::read_row(keys[i], rows[i], 64, &value));
          ASSERT_EQ(value, 1u);
        }
        pulls += 1;
      }
      rig.tables->epochs().release(reader);
    });
  }
  threads.emplace_back([&] {
    std::mt19937_64 random(tests::seed() + 9);
    while (!stop.load()) {
      std::vector<uint64_t> hot;
      for (int i = 0; i < 50; ++i) hot.push_back(1 + random() % kStable);
      ASSERT_TRUE(rig.table->migrate(hot).ok());
      ASSERT_TRUE(rig.table->recount().ok());
    }
  });
  for (const uint64_t capacity : {3500u, 5000u, 12'000u, 12'001u, 40'000u}) {
    const uint64_t seen = pulls.load();
    const base::Status status = rig.table->grow({capacity, capacity == 5000, nullptr});
    ASSERT_TRUE(status.ok()) << status.to_string();
    while (pulls.load() < seen + 20 && !::testing::Test::HasFailure()) std::this_thread::yield();
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  Model model = models[0];
  model.insert(models[1].begin(), models[1].end());
  testing::apply(&model, stable);
  std::vector<uint64_t> keys = keys_up_to(kStable);
  for (uint64_t t = 1; t <= 2; ++t)
    for (uint64_t i = 0; i < 600; ++i) keys.push_back(10'000 * t + i);
  EXPECT_EQ(testing::compare(*rig.table, model, keys), "");
  EXPECT_EQ(rig.table->status().rows, model.size());
  testing::expect_clean(*rig.tables);
}

}  // namespace
}  // namespace petps::table
