// Whose push the writer takes next.
#include "server/push_writer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "raw_client.h"

namespace petps::server {
namespace {

class PushWriterTest : public testing::Test {
 protected:
  static constexpr size_t kPushes = 6;  // that share drains; an even number

  PushJob job(uint64_t owner, table::Table& table) {
    std::vector<uint64_t> keys(first_.keys_together() / kPushes);
    std::iota(keys.begin(), keys.end(), 0);
    const wire::Frame frame = push_frame(1, table, keys, 1);
    PushJob push;
    EXPECT_TRUE(wire::decode_request_header(frame, push.origin.header).ok());
    push.origin.connection = owner;
    push.owner = owner;
    push.table = pool_.tables->find(table.id());
    push.keys = keys.size();
    push.frame.assign(frame.begin(), frame.end());
    return push;
  }
  bool queue(uint64_t owner, table::Table& table) {
    PushJob push = job(owner, table);
    const bool has_room = writer_.has_room(owner, push.frame.size());
    const bool is_queued = writer_.queue(push);
    EXPECT_EQ(has_room, is_queued);
    return is_queued;
  }
  // Apply all pushes. Return their owners in the order of the answers.
  std::vector<uint64_t> apply() {
    writer_.start();
    writer_.finish();
    return owners_;
  }

  TestPool pool_;
  table::Table& first_ = pool_.add_table("first", 16, 64, 1000);
  table::Table& second_ = pool_.add_table("second", 16, 64, 1000);
  transport::MemoryBudget memory_{size_t{1} << 30};
  std::vector<uint64_t> owners_;
  PushWriter writer_{*pool_.tables, wire::Limits{}, memory_, [this](const PushDone& done) {
                       EXPECT_TRUE(done.status.ok()) << done.status.to_string();
                       owners_.push_back(done.origin.connection);
                     }};
};

TEST_F(PushWriterTest, AnOwnerHasHalfOfTheQueueAndOthersDoNotWaitForIt) {
  size_t queued = 0;
  while (queue(1, first_)) ++queued;
  EXPECT_EQ(queued, kPushQueueJobs / 2);
  EXPECT_TRUE(queue(2, second_));
  EXPECT_TRUE(queue(3, first_));
  const std::vector<uint64_t> owners = apply();
  ASSERT_EQ(owners.size(), queued + 2);
  const auto place = [&](uint64_t owner) {
    return std::ranges::find(owners, owner) - owners.begin();
  };
  // Owner 3's push shares the drains of owner 1's first; owner 2's follows them.
  EXPECT_LT(place(3), ptrdiff_t{kPushes});
  EXPECT_LE(place(2), ptrdiff_t{kPushes});
  EXPECT_EQ(writer_.waiting(), 0u);
  EXPECT_EQ(memory_.used(), 0u);
}

TEST_F(PushWriterTest, EachOwnerGetsATurnAlsoBetweenTwoThatShareTheirDrains) {
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(queue(1, first_));
    ASSERT_TRUE(queue(3, first_));
  }
  ASSERT_TRUE(queue(2, second_));
  const std::vector<uint64_t> owners = apply();
  const auto place = std::ranges::find(owners, uint64_t{2}) - owners.begin();
  EXPECT_LE(place, ptrdiff_t{3 * kPushes});
}

TEST_F(PushWriterTest, JobsOfAnOwnerKeepTheirOrder) {
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(queue(1, i % 3 == 0 ? second_ : first_));
  std::vector<uint64_t> order;
  for (int i = 0; i < 20; ++i) order.push_back(1);
  EXPECT_EQ(apply(), order);
  EXPECT_EQ(writer_.groups(), 14u) << "a push of another table ends a group";
}

TEST_F(PushWriterTest, APushThatWaitedIsCheckedAgain) {
  std::vector<base::Status> answers;
  uint64_t asked = 0;
  PushWriter writer(
      *pool_.tables, wire::Limits{}, memory_,
      [&](const PushDone& done) { answers.push_back(done.status); },
      [&](uint64_t change_count, std::span<const uint64_t> keys) {
        EXPECT_FALSE(keys.empty());
        asked = change_count;
        return base::Status(base::Code::kWrongShard, "it has gone");
      });
  PushJob push = job(1, first_);
  push.map_change_count = 7;
  ASSERT_TRUE(writer.queue(push));
  writer.start();
  writer.finish();
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_EQ(answers[0].code(), base::Code::kWrongShard);
  EXPECT_EQ(asked, 7u);
  EXPECT_EQ(first_.status().rows, 0u);
}

TEST_F(PushWriterTest, KeysOfATrackedPartitionAreRemembered) {
  writer_.track(0, 2, true);
  ASSERT_TRUE(queue(1, first_));
  ASSERT_TRUE(queue(1, second_));
  apply();
  std::vector<PushedKey> pushed;
  EXPECT_TRUE(writer_.take_tracked(0, pushed));
  size_t of_second = 0;
  for (const PushedKey& key : pushed) {
    EXPECT_EQ(wire::partition_of(key.key, 2), 0u);
    of_second += key.table == second_.id() ? 1 : 0;
  }
  EXPECT_EQ(pushed.size(), 2 * of_second);
  EXPECT_GT(of_second, 0u);
  EXPECT_TRUE(writer_.take_tracked(1, pushed));
  EXPECT_TRUE(pushed.empty());
}

}  // namespace
}  // namespace petps::server
