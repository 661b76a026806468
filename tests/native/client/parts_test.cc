// The parts of the client that need no server: URLs, dedup, hot keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_map>

#include "fixtures.h"
#include "petps_client/address.h"
#include "petps_client/dedup.h"
#include "petps_client/hot_keys.h"

namespace petps::client {
namespace {

TEST(Url, AllFormsAreParsed) {
  const auto url = parse_url("petps://h1:7070,h2,[::1]:99/ranking");
  ASSERT_TRUE(url.ok()) << url.status().to_string();
  const std::vector<Address> expected = {{"h1", 7070}, {"h2", 7070}, {"::1", 99}};
  EXPECT_EQ(expected, url.value().addresses);
  EXPECT_EQ("ranking", url.value().model);
  EXPECT_EQ("[::1]:99", url.value().addresses[2].text());
  EXPECT_EQ("", parse_url("petps://h").value().model);
  EXPECT_EQ("a@7", parse_url("petps://h/a@7").value().model);
}

TEST(Url, WrongUrlsAreRefusedWithTheRemedy) {
  const std::pair<std::string, std::string> wrong[] = {
      {"http://h/m", "must start with petps://"},
      {"petps://", "no host"},
      {"petps://h1,,h2/m", "no host"},
      {"petps://h:0/m", "port must be"},
      {"petps://h:65536/m", "port must be"},
      {"petps://h:7x/m", "port must be"},
      {"petps://h:/m", "port must be"},
      {"petps://::1/m", "brackets"},
      {"petps://[::1/m", "without ']'"},
      {"petps://[::1]x/m", "port must be"},
      {"petps://h/m/n", "no '/'"},
      {"petps://h/" + std::string(256, 'm'), "longer than 255"},
  };
  for (const auto& [url, part] : wrong) {
    testing::expect_error(parse_url(url).status(), base::Code::kInvalidArgument,
                          {part, "expected petps://host:7070"});
  }
}

TEST(Distinct, AgreesWithASlowModel) {
  std::mt19937_64 random(testing::seed());
  Distinct distinct;  // reused, as in calls
  for (int round = 0; round < 500; ++round) {
    const size_t n = random() % 300;
    const uint64_t range = 1 + random() % 400;
    std::vector<uint64_t> keys(n);
    for (uint64_t& key : keys) key = (random() % range) << (round % 2 * 40);
    distinct.build(keys);
    std::vector<uint64_t> order;
    std::map<uint64_t, uint32_t> numbers;
    for (size_t i = 0; i < n; ++i) {
      if (numbers.emplace(keys[i], static_cast<uint32_t>(order.size())).second)
        order.push_back(keys[i]);
    }
    ASSERT_EQ(order, std::vector(distinct.keys().begin(), distinct.keys().end()));
    ASSERT_EQ(n, distinct.positions().size());
    for (size_t i = 0; i < n; ++i) ASSERT_EQ(numbers[keys[i]], distinct.positions()[i]);
    // In place: the rows of the distinct keys are copied to all positions.
    std::vector<std::array<uint64_t, 3>> rows(n);
    for (size_t i = 0; i < order.size(); ++i) rows[i] = {order[i], ~order[i], i};
    spread(distinct.positions(), 24, reinterpret_cast<std::byte*>(rows.data()));
    for (size_t i = 0; i < n; ++i)
      ASSERT_EQ((std::array<uint64_t, 3>{keys[i], ~keys[i], numbers[keys[i]]}), rows[i]);
  }
}

TEST(DedupEstimate, FollowsTheTraffic) {
  DedupEstimate estimate;
  EXPECT_FALSE(estimate.pays(4, 512)) << "too few keys";
  for (int i = 0; i < 200; ++i) {
    if (estimate.pays(500, 512)) estimate.record(500, 500);
  }
  int searches = 0;
  for (int i = 0; i < 320; ++i) {
    if (!estimate.pays(500, 512)) continue;
    ++searches;
    estimate.record(500, 500);
  }
  EXPECT_EQ(10, searches) << "distinct keys: one call in 32";
  for (int i = 0; i < 200; ++i) {
    if (estimate.pays(500, 512)) estimate.record(500, 250);
  }
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(estimate.pays(500, 512)) << "half of the keys repeat";
}

TEST(HotKeys, FindsTheMostFrequentKeysOfASkewedStream) {
  std::mt19937_64 random(testing::seed());
  HotKeys hot(100);
  std::vector<uint64_t> keys(200);
  for (int round = 0; round < 500; ++round) {
    // Half of the accesses hit 50 keys; the other half are spread over a million.
    for (uint64_t& key : keys)
      key = random() % 2 == 0 ? random() % 50 : 1000 + random() % 1'000'000;
    hot.sample(keys);
  }
  const std::vector<uint64_t> hottest = hot.take();
  EXPECT_LE(hottest.size(), 100u);
  ASSERT_GE(hottest.size(), 50u);
  std::vector<uint64_t> first(hottest.begin(), hottest.begin() + 50);
  std::sort(first.begin(), first.end());
  for (uint64_t key = 0; key < 50; ++key) EXPECT_EQ(key, first[key]) << "seed " << testing::seed();
  EXPECT_TRUE(hot.take().empty()) << "take() clears the counts";
}

// A table with few hot keys takes little memory; one with many gets the cells that it needs.
TEST(HotKeys, TakeTheMemoryThatTheHotSetNeeds) {
  HotKeys few(65536);
  HotKeys many(65536);
  std::vector<uint64_t> keys(60'000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  const auto sample_all = [&](HotKeys& hot, size_t count) {
    for (int turn = 0; turn < 2; ++turn) {
      for (size_t at = 0; at < count; at += 500) hot.sample({keys.data() + at, 500});
    }
    return hot.take().size();
  };
  const size_t first_bytes = few.memory_bytes();
  for (int interval = 0; interval < 8; ++interval) EXPECT_EQ(sample_all(few, 1000), 1000u);
  EXPECT_EQ(few.memory_bytes(), first_bytes);
  EXPECT_LT(sample_all(many, keys.size()), keys.size() / 2);
  for (int interval = 0; interval < 8; ++interval) sample_all(many, keys.size());
  EXPECT_GT(sample_all(many, keys.size()), keys.size() * 9 / 10);
  EXPECT_LE(many.memory_bytes(), 16 * first_bytes);
}

TEST(HotKeys, KeysSeenOnceAreNotHot) {
  HotKeys hot(1000);
  const std::vector<uint64_t> keys = {1, 2, 3, 3};
  hot.sample(keys);
  EXPECT_EQ(std::vector<uint64_t>{3}, hot.take());
}

}  // namespace
}  // namespace petps::client
