// When a call hedges, and how often all calls may.
#include "petps_client/hedge.h"

#include <gtest/gtest.h>

namespace petps::client {
namespace {

TEST(Hedge, TheLimitIsAboveMostLatencies) {
  Latencies latencies;
  EXPECT_EQ(latencies.p95_ns(500), 0u) << "too few are known";
  for (int i = 0; i < 32'000; ++i)
    latencies.record(500, i % 25 == 0 ? 50'000'000 : 1'000'000 + static_cast<uint64_t>(i % 10));
  EXPECT_GE(latencies.p95_ns(500), 1'000'009u);
  EXPECT_LE(latencies.p95_ns(500), 1'300'000u);
  for (int i = 0; i < 64; ++i) latencies.record(2, 10'000);
  EXPECT_LE(latencies.p95_ns(2), 13'000u) << "another kind of request";
  EXPECT_EQ(latencies.p95_ns(20), latencies.p95_ns(500)) << "the next larger kind";
  EXPECT_EQ(latencies.p95_ns(5000), latencies.p95_ns(500)) << "the next smaller kind";
  for (int i = 0; i < 32'000; ++i) latencies.record(400, 30'000'000);
  EXPECT_GE(latencies.p95_ns(500), 30'000'000u) << "newer latencies count more";
}

TEST(Hedge, TheBudgetIsOneInTwentyRequests) {
  HedgeBudget budget;
  EXPECT_FALSE(budget.take(1, true));
  uint64_t hedges = 0;
  for (uint64_t requests = 1; requests <= 10'000; ++requests) {
    budget.record_request();
    hedges += budget.take(1, requests % 2 == 0) ? 1 : 0;
    ASSERT_LE(hedges * 20, requests);
  }
  EXPECT_EQ(hedges, 500u);
  for (int i = 0; i < 10'000; ++i) budget.record_request();
  EXPECT_FALSE(budget.take(11, true)) << "saved tokens are bounded";
  EXPECT_TRUE(budget.take(5, false));
  EXPECT_FALSE(budget.take(1, false)) << "the rest is for very late requests";
  EXPECT_TRUE(budget.take(5, true));
}

}  // namespace
}  // namespace petps::client
