// Which server answers which keys: the rules, and how many servers a call needs.
#include "petps_client/spread.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <random>
#include <set>

#include "tests/seed.h"

namespace petps::client {
namespace {

using Owners = std::vector<std::vector<uint32_t>>;

std::vector<Candidate> equal_servers(size_t count) {
  return std::vector<Candidate>(count, Candidate{0, 0, 1000});
}

std::vector<uint32_t> all_groups(const Owners& owners) {
  std::vector<uint32_t> groups(owners.size());
  for (uint32_t i = 0; i < groups.size(); ++i) groups[i] = i;
  return groups;
}

std::vector<uint32_t> spread_all(const Owners& owners, const std::vector<Candidate>& servers,
                                 uint64_t random, uint32_t keys_per_group = 1,
                                 uint32_t limit = 500) {
  const std::vector<uint32_t> keys(owners.size(), keys_per_group);
  return spread(owners, all_groups(owners), keys, servers, limit, random);
}

size_t count_distinct(const std::vector<uint32_t>& servers) {
  return std::set<uint32_t>(servers.begin(), servers.end()).size();
}

// Return how often each server was chosen for the only group.
std::vector<int> shares_of(const std::vector<Candidate>& servers, int rounds) {
  Owners owners(1);
  for (uint32_t i = 0; i < servers.size(); ++i) owners[0].push_back(i);
  std::vector<int> counts(servers.size());
  for (int round = 1; round <= rounds; ++round) {
    const uint64_t random = static_cast<uint64_t>(round) * 0x9E3779B97F4A7C15u;
    ++counts[spread_all(owners, servers, random)[0]];
  }
  return counts;
}

TEST(Spread, OneServerTakesAllGroupsThatItOwns) {
  const Owners owners = {{0, 1}, {1, 2}, {1, 3}, {1}};
  EXPECT_EQ(spread_all(owners, equal_servers(4), 7), std::vector<uint32_t>({1, 1, 1, 1}));
}

// 2,000 keys of four servers are 500 keys for each, although two servers could answer all.
TEST(Spread, AServerTakesNoMoreThanARequestOrItsPart) {
  const Owners owners = {{0, 1}, {0, 1}, {2, 3}, {2, 3}};
  for (uint64_t random = 1; random < 50; ++random) {
    EXPECT_EQ(count_distinct(spread_all(owners, equal_servers(4), random, 500)), 4u);
    EXPECT_EQ(count_distinct(spread_all(owners, equal_servers(4), random, 250)), 2u);
  }
}

TEST(Spread, OnlyServersOfTheLowestRankAreAsked) {
  std::vector<Candidate> servers = equal_servers(3);
  servers[0].rank = 2;
  servers[1].rank = 1;
  servers[1].in_flight = 100;
  EXPECT_EQ(spread_all({{0, 1}}, servers, 1)[0], 1u);
  EXPECT_EQ(spread_all({{0}}, servers, 1)[0], 0u);
  servers[2].rank = Candidate::kNotAsked;
  EXPECT_EQ(spread_all({{2}, {1, 2}}, servers, 1), std::vector<uint32_t>({kNoServer, 1}));
}

TEST(Spread, EqualServersAnswerEquallyOften) {
  for (const size_t count : {2u, 3u, 5u}) {
    const std::vector<int> counts = shares_of(equal_servers(count), 3000);
    for (const int of_server : counts)
      EXPECT_NEAR(of_server, 3000.0 / static_cast<double>(count), 300) << count;
  }
}

TEST(Spread, ASmallDifferenceInLatencyChangesNothing) {
  std::vector<Candidate> servers = equal_servers(2);
  servers[1].latency_ns = 1900;
  EXPECT_NEAR(shares_of(servers, 3000)[1], 1500, 200);
}

TEST(Spread, TheLessBusyOfTwoRandomServersAnswers) {
  std::vector<Candidate> servers = equal_servers(2);
  servers[1].in_flight = 1;
  EXPECT_EQ(shares_of(servers, 100)[1], 0);
  servers[1].in_flight = 0;
  servers[1].latency_ns = 5000;
  EXPECT_EQ(shares_of(servers, 100)[1], 0);
  servers[0].latency_ns = 0;  // unknown
  EXPECT_NEAR(shares_of(servers, 3000)[1], 1500, 200);
}

size_t fewest_servers(const Owners& owners, size_t servers) {
  size_t fewest = servers;
  for (uint32_t set = 0; set < uint32_t{1} << servers; ++set) {
    const bool is_cover = std::all_of(owners.begin(), owners.end(), [&](const auto& group) {
      return std::any_of(group.begin(), group.end(),
                         [&](uint32_t server) { return ((set >> server) & 1) != 0; });
    });
    if (is_cover) fewest = std::min<size_t>(fewest, static_cast<size_t>(std::popcount(set)));
  }
  return fewest;
}

// Random owners. Each group goes to an owner of its lowest rank, and all calls together send not
// many more requests than the fewest possible.
TEST(Spread, SendsFewRequestsForAnyOwners) {
  std::mt19937_64 random(tests::seed());
  size_t sent = 0;
  size_t fewest = 0;
  for (int round = 0; round < 400; ++round) {
    const size_t count = 2 + random() % 9;
    std::vector<Candidate> servers = equal_servers(count);
    const bool has_ranks = round % 2 == 1;
    for (Candidate& server : servers) {
      if (has_ranks) server.rank = static_cast<uint8_t>(random() % 3);
      if (has_ranks && random() % 4 == 0) server.rank = Candidate::kNotAsked;
    }
    Owners owners(1 + random() % 40);
    for (auto& group : owners) {
      std::set<uint32_t> drawn;
      for (size_t i = 0; i <= random() % 3; ++i)
        drawn.insert(static_cast<uint32_t>(random() % count));
      group.assign(drawn.begin(), drawn.end());
    }
    const std::vector<uint32_t> chosen = spread_all(owners, servers, random());
    for (size_t i = 0; i < owners.size(); ++i) {
      uint8_t best = Candidate::kNotAsked;
      for (const uint32_t server : owners[i]) best = std::min(best, servers[server].rank);
      if (best == Candidate::kNotAsked) {
        ASSERT_EQ(chosen[i], kNoServer);
        continue;
      }
      ASSERT_NE(chosen[i], kNoServer);
      ASSERT_EQ(servers[chosen[i]].rank, best);
      ASSERT_NE(std::find(owners[i].begin(), owners[i].end(), chosen[i]), owners[i].end());
    }
    if (has_ranks) continue;
    sent += count_distinct(chosen);
    fewest += fewest_servers(owners, count);
  }
  EXPECT_LE(static_cast<double>(sent), 1.25 * static_cast<double>(fewest)) << sent << " " << fewest;
}

}  // namespace
}  // namespace petps::client
