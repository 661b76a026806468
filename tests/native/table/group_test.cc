// Batches that are applied together leave the rows, and report the counts, of the same batches
// applied one after the other.
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <random>

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

TEST(Group, IsTheSameAsOneBatchAfterTheOther) {
  for (uint64_t round = 0; round < 300; ++round) {
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

// The slots that a writer replaced may be all that it can take next: it may not keep them back.
TEST(Retiring, ABatchReusesItsOwnSlotsWhenNoOthersAreFree) {
  Rig rig(60'000, 64, /*background=*/false, uint64_t{4} << 20);
  base::Status filled;
  uint64_t rows = 0;
  for (; filled.ok(); ++rows) filled = testing::apply(*rig.table, {{rows, 1, false}}).status();
  ASSERT_EQ(filled.code(), base::Code::kResourceExhausted) << filled.to_string();
  rows -= 1;
  std::vector<Change> changes;
  for (uint64_t key = 0; key < 1000; ++key) changes.push_back({key, 0, true});
  ASSERT_TRUE(testing::apply(*rig.table, changes).ok());
  const uint64_t free_slots = rig.table->status().free_slots;
  ASSERT_LT(free_slots, kRetiredTogether) << "otherwise this test shows nothing";
  changes.clear();
  for (uint64_t key = 1000; key < rows; ++key) changes.push_back({key, 2, false});
  ASSERT_GT(changes.size(), kRetiredTogether);
  const auto report = testing::apply(*rig.table, changes);
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_EQ(report.value().updated, changes.size());
  EXPECT_EQ(rig.table->status().retired_slots, 0u);
}

}  // namespace
}  // namespace petps::table
