// Eviction: a full table takes new keys, and which rows go for them. Does not cover the hit rates
// (bench/capacity) or crashes: its deletions are those of expired rows (tests/crash).
#include <thread>

#include "model.h"
#include "rig.h"

namespace petps::table::testing {
namespace {

constexpr uint64_t kCapacity = 2000;

class Evict : public ::testing::Test {
 protected:
  void set(WhenFull rule) { ASSERT_TRUE(rig_.tables->set_when_full(rig_.table->id(), rule).ok()); }
  ApplyReport write(uint64_t from, uint64_t to) {
    std::vector<Change> changes;
    for (uint64_t key = from; key < to; ++key) changes.push_back({key, key * 3 + 1, false});
    const auto report = testing::apply(*rig_.table, changes);
    EXPECT_TRUE(report.ok()) << report.status().to_string();
    return report.value();
  }
  // Pull keys so often that samples of them are certain.
  void pull(uint64_t from, uint64_t to, int times = 400) {
    std::vector<uint64_t> keys;
    for (uint64_t key = from; key < to; ++key) keys.push_back(key);
    for (int i = 0; i < times; ++i) {
      rig_.table->note_pulled(keys);
      rig_.table->impl().heat.load()->settle();  // as the background thread does
    }
  }
  uint64_t count(uint64_t from, uint64_t to) const {
    uint64_t found = 0;
    for (uint64_t key = from; key < to; ++key) {
      const std::byte* row = rig_.table->lookup_one(key);
      uint64_t value = 0;
      if (row == nullptr) continue;
      EXPECT_TRUE(read_row(key, row, 64, &value) && value == key * 3 + 1) << key;
      found += 1;
    }
    return found;
  }
  TableStatus status() const { return rig_.table->status(); }
  Rig rig_{kCapacity};
};

TEST_F(Evict, WithoutARuleAFullTableRefuses) {
  write(0, kCapacity);
  EXPECT_EQ(write(kCapacity, kCapacity + 10).refused, 10u);
  set(WhenFull::kEvictOldest);
  EXPECT_EQ(write(kCapacity, kCapacity + 10).inserted, 10u);
  set(WhenFull::kRefuse);
  write(5000, 5000 + kCapacity);  // fills what was evicted beyond need, and is refused then
  EXPECT_GT(write(9000, 9010).refused, 0u);
}

TEST_F(Evict, NewKeysAlwaysFindRoomAndOthersStayWhole) {
  for (const WhenFull rule : {WhenFull::kEvictOldest, WhenFull::kEvictColdest}) {
    set(rule);
    uint64_t next = 0;
    for (int i = 0; i < 100; ++i, next += 150) {
      const ApplyReport report = write(next, next + 150);
      EXPECT_EQ(report.refused, 0u);
      EXPECT_EQ(count(next, next + 150), 150u);  // none of the batch's own
      EXPECT_LE(status().rows, kCapacity);
    }
    EXPECT_GT(status().rows, kCapacity * 9 / 10);
    EXPECT_EQ(count(0, next), status().rows);
    expect_clean(*rig_.tables);
  }
  EXPECT_GT(status().evicted, 20'000u);
}

TEST_F(Evict, OldRowsGoFirst) {
  set(WhenFull::kEvictOldest);
  write(0, kCapacity);
  rig_.table->impl().push_stamp.fetch_add(1000);  // as if two minutes had passed
  write(0, kCapacity / 2);
  rig_.table->impl().push_stamp.fetch_add(1000);
  for (uint64_t key = 10'000; key < 10'500; key += 50) write(key, key + 50);
  EXPECT_EQ(count(10'000, 10'500), 500u);
  // Some places run out of old rows. At random, 250 of each half would go.
  EXPECT_GT(count(0, kCapacity / 2), kCapacity / 2 - 100);
  EXPECT_LT(count(kCapacity / 2, kCapacity), kCapacity / 2 - 400);
}

TEST_F(Evict, RowsThatArePulledStay) {
  set(WhenFull::kEvictColdest);
  EXPECT_GT(status().heat_bytes, 2 * kCapacity);
  write(0, kCapacity);
  pull(0, 1000);
  for (uint64_t key = 10'000; key < 10'800; key += 50) write(key, key + 50);
  EXPECT_GT(count(0, 1000), 980u);
  EXPECT_LT(count(1000, kCapacity), 600u);  // new keys that nobody pulls go too
}

TEST_F(Evict, WhatWasHotBeforeCools) {
  set(WhenFull::kEvictColdest);
  write(0, kCapacity);
  pull(0, 500, 3000);
  pull(1000, 1500, 30'000);  // enough samples to halve the others away
  for (uint64_t key = 10'000; key < 11'000; key += 50) write(key, key + 50);
  EXPECT_GT(count(1000, 1500), 480u);
  EXPECT_LT(count(0, 500), 400u);
}

TEST_F(Evict, ABatchLargerThanTheTableKeepsWhatFits) {
  set(WhenFull::kEvictOldest);
  write(0, 500);
  const ApplyReport report = write(1000, 1000 + 2 * kCapacity);
  EXPECT_EQ(report.inserted, kCapacity);
  EXPECT_EQ(report.refused, kCapacity);
  EXPECT_EQ(count(0, 500), 0u);
  EXPECT_EQ(write(1000, 1000 + kCapacity).refused, 0u);  // keys that it has need no room
}

TEST_F(Evict, ABatchAsLargeAsTheTableFindsRoomAmongRowsOfAllAges) {
  set(WhenFull::kEvictOldest);
  for (uint64_t key = 0; key < kCapacity; key += 10) {
    write(key, key + 10);
    rig_.table->impl().push_stamp.fetch_add(1);
  }
  EXPECT_EQ(write(50'000, 50'000 + kCapacity).refused, 0u);
  EXPECT_EQ(count(0, kCapacity), 0u);
}

TEST_F(Evict, TheLastRowThatMayGoIsFound) {
  set(WhenFull::kEvictOldest);
  write(0, kCapacity);
  std::vector<Change> batch;  // all rows but one, and one more key
  for (uint64_t key = 1; key < kCapacity; ++key) batch.push_back({key, key * 3 + 1, false});
  batch.push_back({70'000, 70'000 * 3 + 1, false});
  EXPECT_EQ(testing::apply(*rig_.table, batch).value().refused, 0u);
  EXPECT_EQ(count(0, 1), 0u);
  EXPECT_EQ(count(1, kCapacity), kCapacity - 1);
}

TEST_F(Evict, RowsOfAClockThatWasAheadAreYoung) {
  set(WhenFull::kEvictOldest);
  write(0, kCapacity / 2);
  rig_.table->impl().push_stamp.fetch_add(100'000);
  write(kCapacity / 2, kCapacity);
  rig_.table->impl().push_stamp.fetch_sub(50'000);  // a restart, with the clock set right
  for (uint64_t key = 10'000; key < 10'500; key += 50) write(key, key + 50);
  EXPECT_GT(count(kCapacity / 2, kCapacity), kCapacity / 2 - 20);
}

TEST_F(Evict, DeletionsAndUpdatesEvictNothing) {
  set(WhenFull::kEvictOldest);
  write(0, kCapacity);
  write(0, kCapacity);
  std::vector<Change> deletions;
  for (uint64_t key = 5000; key < 6000; ++key) deletions.push_back({key, 0, true});
  ASSERT_TRUE(testing::apply(*rig_.table, deletions).ok());
  EXPECT_EQ(status().evicted, 0u);
  EXPECT_EQ(status().rows, kCapacity);
}

TEST_F(Evict, WritersBesideEachOtherFindRoom) {
  set(WhenFull::kEvictColdest);
  write(0, kCapacity);
  std::vector<std::thread> threads;
  std::atomic<uint64_t> refused{0};
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < 60; ++i) {
        const uint64_t from = 100'000 * (t + 1) + 20 * i;
        refused += write(from, from + 20).refused;
        pull(from, from + 20, 2);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(refused.load(), 0u);
  EXPECT_LE(status().rows, kCapacity);
  expect_clean(*rig_.tables);
}

TEST_F(Evict, AGrowingTableKeepsEvicting) {
  set(WhenFull::kEvictColdest);
  write(0, kCapacity);
  const uint64_t before = status().heat_bytes;
  ASSERT_TRUE(rig_.table->grow({2 * kCapacity, false, nullptr}).ok());
  EXPECT_GT(status().heat_bytes, before);
  write(kCapacity, 2 * kCapacity);
  EXPECT_EQ(status().evicted, 0u);
  EXPECT_EQ(write(9000, 9100).refused, 0u);
}

TEST_F(Evict, AfterACrashOnlyTheWalkSaysWhetherATableIsFull) {
  write(0, 100);
  rig_.reopen();
  set(WhenFull::kEvictOldest);
  EXPECT_EQ(write(1000, 1000 + kCapacity - 100).refused, 0u);
  EXPECT_EQ(status().evicted, 0u);
}

TEST_F(Evict, TablesThatDeltasFeedRefuse) {
  pool::TableSpec fed = spec("fed", 10);
  fed.feed = pool::Feed::kDelta;
  const TablePointer table = rig_.tables->create_table(fed).value();
  const auto refused = rig_.tables->set_when_full(table->id(), WhenFull::kEvictOldest);
  EXPECT_EQ(refused.code(), base::Code::kFailedPrecondition);
  EXPECT_TRUE(rig_.tables->set_when_full(table->id(), WhenFull::kRefuse).ok());
  EXPECT_EQ(rig_.tables->set_when_full(99, WhenFull::kRefuse).code(), base::Code::kNotFound);
}

TEST(Heat, CountsAtMostWhatWasAddedAndSeparatesHotFromCold) {
  Heat heat(10'000);
  for (uint64_t key = 0; key < 1000; ++key) {
    for (uint64_t i = 0; i < key % 10; ++i) heat.add(key);
  }
  uint64_t exact = 0;
  for (uint64_t key = 0; key < 1000; ++key) {
    EXPECT_GE(heat.of(key), key % 10);
    exact += heat.of(key) == key % 10 ? 1 : 0;
  }
  EXPECT_GT(exact, 980u);
}

TEST(Heat, SamplesOneOfSixteen) {
  Heat heat(100'000);
  std::vector<uint64_t> keys(160);
  uint64_t sampled = 0;
  for (uint64_t i = 0; i < 100; ++i) {
    for (uint64_t j = 0; j < keys.size(); ++j) keys[j] = i * keys.size() + j;
    heat.sample(keys);
    heat.settle();
  }
  for (uint64_t key = 0; key < 16'000; ++key) sampled += heat.of(key) > 0 ? 1 : 0;
  EXPECT_NEAR(static_cast<double>(sampled), 1000.0, 120.0);
}

}  // namespace
}  // namespace petps::table::testing
