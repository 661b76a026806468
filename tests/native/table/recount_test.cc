// A recount lowers overflow counters that are too high to the exact count, and never below, while
// writers run.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "model.h"
#include "rig.h"
#include "tests/seed.h"

namespace petps::table {
namespace {

using testing::Change;

struct Rig : testing::Rig {
  using testing::Rig::Rig;
  void write(const std::vector<uint64_t>& keys, bool erase) {
    std::vector<Change> changes;
    for (const uint64_t key : keys) changes.push_back({key, 1, erase});
    const auto report = testing::apply(*table, changes);
    ASSERT_TRUE(report.ok()) << report.status().to_string();
    ASSERT_EQ(report.value().refused, 0u);
  }
  uint64_t count_saturated() const {
    uint64_t n = 0;
    for (uint64_t i = 0; i < index().bucket_count(); ++i)
      n += index().bucket(i).overflow == index::kSaturated ? 1 : 0;
    return n;
  }
  // Check that every counter is the number that the places of the entries imply.
  void expect_exact() const {
    std::vector<uint64_t> passed(index().bucket_count(), 0);
    for (const uint64_t key : table->scan(0, index().bucket_count()).keys) {
      const index::Path path = index().path_of(key);
      const uint64_t distance = index().find_one(key).distance;
      for (uint64_t d = 0; d < distance; ++d) passed[index().bucket_at(path, d)] += 1;
    }
    for (uint64_t i = 0; i < index().bucket_count(); ++i)
      ASSERT_EQ(index().bucket(i).overflow, std::min<uint64_t>(passed[i], index::kSaturated))
          << "bucket " << i;
    testing::expect_clean(*tables);
    EXPECT_EQ(tables->verify().high_counters, 0u);
  }
};

TEST(Recount, ASaturatedCounterComesDown) {
  Rig rig(400);
  const std::vector<uint64_t> keys = rig.keys_of(3, 340);
  rig.write(keys, false);
  ASSERT_GT(rig.count_saturated(), 0u);
  ASSERT_FALSE(rig.index().wants_recount());
  EXPECT_EQ(rig.table->recount().value(), 0u);
  ASSERT_GT(rig.count_saturated(), 0u) << "300 and more keys passed it";
  rig.write({keys.begin(), keys.begin() + 300}, true);
  ASSERT_GT(rig.count_saturated(), 0u);
  EXPECT_TRUE(rig.index().wants_recount());
  EXPECT_GT(rig.table->recount().value(), 0u);
  EXPECT_FALSE(rig.index().wants_recount());
  rig.expect_exact();
  rig.write({keys.begin(), keys.begin() + 150}, false);  // the lowered counters keep counting
  rig.expect_exact();
  rig.write(keys, true);
  rig.expect_exact();
}

// Keys are inserted, deleted and moved while the buckets are counted and the counters lowered.
TEST(Recount, IsExactAlsoBesideWriters) {
  Rig rig(4000);
  const std::vector<uint64_t> crowd = rig.keys_of(5, 400);
  rig.write(crowd, false);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(tests::seed() + t);
      while (!stop.load()) {
        std::vector<Change> changes;
        for (int i = 0; i < 64; ++i) {
          const uint64_t at = random() % 200 * 2 + t;
          const bool of_crowd = random() % 2 == 0;
          changes.push_back({of_crowd ? crowd[at] : (uint64_t{1} << 40) + random() % 1500 * 2 + t,
                             1, random() % 2 == 0});
        }
        ASSERT_TRUE(testing::apply(*rig.table, changes).ok());
      }
    });
  }
  threads.emplace_back([&] {
    while (!stop.load()) ASSERT_TRUE(rig.table->rehome().ok());
  });
  for (int round = 0; round < 300; ++round) {
    ASSERT_TRUE(rig.table->recount().ok());
    if (round % 50 == 0) {
      testing::expect_clean(*rig.tables);
    }
  }
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(rig.table->recount().ok());
  rig.expect_exact();
}

// A table that is opened after a kill is recounted in the background.
TEST(Recount, RunsInTheBackgroundAfterAKill) {
  Rig rig(400);
  const std::vector<uint64_t> keys = rig.keys_of(3, 340);
  rig.write(keys, false);
  rig.write({keys.begin(), keys.begin() + 300}, true);
  rig.reopen(/*background=*/true);
  while (!rig.tables->walked() || rig.table->impl().wants_recount()) std::this_thread::yield();
  rig.expect_exact();
}

}  // namespace
}  // namespace petps::table
