// The choice of an instance from what the client knows of the servers, without any server.
#include "petps_client/choice.h"

#include <gtest/gtest.h>

namespace petps::client::testing {
namespace {

// Return the catalogue of a pool that has one instance of "m", which is its current one.
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

Choice choose_of(const std::vector<CataloguePointer>& servers, const NewestAnswer& answered) {
  std::vector<GroupView> groups(1);
  for (const CataloguePointer& server : servers) groups[0].push_back({server, true});
  return choose(groups, answered);
}

// The only server with the last answer's instance is gone: its address leads to another pool now.
// No other server ever had that instance, so only its version shows that theirs are older.
TEST(Choice, AnOlderInstanceIsRefusedWhenNoServerKnowsTheLastAnswerAnyMore) {
  const std::vector<CataloguePointer> before = {pool_with(1, 1, "m@17", 17)};
  NewestAnswer answered;
  answered.note("m@17", before);
  const auto older = pool_with(2, 1, "m@8", 8);
  Choice choice = choose_of({older}, answered);
  EXPECT_EQ(choice.instance, "");
  EXPECT_EQ(choice.too_old, "'m@8'");
  choice = choose_of({older, pool_with(3, 1, "m@18", 18)}, answered);
  EXPECT_EQ(choice.instance, "m@18") << "newer by its version";
}

// Pushed tables have no versions. Once no server has the last answer's instance,
// the fleet has moved on.
TEST(Choice, WhatNobodyCanCompareIsTakenOnceTheLastAnswerIsNowhere) {
  const std::vector<CataloguePointer> before = {pool_with(1, 1, "m@17", 0)};
  NewestAnswer answered;
  answered.note("m@17", before);
  const auto other = pool_with(2, 1, "m@8", 0);
  EXPECT_EQ(choose_of({other}, answered).instance, "m@8");
  EXPECT_EQ(choose_of({other, before[0]}, answered).instance, "m@17");
}

}  // namespace
}  // namespace petps::client::testing
