// The parts of the client that need no server: URLs, dedup, hot keys, statistics, catalogues.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_map>

#include "fixtures.h"
#include "petps_client/address.h"
#include "petps_client/catalogue.h"
#include "petps_client/dedup.h"
#include "petps_client/hot_keys.h"
#include "petps_client/statistics.h"

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
      {"petps://\xff\xfe:7070", "visible ASCII"},
      {"petps://h\x1b[2J:7070", "visible ASCII"},
      {"petps://h h:7070", "visible ASCII"},
      {"petps://h/" + std::string(256, 'm'), "longer than 255"},
  };
  for (const auto& [url, part] : wrong) {
    testing::expect_error(parse_url(url).status(), base::Code::kInvalidArgument,
                          {part, "expected petps://host:7070"});
    const std::string shown(parse_url(url).status().message());
    EXPECT_TRUE(std::ranges::all_of(shown, [](char c) { return c >= ' ' && c <= '~'; })) << shown;
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
  EXPECT_EQ(few.memory_bytes(), 0u) << "nothing was sampled";
  EXPECT_TRUE(few.take().empty());
  EXPECT_EQ(few.memory_bytes(), 0u);
  sample_all(few, 500);
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

TEST(Statistics, TakeLittleMemoryForEachNameAndForgetThoseThatNobodyPulls) {
  Statistics statistics(65536);
  const std::shared_ptr<TableStatistics> dropped = statistics.of("dropped");
  EXPECT_EQ(statistics.of("dropped"), dropped);
  EXPECT_EQ(dropped->hot.memory_bytes(), 0u);
  const std::vector<uint64_t> keys = {3, 3};
  statistics.of("pulled")->hot.sample(keys);
  EXPECT_EQ(statistics.take_hot_sets(),
            (std::map<std::string, std::vector<uint64_t>>{{"pulled", {3}}}));
  statistics.forget_unused();  // both were used before
  EXPECT_EQ(statistics.tables(), 2u);
  (void)statistics.of("pulled");
  statistics.forget_unused();
  EXPECT_EQ(statistics.tables(), 1u);
  EXPECT_NE(statistics.of("dropped"), dropped) << "a call may still use the former ones";
}

// A list of many tables without default rows takes no row of memory for each.
TEST(Catalogue, ATableWhoseDefaultRowIsZerosKeepsNoRow) {
  wire::TablesReply reply;
  reply.instances.push_back({1, "m", "m@1", 1, 5});
  for (const codec::Dtype dtype :
       {codec::Dtype::kF32, codec::Dtype::kF16, codec::Dtype::kBf16, codec::Dtype::kInt8}) {
    wire::TableInfo info;
    info.id = static_cast<uint32_t>(dtype) + 1;
    info.instance = 1;
    info.name = codec::dtype_name(dtype);
    info.dtype = static_cast<uint8_t>(dtype);
    info.dim = kMaxDim;
    info.row_bytes = static_cast<uint32_t>(codec::row_bytes(dtype, kMaxDim));
    reply.tables.push_back(info);
    info.name += " with a row";
    const std::vector<float> ones(kMaxDim, 1.0f);
    info.default_row.resize(info.row_bytes);
    codec::encode(dtype, ones.data(), 1, kMaxDim, info.default_row.data());
    reply.tables.push_back(info);
  }
  const auto built = Catalogue::build(reply, "m", "server");
  ASSERT_TRUE(built.ok()) << built.status().to_string();
  for (const wire::TableInfo& info : reply.tables) {
    const auto table = built.value()->find(info.name);
    ASSERT_TRUE(table.ok()) << table.status().to_string();
    EXPECT_EQ(table.value()->table.instance, "m@1");
    EXPECT_EQ(table.value()->default_stored.empty(), info.default_row.empty());
    EXPECT_EQ(table.value()->default_values.empty(), info.default_row.empty());
    std::vector<std::byte> stored = info.default_row;
    stored.resize(info.row_bytes);
    EXPECT_EQ(std::memcmp(table.value()->default_row(Form::kStored), stored.data(), stored.size()),
              0);
    std::vector<float> values(kMaxDim);
    codec::decode(static_cast<codec::Dtype>(info.dtype), stored.data(), 1, kMaxDim, values.data());
    EXPECT_EQ(std::memcmp(table.value()->default_row(Form::kFloat32), values.data(),
                          kMaxDim * sizeof(float)),
              0);
  }
}

}  // namespace
}  // namespace petps::client
