// The distinct ids agree with std::map on the same seeded ids: few and many tables, ids that repeat
// and that do not, and ids that are hard for hash tables.
#include "trainer/unique/unique.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "tests/seed.h"
#include "trainer/unique/id_set.h"

namespace petps::unique {
namespace {

struct Input {
  std::vector<uint64_t> values;
  std::vector<uint64_t> offsets{0};
};

enum class Kind { kFew, kDistinct, kStride, kHighBits, kOne, kAnyBits, kClose, kCloseAtTheEnd };
constexpr Kind kKinds[] = {Kind::kFew, Kind::kDistinct, Kind::kStride, Kind::kHighBits,
                           Kind::kOne, Kind::kAnyBits,  Kind::kClose,  Kind::kCloseAtTheEnd};

void add_table(Kind kind, size_t ids, std::mt19937_64& random, Input* input) {
  const uint64_t start = random();
  const uint64_t range = random() % (20 * ids + 1) + 1;  // IdRange takes less than 16 bits an id
  for (size_t i = 0; i < ids; ++i) {
    uint64_t id = 0;
    if (kind == Kind::kFew) id = random() % (ids / 8 + 1);
    if (kind == Kind::kDistinct) id = start + i;
    if (kind == Kind::kStride) id = (random() % (ids + 1)) * 4096;
    if (kind == Kind::kHighBits) id = (random() % (ids + 1)) << 40;
    if (kind == Kind::kOne) id = start;
    if (kind == Kind::kAnyBits) id = random();
    if (kind == Kind::kClose) id = start + random() % range;  // may wrap around
    if (kind == Kind::kCloseAtTheEnd) id = ~(random() % range);
    const bool close = kind == Kind::kClose || kind == Kind::kCloseAtTheEnd;
    if (!close && random() % 50 == 0) id = random() % 2 == 0 ? ~uint64_t{0} : 0;  // both ends
    input->values.push_back(id);
  }
  input->offsets.push_back(input->values.size());
}

// For each table, how often each id occurs.
using Model = std::vector<std::map<uint64_t, uint64_t>>;

void expect_agrees(const Input& input, const Model& models, const Wanted& wanted) {
  const auto result = jagged_unique(input.values, input.offsets, wanted);
  ASSERT_TRUE(result.ok()) << result.status().to_string();
  const Distinct& found = result.value();
  ASSERT_EQ(input.offsets.size(), found.offsets.size());
  ASSERT_EQ(found.ids.size(), found.offsets.back());
  ASSERT_EQ(wanted.inverse ? input.values.size() : 0, found.inverse.size());
  ASSERT_EQ(wanted.counts ? found.ids.size() : 0, found.counts.size());
  for (size_t t = 0; t + 1 < input.offsets.size(); ++t) {
    const auto& model = models[t];
    std::vector<uint64_t> ids(found.ids.begin() + found.offsets[t],
                              found.ids.begin() + found.offsets[t + 1]);
    for (size_t i = 0; wanted.counts && i < ids.size(); ++i) {
      ASSERT_EQ(1u, model.count(ids[i])) << "seed " << tests::seed();
      ASSERT_EQ(model.at(ids[i]), found.counts[found.offsets[t] + i]) << "seed " << tests::seed();
    }
    for (size_t i = input.offsets[t]; wanted.inverse && i < input.offsets[t + 1]; ++i) {
      ASSERT_LT(found.inverse[i], ids.size());
      ASSERT_EQ(input.values[i], ids[found.inverse[i]]) << "seed " << tests::seed();
    }
    if (wanted.order == Order::kAny) std::sort(ids.begin(), ids.end());
    std::vector<uint64_t> expected;
    for (const auto& [id, count] : model) expected.push_back(id);
    ASSERT_EQ(expected, ids) << "table " << t << " seed " << tests::seed();
  }
}

void expect_agrees_with_every_option(const Input& input) {
  Model models(input.offsets.size() - 1);
  for (size_t t = 0; t < models.size(); ++t) {
    for (size_t i = input.offsets[t]; i < input.offsets[t + 1]; ++i)
      models[t][input.values[i]] += 1;
  }
  for (const Order order : {Order::kAny, Order::kAscending}) {
    for (const bool inverse : {false, true}) {
      for (const bool counts : {false, true}) {
        expect_agrees(input, models, {order, inverse, counts});
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(JaggedUnique, TablesMayBeSeparateInMemory) {
  std::mt19937_64 random(tests::seed());
  Input input;
  for (const size_t ids : {500, 0, 20'000, 1})
    add_table(kKinds[random() % std::size(kKinds)], ids, random, &input);
  std::vector<std::vector<uint64_t>> parts;
  // Store the tables in reverse order in memory.
  for (size_t t = input.offsets.size() - 1; t-- > 0;) {
    parts.emplace_back(input.values.begin() + static_cast<ptrdiff_t>(input.offsets[t]),
                       input.values.begin() + static_cast<ptrdiff_t>(input.offsets[t + 1]));
  }
  const std::vector<std::span<const uint64_t>> tables(parts.rbegin(), parts.rend());
  const Wanted all{Order::kAscending, true, true};
  const Distinct together = jagged_unique(input.values, input.offsets, all).value();
  const Distinct separate = jagged_unique(tables, all).value();
  EXPECT_EQ(together.ids, separate.ids);
  EXPECT_EQ(together.offsets, separate.offsets);
  EXPECT_EQ(together.inverse, separate.inverse);
  EXPECT_EQ(together.counts, separate.counts);
}

TEST(JaggedUnique, ManySmallTables) {
  std::mt19937_64 random(tests::seed());
  for (int round = 0; round < 30; ++round) {
    Input input;
    const size_t tables = random() % 60;
    for (size_t t = 0; t < tables; ++t) {
      add_table(kKinds[random() % std::size(kKinds)], random() % 4 == 0 ? 0 : random() % 700,
                random, &input);
    }
    expect_agrees_with_every_option(input);
    if (HasFatalFailure()) return;
  }
}

TEST(JaggedUnique, LargeTablesAreDividedIntoParts) {
  std::mt19937_64 random(tests::seed());
  for (const Kind kind : kKinds) {
    Input input;
    add_table(Kind::kFew, 100, random, &input);
    add_table(kind, 16384, random, &input);  // the largest table that is not divided
    add_table(kind, 16385, random, &input);
    add_table(kind, 60'000 + random() % 1000, random, &input);
    add_table(Kind::kDistinct, 3, random, &input);
    expect_agrees_with_every_option(input);
    if (HasFatalFailure()) return;
  }
}

TEST(JaggedUnique, OnePartMayHaveManyMoreIdsThanOthers) {
  std::mt19937_64 random(tests::seed());
  Input input;  // one id is half of the table, so its part is as large as all other parts together
  add_table(Kind::kDistinct, 60'000, random, &input);
  for (size_t i = 0; i < input.values.size(); i += 2) input.values[i] = 77;
  expect_agrees_with_every_option(input);
}

// A part with more ids than the initial capacity of the set.
TEST(IdSet, NumbersIdsWhileItGrows) {
  std::mt19937_64 random(tests::seed());
  IdSet set;
  for (int round = 0; round < 2; ++round) {  // the second round reuses the set of the first
    constexpr size_t kIds = 400'000;
    constexpr size_t kPiece = 512;
    std::vector<uint64_t> out(kIds + 1);
    std::map<uint64_t, uint32_t> model;
    uint32_t count = 0;
    set.begin(kIds, true);
    for (size_t i = 0; i < kIds; ++i) {
      if (i % kPiece == 0) set.make_room<true>({out.data(), count}, kPiece);
      const uint64_t id = random() % 1000 == 0 ? ~uint64_t{0} : random() % 300'000;
      const auto [place, is_new] = model.emplace(id, model.size());
      ASSERT_EQ(place->second, set.add<true>(id, out.data(), &count)) << "seed " << tests::seed();
      ASSERT_EQ(model.size(), count);
      ASSERT_EQ(id, out[place->second]);
    }
    ASSERT_GT(model.size(), 200'000u);
  }
}

TEST(JaggedUnique, EmptyTablesHaveNoIds) {
  expect_agrees_with_every_option({{}, {0}});
  expect_agrees_with_every_option({{}, {0, 0, 0}});
  expect_agrees_with_every_option({{5}, {0, 0, 1, 1}});
}

TEST(JaggedUnique, InvalidOffsetsAreRefused) {
  const auto message = [](std::vector<uint64_t> offsets) {
    return std::string(jagged_unique(std::vector<uint64_t>(9, 1), offsets, {}).status().message());
  };
  EXPECT_EQ("offsets is empty: it must have tables + 1 elements, beginning with 0", message({}));
  EXPECT_EQ("offsets[0] is 1, but the first table begins at 0", message({1, 9}));
  EXPECT_EQ("offsets[2] is 3, below the 4 before it", message({0, 4, 3, 9}));
  EXPECT_EQ("offsets[1] is 8, but the last table ends with the 9 values", message({0, 8}));
  EXPECT_EQ("offsets[1] is 10, but the last table ends with the 9 values", message({0, 10}));
  const uint64_t one = 1;
  const std::span<const uint64_t> many(&one, 5'000'000'000);  // refused before it is read
  const std::string refused = jagged_unique(std::vector{many}, {}).status().to_string();
  EXPECT_NE(std::string::npos, refused.find("table 0 has 5000000000 ids; at most 4294967295"))
      << refused;
}

}  // namespace
}  // namespace petps::unique
