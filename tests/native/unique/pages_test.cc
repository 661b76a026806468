// The cache of large blocks: a take returns a cached block unchanged, the cached bytes are bounded,
// and blocks that no take uses are freed. Does not cover: whether the kernel gives huge pages.
#include "trainer/unique/pages.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "tests/seed.h"

namespace petps::unique {
namespace {

// Empty the cache of blocks from other tests, by takes of another size.
void empty_cache() {
  for (size_t i = 0; i <= kUnusedTakesMax + 1; ++i) {
    void* const at = take_large(kLargeBytes);
    give_back_large(at, kLargeBytes);
  }
  ASSERT_EQ(cached_bytes(), kLargeBytes);
}

TEST(Pages, ATakeReturnsACachedBlockUnchanged) {
  empty_cache();
  void* const first = take_large(5 * kLargeBytes);
  std::memset(first, 7, 5 * kLargeBytes);
  give_back_large(first, 5 * kLargeBytes);
  EXPECT_EQ(cached_bytes(), 6 * kLargeBytes);
  void* const other = take_large(9 * kLargeBytes);  // of another size
  EXPECT_NE(other, first);
  void* const again = take_large(5 * kLargeBytes - 100);
  EXPECT_EQ(again, first);
  EXPECT_EQ(static_cast<unsigned char*>(again)[5 * kLargeBytes - 101], 7);
  EXPECT_EQ(cached_bytes(), kLargeBytes);
  give_back_large(again, 5 * kLargeBytes - 100);
  give_back_large(other, 9 * kLargeBytes);
}

TEST(Pages, CachesNoMoreThanTheLimitAndFreesUnusedBlocks) {
  empty_cache();
  const size_t bytes = kCachedBytesMax / 4;
  std::vector<void*> blocks(6);
  for (void*& block : blocks) block = take_large(bytes);
  for (void* block : blocks) give_back_large(block, bytes);
  EXPECT_LE(cached_bytes(), kCachedBytesMax);
  EXPECT_GE(cached_bytes(), kCachedBytesMax - bytes);
  empty_cache();
}

TEST(Pages, BlocksOfTwoThreadsKeepTheirContent) {
  std::mt19937_64 random(tests::seed());
  std::vector<std::vector<Block<uint64_t>>> blocks(2);
  const auto work = [](std::vector<Block<uint64_t>>& mine, uint64_t seed) {
    std::mt19937_64 draw(seed);
    for (int round = 0; round < 60; ++round) {
      Block<uint64_t> block(draw() % (2 << 20));
      for (size_t i = 0; i < block.size(); i += 511) block[i] = block.size() + i;
      mine.push_back(std::move(block));
      if (mine.size() < 4) continue;
      const Block<uint64_t> old = std::move(mine[draw() % mine.size()]);
      std::erase_if(mine, [](const auto& left) { return left.empty(); });
      for (size_t i = 0; i < old.size(); i += 511) ASSERT_EQ(old[i], old.size() + i);
    }
  };
  const uint64_t seed = random();
  std::thread other(work, std::ref(blocks[0]), seed);
  work(blocks[1], seed + 1);
  other.join();
  blocks.clear();  // this thread gives back what the other thread took
  EXPECT_LE(cached_bytes(), kCachedBytesMax);
}

}  // namespace
}  // namespace petps::unique
