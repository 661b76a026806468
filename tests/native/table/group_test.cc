// Batches that are applied together leave the rows, and report the counts, of the same batches
// applied one after the other.
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include "model.h"
#include "rig.h"
#include "tests/seed.h"

namespace petps::table {
namespace {

using testing::Change;
using testing::expect_clean;
using testing::Rig;

// The arrays of a batch, and the batch.
struct Owned {
  Owned(const std::vector<Change>& changes, size_t row_bytes) : rows(changes.size() * row_bytes) {
    bool deletes = false;
    for (size_t i = 0; i < changes.size(); ++i) {
      keys.push_back(changes[i].key);
      deleted.push_back(changes[i].erase ? 1 : 0);
      deletes = deletes || changes[i].erase;
      if (!changes[i].erase)
        testing::write_row(changes[i].key, changes[i].value, rows.data() + i * row_bytes,
                           row_bytes);
    }
    batch.keys = keys;
    batch.rows = rows.data();
    if (deletes) batch.deleted = deleted;
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

  std::vector<uint64_t> keys;
  std::vector<uint8_t> deleted;
  std::vector<std::byte> rows;
  Batch batch;
};

std::string counts(const ApplyReport& report) {
  std::string text;
  for (const uint64_t n : {report.inserted, report.updated, report.deleted, report.absent,
                           report.refused, report.superseded})
    text += std::to_string(n) + " ";
  return text;
}

#if defined(__SANITIZE_THREAD__)
constexpr uint64_t kRounds = 60;  // of one thread, and each takes a hundred times as long
#else
constexpr uint64_t kRounds = 300;
#endif

TEST(Group, IsTheSameAsOneBatchAfterTheOther) {
  for (uint64_t round = 0; round < kRounds; ++round) {
    const uint64_t seed = tests::seed() + round;
    std::mt19937_64 random(seed);
    Rig alone(2000);
    Rig together(2000);
    testing::Model model;
    const uint64_t key_space = 8 + random() % 200;  // few keys: most are in several batches
    uint64_t value = 1;
    for (int group = 0; group < 4; ++group) {
      const uint64_t deletions = random() % 3;  // of four; none: the short way, once keys exist
      std::vector<std::unique_ptr<Owned>> owned;
      std::vector<Batch> batches;
      std::vector<std::string> expected;
      for (uint64_t n = 1 + random() % 6; n > 0; --n) {
        std::vector<Change> changes(random() % 40);
        for (Change& change : changes)
          change = {random() % key_space, value++, random() % 4 < deletions};
        owned.push_back(std::make_unique<Owned>(changes, 64));
        batches.push_back(owned.back()->batch);
        const auto report = alone.table->apply(batches.back());
        ASSERT_TRUE(report.ok()) << report.status().to_string();
        expected.push_back(counts(report.value()));
        testing::apply(&model, changes);
      }
      std::vector<ApplyReport> reports(batches.size());
      const base::Status status = together.table->apply_together(batches, reports);
      ASSERT_TRUE(status.ok()) << status.to_string();
      for (size_t i = 0; i < reports.size(); ++i)
        ASSERT_EQ(counts(reports[i]), expected[i]) << "batch " << i << ", seed " << seed;
      std::vector<uint64_t> all(key_space);
      std::iota(all.begin(), all.end(), 0);
      ASSERT_EQ(testing::compare(*together.table, model, all), "") << "seed " << seed;
    }
    expect_clean(*together.tables);
    ASSERT_EQ(together.table->status().rows, model.size());
  }
}

TEST(Group, AFullTableRefusesTheSameNumberOfKeys) {
  Rig rig(20);
  std::vector<std::unique_ptr<Owned>> owned;
  std::vector<Batch> batches;
  for (uint64_t i = 0; i < 3; ++i) {
    std::vector<Change> changes;
    for (uint64_t key = 0; key < 10; ++key) changes.push_back({i * 10 + key, 1, false});
    owned.push_back(std::make_unique<Owned>(changes, 64));
    batches.push_back(owned.back()->batch);
  }
  std::vector<ApplyReport> reports(3);
  ASSERT_TRUE(rig.table->apply_together(batches, reports).ok());
  EXPECT_EQ(counts(reports[0]), "10 0 0 0 0 0 ");
  EXPECT_EQ(counts(reports[1]), "10 0 0 0 0 0 ");
  EXPECT_EQ(counts(reports[2]), "0 0 0 0 10 0 ");
  EXPECT_EQ(rig.table->status().rows, 20u);
}

TEST(Group, BatchesOfDifferentStampsAreRefused) {
  Rig rig(20);
  const Owned one({{1, 1, false}}, 64);
  Owned two({{2, 1, false}}, 64);
  two.batch.stamp = 9;
  std::vector<ApplyReport> reports(2);
  const std::vector<Batch> batches = {one.batch, two.batch};
  EXPECT_EQ(rig.table->apply_together(batches, reports).code(), base::Code::kInvalidArgument);
  EXPECT_EQ(rig.table->status().rows, 0u);
}

// A pool without room, whose one table has fewer free slots than a writer may keep.
struct NearlyFull {
  static constexpr uint64_t kDeleted = 3000;  // more than four slices hold at a time
  NearlyFull() : rig(60'000, 64, /*background=*/false, uint64_t{8} << 20) {
    base::Status filled;
    for (; filled.ok(); ++end) filled = testing::apply(*rig.table, {{end, 1, false}}).status();
    EXPECT_EQ(filled.code(), base::Code::kResourceExhausted) << filled.to_string();
    end -= 1;
    std::vector<Change> changes;
    for (uint64_t key = 0; key < first; ++key) changes.push_back({key, 0, true});
    EXPECT_TRUE(testing::apply(*rig.table, changes).ok());
    EXPECT_LT(rig.table->status().free_slots, kRetiredTogether) << "otherwise this shows nothing";
    EXPECT_GT(end - first, 2 * kRetiredTogether);
  }
  Rig rig;
  uint64_t first = kDeleted;  // the table has the keys [first, end)
  uint64_t end = 0;
};

// The slots that a writer replaced may be all that it can take next: it may not keep them back.
TEST(Retiring, ABatchReusesItsOwnSlotsWhenNoOthersAreFree) {
  NearlyFull full;
  std::vector<Change> changes;
  for (uint64_t key = full.first; key < full.end; ++key) changes.push_back({key, 2, false});
  const auto report = testing::apply(*full.rig.table, changes);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().updated, changes.size());
  EXPECT_EQ(full.rig.table->status().retired_slots, 0u);
}

// Each of two writers may keep the slots that the other needs, and hold a range that the other
// waits for.
TEST(Retiring, TwoWritersInANearlyFullPoolDoNotWaitForOneAnother) {
  NearlyFull full;
  std::vector<std::thread> writers;
  for (uint64_t writer = 0; writer < 2; ++writer) {
    writers.emplace_back([&, writer] {
      std::vector<Change> changes;
      for (uint64_t key = full.first + writer; key < full.end; key += 2)
        changes.push_back({key, 2, false});
      for (int round = 0; round < 20; ++round) {
        const auto report = testing::apply(*full.rig.table, changes, writer == 0 ? 1 : 3);
        ASSERT_TRUE(report.ok()) << report.status().to_string();
        EXPECT_EQ(report.value().updated, changes.size());
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(full.rig.table->status().retired_slots, 0u);
  expect_clean(*full.rig.tables);
}

}  // namespace
}  // namespace petps::table
