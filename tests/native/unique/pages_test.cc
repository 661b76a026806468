// Tests of the kept large blocks: a take returns a kept block unchanged, the kept bytes are
// bounded, and blocks that no take uses are freed. They do not cover whether the kernel gives
// huge pages.
#include "trainer/unique/pages.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "tests/seed.h"

namespace petps::unique {
namespace {

// Free the blocks that other tests left: takes of another size free them.
void forget() {
  for (size_t i = 0; i <= kTakesKept + 1; ++i) {
    void* const at = take_large(kLargeBytes);
    give_back_large(at, kLargeBytes);
  }
  ASSERT_EQ(kept_bytes(), kLargeBytes);
}

TEST(Pages, ABlockComesAgain) {
  forget();
  void* const first = take_large(5 * kLargeBytes);
  std::memset(first, 7, 5 * kLargeBytes);
  give_back_large(first, 5 * kLargeBytes);
  EXPECT_EQ(kept_bytes(), 6 * kLargeBytes);
  void* const other = take_large(9 * kLargeBytes);  // of another size
  EXPECT_NE(other, first);
  void* const again = take_large(5 * kLargeBytes - 100);
  EXPECT_EQ(again, first);
  EXPECT_EQ(static_cast<unsigned char*>(again)[5 * kLargeBytes - 101], 7);
  EXPECT_EQ(kept_bytes(), kLargeBytes);
  give_back_large(again, 5 * kLargeBytes - 100);
  give_back_large(other, 9 * kLargeBytes);
}

TEST(Pages, KeepsNoMoreThanItMayAndNothingThatNobodyWants) {
  forget();
  const size_t bytes = kKeptBytesMax / 4;
  std::vector<void*> blocks(6);
  for (void*& block : blocks) block = take_large(bytes);
  for (void* block : blocks) give_back_large(block, bytes);
  EXPECT_LE(kept_bytes(), kKeptBytesMax);
  EXPECT_GE(kept_bytes(), kKeptBytesMax - bytes);
  forget();
}

TEST(Pages, AVectorOfThemHoldsWhatWasWritten) {
  std::mt19937_64 random(tests::seed());
  std::vector<std::vector<Block<uint64_t>>> kept(2);
  const auto work = [](std::vector<Block<uint64_t>>& mine, uint64_t seed) {
    std::mt19937_64 draw(seed);
    for (int round = 0; round < 60; ++round) {
      Block<uint64_t> block(draw() % (2 << 20));
      for (size_t i = 0; i < block.size(); i += 511) block[i] = block.size() + i;
      mine.push_back(std::move(block));
      if (mine.size() < 4) continue;
      const Block<uint64_t> old = std::move(mine[draw() % mine.size()]);
      std::erase_if(mine, [](const auto& each) { return each.empty(); });
      for (size_t i = 0; i < old.size(); i += 511) ASSERT_EQ(old[i], old.size() + i);
    }
  };
  const uint64_t seed = random();
  std::thread other(work, std::ref(kept[0]), seed);
  work(kept[1], seed + 1);
  other.join();
  kept.clear();  // one half is given back by another thread than the one that took it
  EXPECT_LE(kept_bytes(), kKeptBytesMax);
}

}  // namespace
}  // namespace petps::unique
