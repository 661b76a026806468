// The choice of an instance from what the client knows of the servers, without any server.
#include "petps_client/choice.h"

#include <gtest/gtest.h>

namespace petps::client::testing {
namespace {

// Return the catalogue of a pool with one instance of "m".
CataloguePointer pool_with(uint8_t uuid, uint32_t id, const std::string& instance,
                           uint64_t version) {
  wire::TablesReply reply;
  reply.instances.push_back({id, "m", instance, 1, version});
  reply.aliases.push_back({"m", id});
  reply.state.pool_uuid[0] = uuid;
  reply.state.counter = 10;
  auto built = Catalogue::build(reply, "m", "server");
  EXPECT_TRUE(built.ok()) << built.status().to_string();
  return built.value();
}

Choice choose_among(const std::vector<CataloguePointer>& servers,
                    const NewestAnswer& newest_answer) {
  std::vector<ServerView> views;
  std::vector<std::vector<uint32_t>> groups(1);
  for (const CataloguePointer& server : servers) {
    groups[0].push_back(static_cast<uint32_t>(views.size()));
    views.push_back({server, true});
  }
  return choose(views, groups, newest_answer);
}

// The only server with the last answer's instance is gone: its address leads to another pool now.
// No other server ever had that instance, so only the versions show that theirs are older.
TEST(Choice, RefusesAnOlderVersionWhenNoServerHasTheLastAnswersInstance) {
  const std::vector<CataloguePointer> before = {pool_with(1, 1, "m@17", 17)};
  NewestAnswer newest_answer;
  newest_answer.record("m@17", before);
  const auto older = pool_with(2, 1, "m@8", 8);
  Choice choice = choose_among({older}, newest_answer);
  EXPECT_EQ(choice.instance, "");
  EXPECT_EQ(choice.too_old, "'m@8'");
  choice = choose_among({older, pool_with(3, 1, "m@18", 18)}, newest_answer);
  EXPECT_EQ(choice.instance, "m@18") << "newer by its version";
}

// Pushed tables have no versions. Once no server has the last answer's instance, the fleet has
// moved on.
TEST(Choice, TakesAnInstanceWithoutVersionWhenNoServerHasTheLastAnswersInstance) {
  const std::vector<CataloguePointer> before = {pool_with(1, 1, "m@17", 0)};
  NewestAnswer newest_answer;
  newest_answer.record("m@17", before);
  const auto other = pool_with(2, 1, "m@8", 0);
  EXPECT_EQ(choose_among({other}, newest_answer).instance, "m@8");
  EXPECT_EQ(choose_among({other, before[0]}, newest_answer).instance, "m@17");
}

// Each group has a server with the newer instance, though not all its servers have it.
TEST(Choice, TakesTheNewestInstanceThatEveryGroupHasAServerFor) {
  const std::vector<ServerView> servers = {{pool_with(1, 1, "m@2", 2), true},
                                           {pool_with(2, 1, "m@2", 2), true},
                                           {pool_with(3, 1, "m@1", 1), true}};
  const std::vector<std::vector<uint32_t>> covered = {{0, 1}, {1, 2}, {0, 2}};
  EXPECT_EQ(choose(servers, covered, {}).instance, "m@2");
  // The third server alone owns a group. No instance has a server everywhere: take the newest.
  const std::vector<std::vector<uint32_t>> alone = {{0, 1}, {2}};
  EXPECT_EQ(choose(servers, alone, {}).instance, "m@2");
}

}  // namespace
}  // namespace petps::client::testing
