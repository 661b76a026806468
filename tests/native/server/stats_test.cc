// The histogram puts each value into a bucket that contains it, and its quantiles are wrong by at
// most one bucket. The JSON writer escapes texts.
#include "server/stats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "server/json.h"
#include "tests/seed.h"

namespace petps::server {
namespace {

TEST(Histogram, BucketsHoldTheirValues) {
  uint64_t last_upper = 0;
  for (size_t bucket = 0; bucket < HistogramSnapshot::kBuckets; ++bucket) {
    const uint64_t upper = HistogramSnapshot::upper_ns(bucket);
    EXPECT_EQ(HistogramSnapshot::bucket_of(upper), bucket);
    if (bucket > 0) {
      EXPECT_GT(upper, last_upper);
      EXPECT_EQ(HistogramSnapshot::bucket_of(last_upper + 1), bucket);
    }
    last_upper = upper;
  }
  EXPECT_EQ(HistogramSnapshot::bucket_of(~uint64_t{0}), HistogramSnapshot::kBuckets - 1);
}

TEST(Histogram, QuantilesAreCloseToTheSortedValues) {
  const uint64_t seed = tests::seed();
  std::mt19937_64 random(seed);
  Histogram histogram;
  std::vector<uint64_t> values(10'000);
  for (uint64_t& value : values) {
    value = random() % (uint64_t{1} << (10 + random() % 20));
    histogram.add(value);
  }
  std::sort(values.begin(), values.end());
  HistogramSnapshot snapshot;
  histogram.add_to(snapshot);
  EXPECT_EQ(snapshot.count, values.size());
  for (const double q : {0.01, 0.5, 0.9, 0.99, 0.999, 1.0}) {
    const auto rank = static_cast<size_t>(q * static_cast<double>(values.size()) + 0.5);
    const auto exact = static_cast<double>(values[std::max<size_t>(rank, 1) - 1]);
    const auto estimate = static_cast<double>(snapshot.quantile_ns(q));
    EXPECT_GE(estimate * 1.001, exact) << q;
    EXPECT_LE(estimate, exact * 1.13 + 8) << q;
  }
  EXPECT_EQ(HistogramSnapshot().quantile_ns(0.5), 0u);
}

TEST(Json, EscapesQuotesAndBackslashesAndReplacesWhatIsNotPrintable) {
  JsonWriter json;
  json.begin_object();
  json.member("a\"b", "line\nback\\slash\xff");
  json.begin_array("list");
  json.element("x");
  json.end_array();
  json.member("yes", true);
  json.member("half", 0.5);
  json.end_object();
  EXPECT_EQ(json.take(), R"({"a\"b":"line?back\\slash?","list":["x"],"yes":true,"half":0.5})");
}

}  // namespace
}  // namespace petps::server
