// The choice between copy, sendmsg and zero-copy, and the measurement behind it.
// Does not cover: whether the costs are right (run make bench ONLY=gather for that).
#include "transport/gather_choice.h"

#include <gtest/gtest.h>

#include "transport/tcp/measure.h"
#include "transport/tcp/tcp.h"

namespace petps::transport {
namespace {

TEST(GatherChoice, ParsesTheNameOfEveryMode) {
  for (const char* name : {"auto", "copy", "sendmsg", "zerocopy"}) {
    GatherMode mode;
    ASSERT_TRUE(parse_gather_mode(name, mode)) << name;
    EXPECT_STREQ(gather_mode_name(mode), name);
  }
  GatherMode mode;
  EXPECT_FALSE(parse_gather_mode("Copy", mode));
}

TEST(GatherChoice, UsesTheConfiguredModeWhateverTheCostsAre) {
  GatherCosts costs;
  for (auto& row : costs.cells) {
    for (GatherCosts::Cell& cell : row) cell.ns = {1, 2, 3};
  }
  for (const GatherMode configured : kGatherModes) {
    GatherChoice choice(configured);
    choice.publish(costs);
    EXPECT_EQ(choice.mode_for(64, 10), configured);
    EXPECT_EQ(choice.mode_for(100'000, 10), configured);
  }
}

TEST(GatherChoice, WithoutCostsSmallRowsAreCopied) {
  const GatherChoice choice;
  EXPECT_EQ(choice.costs(), nullptr);
  EXPECT_EQ(choice.mode_for(1, 1), GatherMode::kCopy);
  EXPECT_EQ(choice.mode_for(1536, 500), GatherMode::kCopy);
  EXPECT_EQ(choice.mode_for(1537, 500), GatherMode::kSendmsg);
  EXPECT_EQ(choice.mode_for(1 << 20, 5000), GatherMode::kSendmsg);
}

TEST(GatherChoice, UsesTheCheapestModeOfTheNearestClass) {
  GatherCosts costs;
  costs.cells[GatherCosts::row_class(512)][GatherCosts::batch_class(500)].ns = {30, 20, 10};
  costs.cells[GatherCosts::row_class(512)][GatherCosts::batch_class(100)].ns = {10, 20, 0};
  costs.cells[GatherCosts::row_class(128)][GatherCosts::batch_class(2000)].ns = {0, 20, 0};
  costs.cells[GatherCosts::row_class(64)][GatherCosts::batch_class(2000)].ns = {100, 91, 0};
  costs.cells[GatherCosts::row_class(64)][GatherCosts::batch_class(500)].ns = {100, 89, 0};
  GatherChoice choice;
  choice.publish(costs);
  ASSERT_NE(choice.costs(), nullptr);
  EXPECT_EQ(choice.mode_for(512, 500), GatherMode::kZerocopy);
  EXPECT_EQ(choice.mode_for(600, 300), GatherMode::kZerocopy);
  EXPECT_EQ(choice.mode_for(512, 100), GatherMode::kCopy);
  EXPECT_EQ(choice.mode_for(128, 65'536), GatherMode::kCopy) << "nothing to compare with";
  EXPECT_EQ(choice.mode_for(64, 2000), GatherMode::kCopy) << "so small a gain may be chance";
  EXPECT_EQ(choice.mode_for(64, 500), GatherMode::kSendmsg);
  EXPECT_EQ(choice.mode_for(4096, 500), GatherMode::kSendmsg) << "as without costs";
}

TEST(GatherChoice, ZeroCopyThatCopiedNeverWins) {
  GatherCosts::Cell cell;
  cell.ns = {30, 20, 10};
  cell.zerocopy_copied = true;
  EXPECT_EQ(cell.cheapest(0), GatherMode::kSendmsg);
  cell.ns = {0, 0, 10};
  EXPECT_EQ(cell.cheapest(0), GatherMode::kCopy) << "as without costs";
}

TEST(MeasureGather, MeasuresEveryModeAndNoticesThatLoopbackCopies) {
  const std::vector<std::byte> memory(size_t{1} << 20, std::byte{1});
  const std::atomic<bool> stop{false};
  const auto measured = measure_gather(memory, 60'000, stop);  // returns when it is complete
  ASSERT_TRUE(measured.ok()) << measured.status().to_string();
  EXPECT_TRUE(measured.value().complete);
  for (size_t r = 0; r < GatherCosts::kRowBytes.size(); ++r) {
    for (size_t b = 0; b < GatherCosts::kBatches.size(); ++b) {
      const GatherCosts::Cell& cell = measured.value().cells[r][b];
      EXPECT_GT(cell.ns[0], 0u);
      EXPECT_GT(cell.ns[1], 0u);
      const size_t bytes = GatherCosts::kRowBytes[r] * GatherCosts::kBatches[b];
      if (bytes < kZerocopyBytes / 2) {
        EXPECT_EQ(cell.ns[2], 0u) << "too small, so it was copied";
      } else if (bytes > kZerocopyBytes) {
        EXPECT_TRUE(cell.ns[2] > 0 && cell.zerocopy_copied) << bytes;
      }
      EXPECT_NE(cell.cheapest(r), GatherMode::kZerocopy);
    }
  }
}

TEST(MeasureGather, StopsWhenRequested) {
  const std::vector<std::byte> memory(size_t{1} << 16);
  const std::atomic<bool> stop{true};
  const auto measured = measure_gather(memory, 60'000, stop);
  ASSERT_TRUE(measured.ok());
  EXPECT_FALSE(measured.value().complete);
}

}  // namespace
}  // namespace petps::transport
