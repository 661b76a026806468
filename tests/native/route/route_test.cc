// Routing agrees with a slow model of the same orders on seeded batches of all shapes.
#include "trainer/route/route.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "tests/seed.h"
#include "wire/wire.h"

namespace petps::route {
namespace {

struct Batch {
  uint32_t world = 1, micros = 1, partitions = 8;
  std::vector<uint64_t> block_of, values, offsets{0};
  [[nodiscard]] Shape shape() const { return {world, micros, block_of}; }
  [[nodiscard]] size_t tables() const { return block_of.size(); }
  [[nodiscard]] std::vector<std::span<const uint64_t>> parts() const {
    std::vector<std::span<const uint64_t>> spans;
    for (size_t part = 0; part + 1 < offsets.size(); ++part)
      spans.emplace_back(values.data() + offsets[part], offsets[part + 1] - offsets[part]);
    return spans;
  }
};

Batch draw_batch(std::mt19937_64& random) {
  Batch batch;
  batch.world = 1 + random() % 4;
  batch.micros = 1 + random() % 4;
  batch.partitions = batch.world + random() % 9;
  const size_t tables = 1 + random() % 5;
  for (size_t t = 0; t < tables; ++t)
    batch.block_of.push_back(t == 0 ? 0 : batch.block_of.back() + random() % 2);
  const uint64_t range = 1 + random() % 300;
  for (size_t part = 0; part < batch.micros * tables; ++part) {
    const uint64_t count = random() % 4 == 0 ? 0 : random() % 100;
    for (uint64_t i = 0; i < count; ++i)
      batch.values.push_back(random() % 9 == 0 ? random() : random() % range);
    batch.offsets.push_back(batch.values.size());
  }
  return batch;
}

using Cell = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>;

TEST(Route, AskAgreesWithTheModel) {
  std::mt19937_64 random(tests::seed());
  for (int round = 0; round < 300; ++round) {
    const Batch batch = draw_batch(random);
    std::map<Cell, uint64_t> sent;  // (owner, micro-batch, table, key) -> seen
    const auto owner_of = [&](uint64_t key) {
      return uint64_t{wire::partition_of(key, batch.partitions)} * batch.world / batch.partitions;
    };
    for (size_t part = 0; part + 1 < batch.offsets.size(); ++part) {
      for (uint64_t v = batch.offsets[part]; v < batch.offsets[part + 1]; ++v) {
        const uint64_t key = batch.values[v];
        ++sent[{owner_of(key), part / batch.tables(), part % batch.tables(), key}];
      }
    }
    base::Result<Requested> result = ask(batch.parts(), batch.shape(), batch.partitions, true);
    ASSERT_TRUE(result.ok()) << result.status().to_string();
    const Requested& requested = *result;
    ASSERT_EQ(requested.keys.size(), sent.size());
    std::vector<uint64_t> counts(requested.counts.size());
    size_t at = 0;
    for (const auto& [cell, times] : sent) {
      const auto& [owner, micro, table, key] = cell;
      EXPECT_EQ(requested.keys[at], key);
      EXPECT_EQ(requested.seen[at++], times);
      ++counts[(owner * batch.micros + micro) * batch.tables() + table];
    }
    EXPECT_EQ(requested.counts, counts);
    // The rows of (micro-batch, block) are in the order (rank, table, key).
    for (size_t part = 0; part + 1 < batch.offsets.size(); ++part) {
      const uint64_t micro = part / batch.tables();
      std::vector<Cell> rows;
      for (const auto& entry : sent) {
        const auto& [owner, of_micro, table, key] = entry.first;
        const bool here = batch.block_of[table] == batch.block_of[part % batch.tables()];
        if (of_micro == micro && here) rows.push_back({owner, table, key, 0});
      }
      std::sort(rows.begin(), rows.end());
      for (uint64_t v = batch.offsets[part]; v < batch.offsets[part + 1]; ++v) {
        const uint64_t key = batch.values[v];
        const Cell row{owner_of(key), part % batch.tables(), key, 0};
        const auto place = std::lower_bound(rows.begin(), rows.end(), row);
        EXPECT_EQ(requested.position[v], static_cast<uint32_t>(place - rows.begin()));
      }
    }
  }
}

TEST(Route, MergeAgreesWithTheModel) {
  std::mt19937_64 random(tests::seed() + 1);
  for (int round = 0; round < 300; ++round) {
    Batch batch = draw_batch(random);
    const size_t tables = batch.tables();
    const bool has_seen = random() % 2 == 0;
    std::vector<uint64_t> keys, seen, counts;
    std::vector<std::vector<uint64_t>> cells;
    std::vector<std::map<uint64_t, uint64_t>> model(tables);  // key -> seen
    for (size_t cell = 0; cell < batch.world * batch.micros * tables; ++cell) {
      std::set<uint64_t> chosen;
      for (uint64_t i = random() % 40; i > 0; --i) chosen.insert(random() % 60);
      cells.emplace_back(chosen.begin(), chosen.end());
      counts.push_back(chosen.size());
      for (const uint64_t key : chosen) {
        keys.push_back(key);
        if (has_seen) seen.push_back(1 + random() % 5);
        model[cell % tables][key] += has_seen ? seen.back() : 0;
      }
    }
    base::Result<Owned> result = merge(keys, seen, counts, batch.shape());
    ASSERT_TRUE(result.ok()) << result.status().to_string();
    const Owned& owned = *result;
    std::vector<std::map<uint64_t, uint64_t>> row_of(tables);
    size_t at = 0;
    uint64_t row = 0;
    for (size_t table = 0; table < tables; ++table) {
      if (table > 0 && batch.block_of[table] != batch.block_of[table - 1]) row = 0;
      ASSERT_EQ(owned.offsets[table], at);
      for (const auto& [key, times] : model[table]) {
        EXPECT_EQ(owned.keys[at], key);
        if (has_seen) {
          EXPECT_EQ(owned.seen[at], times);
        }
        row_of[table][key] = row++;
        ++at;
      }
    }
    EXPECT_EQ(owned.keys.size(), at);
    EXPECT_EQ(owned.seen.size(), has_seen ? at : 0);
    at = 0;
    for (size_t micro = 0; micro < batch.micros; ++micro) {
      for (size_t block = 0; block < batch.shape().blocks(); ++block) {
        for (size_t rank = 0; rank < batch.world; ++rank) {
          for (size_t table = 0; table < tables; ++table) {
            if (batch.block_of[table] != block) continue;
            for (const uint64_t key : cells[(rank * batch.micros + micro) * tables + table])
              EXPECT_EQ(owned.position[at++], static_cast<int64_t>(row_of[table][key]));
          }
        }
      }
    }
    EXPECT_EQ(at, keys.size());
  }
}

TEST(Route, RefusesInvalidShapesAndCounts) {
  const std::vector<uint64_t> blocks{0, 1}, skipped{0, 2}, keys{1, 2, 3}, none;
  const auto code = [](const auto& result) { return result.status().code(); };
  const Shape shape{2, 1, blocks};
  const std::vector<std::span<const uint64_t>> one{keys}, two{keys, keys};
  EXPECT_TRUE(ask(two, shape, 8, false).ok());
  EXPECT_EQ(code(ask(one, shape, 8, false)), base::Code::kInvalidArgument);
  EXPECT_EQ(code(ask(two, shape, 1, false)), base::Code::kInvalidArgument);
  EXPECT_EQ(code(ask(two, Shape{2, 1, skipped}, 8, false)), base::Code::kInvalidArgument);
  const std::vector<uint64_t> few{1, 0, 1, 0}, huge{~uint64_t{0}, 4, 0, 0}, fitting{1, 0, 1, 1};
  EXPECT_EQ(code(merge(keys, none, few, shape)), base::Code::kInvalidArgument);
  EXPECT_EQ(code(merge(keys, none, huge, shape)), base::Code::kInvalidArgument);
  EXPECT_EQ(code(merge(keys, std::vector<uint64_t>{1}, fitting, shape)),
            base::Code::kInvalidArgument);
  EXPECT_EQ(code(merge(keys, none, fitting, shape)), base::Code::kOk);
}

}  // namespace
}  // namespace petps::route
