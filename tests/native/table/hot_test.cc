// Hot sets of several clients: one client's set does not evict another client's keys from home.
#include <gtest/gtest.h>

#include <chrono>

#include "model.h"
#include "table/impl.h"
#include "tests/native/pool/memory_pool.h"

namespace petps::table {
namespace {

using pool::testing_support::Memory;
using pool::testing_support::spec;
using testing::Change;

struct Rig {
  Rig() {
    tables = Tables::attach(memory.format(), false).value();
    table = tables->create_table(spec("t", 400)).value();
    const index::Index& index = table->impl().index;
    for (uint64_t key = 1; keys.size() < 60; ++key) {
      if (index.path_of(key).home == 3) keys.push_back(key);
    }
    std::vector<Change> changes;
    for (const uint64_t key : keys) changes.push_back({key, 1, false});
    EXPECT_TRUE(testing::apply(*table, changes).ok());
    for (const uint64_t key : keys) {
      if (index.find_one(key).distance > 0) displaced.push_back(key);
    }
  }
  uint64_t migrate(std::span<const uint64_t> hot, HotKeys::Time now) {
    return table->impl().migrate(hot, now).value();
  }
  size_t at_home(std::span<const uint64_t> of) const {
    size_t n = 0;
    for (const uint64_t key : of) n += table->impl().index.find_one(key).distance == 0 ? 1 : 0;
    return n;
  }

  Memory memory;
  std::unique_ptr<Tables> tables;
  TablePointer table;
  std::vector<uint64_t> keys;  // all with the same home
  std::vector<uint64_t> displaced;
};

constexpr HotKeys::Time kStart{std::chrono::hours(1)};

TEST(HotKeys, TwoClientsDoNotEvictEachOther) {
  Rig rig;
  const std::vector<uint64_t> one(rig.displaced.begin(), rig.displaced.begin() + 10);
  const std::vector<uint64_t> other(rig.displaced.begin() + 10, rig.displaced.begin() + 20);
  uint64_t first = 0;
  uint64_t later = 0;
  for (int round = 0; round < 10; ++round) {  // alternately, each client once per interval
    const HotKeys::Time now = kStart + round * HotKeys::kInterval;
    const uint64_t moves = rig.migrate(one, now) + rig.migrate(other, now + HotKeys::kInterval / 2);
    (round == 0 ? first : later) += moves;
  }
  EXPECT_EQ(first, 2u * index::kEntries) << "each key that goes home evicts one";
  EXPECT_EQ(later, 0u);
  EXPECT_EQ(rig.at_home(one) + rig.at_home(other), index::kEntries);
}

TEST(HotKeys, WhatIsHotNoMoreMakesRoom) {
  Rig rig;
  const std::vector<uint64_t> one(rig.displaced.begin(), rig.displaced.begin() + 14);
  const std::vector<uint64_t> other(rig.displaced.begin() + 14, rig.displaced.begin() + 28);
  rig.migrate(one, kStart);
  ASSERT_EQ(rig.at_home(one), index::kEntries);
  rig.migrate(other, kStart + HotKeys::kInterval);
  EXPECT_EQ(rig.at_home(one), index::kEntries);
  rig.migrate(other, kStart + 2 * HotKeys::kInterval);
  EXPECT_EQ(rig.at_home(other), index::kEntries);
}

TEST(HotKeys, AKeyGoesHomeOnceAnInterval) {
  HotKeys hot(8);
  const uint64_t key = 7;
  hot.add({&key, 1}, kStart);
  hot.moved(key);
  hot.add({&key, 1}, kStart + HotKeys::kInterval - std::chrono::seconds(1));
  EXPECT_TRUE(hot.has_moved(key));
  hot.add({&key, 1}, kStart + HotKeys::kInterval);
  EXPECT_FALSE(hot.has_moved(key));
  EXPECT_TRUE(hot.spared().contains(key));
}

// Both sets are pending for the background thread.
TEST(HotKeys, ASetDoesNotReplaceOneThatWaits) {
  Rig rig;
  rig.table->set_hot_keys({rig.displaced[0]});
  rig.table->set_hot_keys({rig.displaced[1], rig.displaced[0]});
  EXPECT_EQ(rig.table->impl().hot_keys.size(), 3u);
}

TEST(HotKeys, AreBounded) {
  HotKeys hot(8);
  for (uint64_t key = 0; key < 100; ++key) {
    hot.add({&key, 1}, kStart + (key / 50) * HotKeys::kInterval);
    hot.moved(key);
  }
  EXPECT_EQ(hot.spared().size(), 16u);
}

}  // namespace
}  // namespace petps::table
