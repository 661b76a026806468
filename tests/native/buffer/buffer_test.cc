// Moves of rows by position agree with plain loops, and invalid positions change nothing.
#include "trainer/buffer/buffer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/seed.h"

namespace petps::buffer {
namespace {

std::vector<float> values(std::mt19937_64& random, size_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> out(count);
  for (float& value : out) value = normal(random);
  return out;
}

std::vector<int64_t> positions(std::mt19937_64& random, size_t count, size_t n) {
  std::vector<int64_t> out(count);
  for (int64_t& position : out) position = static_cast<int64_t>(random() % n);
  return out;
}

Block<float> block(std::vector<float>& rows, size_t width) {
  return {rows.data(), rows.size() / width, width};
}
Block<const float> block(const std::vector<float>& rows, size_t width) {
  return {rows.data(), rows.size() / width, width};
}

TEST(Buffer, AgreesWithPlainLoops) {
  std::mt19937_64 random(tests::seed());
  for (int round = 0; round < 200; ++round) {
    const size_t width = 1 + random() % 40;
    const size_t dim = 1 + random() % width;
    const size_t n = 1 + random() % 100;
    const size_t count = random() % 200;
    const std::vector<float> rows = values(random, n * width);
    const std::vector<int64_t> at = positions(random, count, n);

    std::vector<float> out(count * dim, -1);
    ASSERT_TRUE(gather(block(rows, width), at, {out.data(), count, dim}).ok());
    for (size_t i = 0; i < count; ++i)
      for (size_t v = 0; v < dim; ++v) EXPECT_EQ(out[i * dim + v], rows[at[i] * width + v]);

    const std::vector<float> more = values(random, count * width);
    std::vector<float> sums = rows;
    std::vector<float> expected = rows;
    ASSERT_TRUE(add(block(sums, width), at, {more.data(), count, width}).ok());
    for (size_t i = 0; i < count; ++i)
      for (size_t v = 0; v < width; ++v) expected[at[i] * width + v] += more[i * width + v];
    EXPECT_EQ(sums, expected);  // bit by bit: the sums are computed in the order given

    std::vector<float> copied = values(random, n * width);
    expected = copied;
    const std::vector<int64_t> from = positions(random, count, n);
    ASSERT_TRUE(copy(block(copied, width), at, block(rows, width), from).ok());
    for (size_t i = 0; i < count; ++i)
      for (size_t v = 0; v < width; ++v) expected[at[i] * width + v] = rows[from[i] * width + v];
    EXPECT_EQ(copied, expected);
  }
}

TEST(Buffer, FindsTheKeysOfBothLists) {
  std::mt19937_64 random(tests::seed() + 1);
  for (int round = 0; round < 200; ++round) {
    const uint64_t range = 1 + random() % 200;
    std::set<uint64_t> sides[2];
    for (std::set<uint64_t>& side : sides)
      for (uint64_t i = random() % 150; i > 0; --i) side.insert(random() % range);
    if (round % 5 == 0) sides[round % 2].insert(~uint64_t{0});
    const std::vector<uint64_t> left(sides[0].begin(), sides[0].end());
    const std::vector<uint64_t> right(sides[1].begin(), sides[1].end());
    std::vector<uint64_t> shared;
    std::set_intersection(left.begin(), left.end(), right.begin(), right.end(),
                          std::back_inserter(shared));
    const auto [of_left, of_right] = common(left, right);
    ASSERT_EQ(of_left.size(), shared.size());
    ASSERT_EQ(of_right.size(), shared.size());
    for (size_t i = 0; i < shared.size(); ++i) {
      EXPECT_EQ(left[of_left[i]], shared[i]);
      EXPECT_EQ(right[of_right[i]], shared[i]);
    }
  }
}

TEST(Buffer, AnInvalidPositionChangesNothing) {
  const std::vector<float> rows(6, 2.0F);
  for (const int64_t wrong : {int64_t{3}, int64_t{-1}, INT64_MIN, INT64_MAX}) {
    std::vector<float> out(6, 1.0F);
    const std::vector<float> before = out;
    const std::vector<int64_t> at{0, wrong, 1};
    const std::vector<int64_t> good{0, 1, 2};
    const base::Status gathered = gather(block(rows, 2), at, block(out, 2));
    EXPECT_EQ(gathered.code(), base::Code::kInvalidArgument);
    EXPECT_EQ(gathered.message(), "at[1] is " + std::to_string(wrong) + ", but there are 3 rows");
    EXPECT_EQ(add(block(out, 2), at, block(rows, 2)).code(), base::Code::kInvalidArgument);
    EXPECT_EQ(copy(block(out, 2), at, block(rows, 2), good).code(), base::Code::kInvalidArgument);
    EXPECT_EQ(copy(block(out, 2), good, block(rows, 2), at).code(), base::Code::kInvalidArgument);
    EXPECT_EQ(out, before);
  }
  std::vector<float> out(6, 1.0F);
  const std::vector<int64_t> two{0, 1};
  EXPECT_EQ(gather(block(rows, 2), two, block(out, 2)).code(), base::Code::kInvalidArgument);
  EXPECT_EQ(add(block(out, 3), two, block(rows, 2)).code(), base::Code::kInvalidArgument);
  EXPECT_EQ(copy(block(out, 2), two, block(rows, 2), {}).code(), base::Code::kInvalidArgument);
}

}  // namespace
}  // namespace petps::buffer
