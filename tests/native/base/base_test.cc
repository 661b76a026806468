#include "base/base.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

namespace petps::base {
namespace {

// tests/python/test_hash_golden.py reads these values and compares them with another
// implementation.
TEST(Hash, PartitionHashesNeverChange) {
  EXPECT_EQ(partition_hash(0x0u), 0xC77B3ABB6F87ACD9u);
  EXPECT_EQ(partition_hash(0x1u), 0x2FBC593564DB792Eu);
  EXPECT_EQ(partition_hash(0x2Au), 0xD5A6F8C838DF27C8u);
  EXPECT_EQ(partition_hash(0xFFFFFFFFu), 0xF0229C562A278D89u);
  EXPECT_EQ(partition_hash(0x100000000u), 0xEEAB51D59CF4CA5Bu);
  EXPECT_EQ(partition_hash(0x123456789ABCDEFu), 0xB78DF414284277A6u);
  EXPECT_EQ(partition_hash(0xFFFFFFFFFFFFFFFFu), 0x5111C7E47D784413u);
}

TEST(Hash, IndexHashesNeverChange) {
  EXPECT_EQ(index_hash(0x0u), 0x1A006557206304F9u);
  EXPECT_EQ(index_hash(0x1u), 0xA6CD8FC32994760Fu);
  EXPECT_EQ(index_hash(0x2Au), 0xFC72F81E15616341u);
  EXPECT_EQ(index_hash(0xFFFFFFFFu), 0x69F7DA00075EE82Cu);
  EXPECT_EQ(index_hash(0x100000000u), 0x9E4B1B12D282AAA4u);
  EXPECT_EQ(index_hash(0x123456789ABCDEFu), 0x853D75DAFB244901u);
  EXPECT_EQ(index_hash(0xFFFFFFFFFFFFFFFFu), 0x8AE69D4026BA9E1Eu);
}

// Take the keys of partition 3 of 16 and count their low 4 index bits.
TEST(Hash, TheKeysOfOnePartitionSpreadOverAllBuckets) {
  std::vector<int> counts(16);
  for (uint64_t key = 0; key < 256'000; ++key) {
    if (partition_hash(key) % 16 == 3) ++counts[index_hash(key) % 16];
  }
  for (const int count : counts) EXPECT_NEAR(count, 1000, 200);
}

TEST(Checksum, Golden) {
  EXPECT_EQ(checksum64("petps", 5), 0x0FFBA5072DEB1835u);
  EXPECT_EQ(checksum32("petps", 5), 0x2DEB1835u);
}

TEST(Check, DoesNothingIfTheConditionHolds) { PETPS_CHECK(1 + 1 == 2, "arithmetic"); }

TEST(CheckDeathTest, AbortsWithFileLineAndMessage) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(PETPS_CHECK(1 + 1 == 3, "slots must not overlap"),
               "tests/native/base/base_test.cc:[0-9]+: check failed: 1 \\+ 1 == 3: slots must not "
               "overlap");
}

TEST(CheckDeathTest, TakesAMessageThatIsBuiltAtRunTime) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const std::string message = "built at run time";
  EXPECT_DEATH(PETPS_CHECK(false, message), "built at run time");
}

TEST(Clock, MonotonicNeverGoesBack) {
  uint64_t last = monotonic_ns();
  for (int i = 0; i < 10'000; ++i) {
    const uint64_t now = monotonic_ns();
    ASSERT_GE(now, last);
    last = now;
  }
}

TEST(Clock, UnitsAreNanoseconds) {
  const uint64_t start = monotonic_ns();
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_GE(monotonic_ns() - start, 2'000'000u);
  EXPECT_GT(wall_ns(), 1'600'000'000'000'000'000u);  // after September 2020
}

TEST(Cpu, WiderFeaturesImplyNarrowerOnes) {
  const CpuFeatures& features = cpu_features();
  EXPECT_LE(features.avx512bw, features.avx512f);
  EXPECT_LE(features.vpclmulqdq, features.avx512bw);
  EXPECT_EQ(has_avx2(), features.avx2);
  EXPECT_EQ(has_clwb(), features.clwb);
  EXPECT_EQ(&cpu_features(), &features);
}

}  // namespace
}  // namespace petps::base
