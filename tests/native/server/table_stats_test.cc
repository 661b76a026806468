// The counters of each table, and the errors by code. tests/native/server/stats_test.cc has the
// histogram.
#include <gtest/gtest.h>

#include "server/stats.h"
#include "server_fixture.h"

namespace petps::server {
namespace {

using base::Code;

class TableStatsTest : public ServerTest {
 protected:
  // A latency is counted after the reply, so a client may be faster.
  TableSnapshot pulled(const table::Table& table, uint64_t pulls) {
    EXPECT_TRUE(
        waits_until([&] { return server_->stats().tables[table.id()].latency.count == pulls; }));
    return server_->stats().tables[table.id()];
  }
};

TEST_F(TableStatsTest, EachTableHasItsPullsKeysMissesAndLatency) {
  start();
  auto client = connect();
  EXPECT_TRUE(server_->stats().tables.empty());
  client->call(pull_frame(1, {{items_.id(), {1, 70, 2}}, {users_.id(), {5}}, {99, {1, 2}}}));
  client->call(pull_frame(2, {{items_.id(), {71, 72}}}));
  const TableSnapshot items = pulled(items_, 2);
  EXPECT_EQ(items.pulls, 2u);
  EXPECT_EQ(items.keys, 5u);
  EXPECT_EQ(items.misses(), 3u);
  EXPECT_GT(items.latency.sum_ns, 0u);
  const TableSnapshot users = pulled(users_, 1);
  EXPECT_EQ(users.keys, 1u);
  EXPECT_EQ(users.misses(), 0u);
  const StatsSnapshot all = server_->stats();
  EXPECT_EQ(all.tables.size(), 2u) << "the unknown table is not counted";
  EXPECT_TRUE(status_contains(R"("pulls":2,"keys":5,"misses":3)"));
  EXPECT_TRUE(status_contains(R"("pulls":0,"keys":0,"misses":0)")) << "a table without pulls";
}

TEST_F(TableStatsTest, WorkersAreAddedUp) {
  options_.workers = 2;
  start();
  for (uint64_t i = 0; i < 8; ++i) connect()->call(pull_frame(i, {{users_.id(), {1, 1'000}}}));
  const TableSnapshot users = pulled(users_, 8);
  EXPECT_EQ(users.pulls, 8u);
  EXPECT_EQ(users.keys, 16u);
  EXPECT_EQ(users.misses(), 8u);
}

TEST_F(TableStatsTest, ARefusedPullCountsForNoTable) {
  start();
  auto client = connect();
  client->call(pull_frame(1, {{users_.id(), {1}}}));
  const Pulled stale = decode_pulled(client->call(pull_frame(2, {{users_.id(), {1}}}, 0, 5)));
  EXPECT_EQ(stale.status.code(), Code::kStale);
  EXPECT_TRUE(waits_until([&] {
    return server_->stats().latency[static_cast<size_t>(wire::Opcode::kPull)].count == 2;
  }));
  EXPECT_EQ(pulled(users_, 1).pulls, 1u);
}

TEST_F(TableStatsTest, TheCountersOfADroppedTableGo) {
  start();
  auto client = connect();
  client->call(pull_frame(1, {{items_.id(), {1}}, {users_.id(), {1}}}));
  const uint32_t dropped = items_.id();
  ASSERT_TRUE(pool_.tables->drop_table(dropped).ok());
  client->call(pull_frame(2, {{users_.id(), {1}}}));
  EXPECT_EQ(pulled(users_, 2).pulls, 2u) << "the other tables keep theirs";
  EXPECT_EQ(server_->stats().tables.count(dropped), 0u);
}

TEST_F(TableStatsTest, ErrorsAreCountedByCode) {
  start();
  auto client = connect();
  client->call(pull_frame(1, {{99, {1}}}));
  client->call(pull_frame(2, {{99, {1}}}));
  client->call(pull_frame(3, {{users_.id(), {1}}}, 0, 5));
  const StatsSnapshot stats = server_->stats();
  EXPECT_EQ(stats.errors, 3u);
  EXPECT_EQ(stats.errors_of(Code::kNotFound), 2u);
  EXPECT_EQ(stats.errors_of(Code::kStale), 1u);
  EXPECT_TRUE(status_contains(R"("NOT_FOUND":2)"));
  EXPECT_TRUE(status_contains(R"("DATA_LOSS":0)")) << "codes without errors are listed too";
}

TEST(StatsByTable, StatsStayWhereTheyAre) {
  StatsByTable all;
  TableStats& first = all.of(7);
  for (uint32_t id = 100; id < 200; ++id) all.of(id);
  EXPECT_EQ(&all.of(7), &first);
}

}  // namespace
}  // namespace petps::server
