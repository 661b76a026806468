// Hot sets of several clients: one client's set does not evict another client's keys from home.
#include <gtest/gtest.h>

#include <chrono>

#include "model.h"
#include "rig.h"

namespace petps::table {
namespace {

using testing::Change;

// A table of which many keys have one home, so that most of them are displaced.
struct Rig : testing::Rig {
  Rig() : testing::Rig(400) {
    std::vector<Change> changes;
    for (const uint64_t key : keys_of(3, 60)) changes.push_back({key, 1, false});
    EXPECT_TRUE(testing::apply(*table, changes).ok());
    for (const Change& change : changes) {
      if (index().find_one(change.key).distance > 0) displaced.push_back(change.key);
    }
  }
  uint64_t migrate(std::span<const uint64_t> hot, HotKeys::Time now) {
    return table->impl().migrate(hot, now).value();
  }
  size_t count_at_home(std::span<const uint64_t> keys) const {
    size_t n = 0;
    for (const uint64_t key : keys) n += index().find_one(key).distance == 0 ? 1 : 0;
    return n;
  }

  std::vector<uint64_t> displaced;
};

constexpr HotKeys::Time kStart{std::chrono::hours(1)};

TEST(HotKeys, TwoClientsDoNotEvictEachOther) {
  Rig rig;
  const std::vector<uint64_t> first_set(rig.displaced.begin(), rig.displaced.begin() + 10);
  const std::vector<uint64_t> second_set(rig.displaced.begin() + 10, rig.displaced.begin() + 20);
  uint64_t first = 0;
  uint64_t later = 0;
  for (int round = 0; round < 10; ++round) {  // alternately, each client once per interval
    const HotKeys::Time now = kStart + round * HotKeys::kInterval;
    const uint64_t moves =
        rig.migrate(first_set, now) + rig.migrate(second_set, now + HotKeys::kInterval / 2);
    (round == 0 ? first : later) += moves;
  }
  EXPECT_EQ(first, 2u * index::kEntries) << "each key that goes home evicts one";
  EXPECT_EQ(later, 0u);
  EXPECT_EQ(rig.count_at_home(first_set) + rig.count_at_home(second_set), index::kEntries);
}

TEST(HotKeys, KeysThatAreNoLongerHotMakeRoom) {
  Rig rig;
  const std::vector<uint64_t> first_set(rig.displaced.begin(), rig.displaced.begin() + 14);
  const std::vector<uint64_t> second_set(rig.displaced.begin() + 14, rig.displaced.begin() + 28);
  rig.migrate(first_set, kStart);
  ASSERT_EQ(rig.count_at_home(first_set), index::kEntries);
  rig.migrate(second_set, kStart + HotKeys::kInterval);
  EXPECT_EQ(rig.count_at_home(first_set), index::kEntries);
  rig.migrate(second_set, kStart + 2 * HotKeys::kInterval);
  EXPECT_EQ(rig.count_at_home(second_set), index::kEntries);
}

TEST(HotKeys, AKeyMovesHomeOnceAnInterval) {
  HotKeys hot(8);
  const uint64_t key = 7;
  hot.add({&key, 1}, kStart);
  hot.add_moved(key);
  hot.add({&key, 1}, kStart + HotKeys::kInterval - std::chrono::seconds(1));
  EXPECT_TRUE(hot.has_moved(key));
  hot.add({&key, 1}, kStart + HotKeys::kInterval);
  EXPECT_FALSE(hot.has_moved(key));
  EXPECT_TRUE(hot.spared().contains(key));
}

// Both sets are pending for the background thread.
TEST(HotKeys, ASetDoesNotReplaceAPendingOne) {
  Rig rig;
  rig.table->set_hot_keys({rig.displaced[0]});
  rig.table->set_hot_keys({rig.displaced[1], rig.displaced[0]});
  EXPECT_EQ(rig.table->impl().hot_keys.size(), 3u);
}

TEST(HotKeys, MoreSetsThanFitDropNoPendingOne) {
  Rig rig;
  rig.table->set_hot_keys({rig.displaced[0]});
  for (int set = 0; set < 5; ++set)
    rig.table->set_hot_keys(std::vector<uint64_t>(kMaxPendingHot / 4, 1));
  EXPECT_EQ(rig.table->impl().hot_keys.size(), kMaxPendingHot);
  EXPECT_EQ(rig.table->impl().hot_keys.front(), rig.displaced[0]);
}

TEST(HotKeys, AreBoundedInNumber) {
  HotKeys hot(8);
  for (uint64_t key = 0; key < 100; ++key) {
    hot.add({&key, 1}, kStart + (key / 50) * HotKeys::kInterval);
    hot.add_moved(key);
  }
  EXPECT_EQ(hot.spared().size(), 16u);
}

}  // namespace
}  // namespace petps::table
