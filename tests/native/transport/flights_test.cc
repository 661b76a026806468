// Completions of zero-copy sends, checked against a slow model: a set of numbers per list.
// Does not cover: which numbers the kernel assigns (tests/contract, over real sockets).
#include "transport/tcp/flights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "tests/seed.h"

namespace petps::transport {
namespace {

class FlightsTest : public testing::Test {
 protected:
  ~FlightsTest() override { domain_.release(reader_); }
  void add(uint32_t first, uint32_t sends, uint64_t now_ns = 0) {
    gather::GatherList list;
    list.header(8);
    flights_.add(std::move(list), reader_->pin(), first, sends, now_ns);
  }
  size_t complete(uint32_t low, uint32_t high) {
    landed_.clear();
    flights_.complete(low, high, landed_);
    for (const gather::GatherList& list : landed_) EXPECT_TRUE(list.empty());
    return landed_.size();
  }

  epoch::Domain domain_;
  epoch::Reader* reader_ = domain_.lease();
  Flights flights_;
  std::vector<gather::GatherList> landed_;
};

TEST_F(FlightsTest, APinLivesUntilTheLastOfItsSendsHasCompleted) {
  add(0, 3);
  EXPECT_EQ(complete(2, 2), 0u);
  EXPECT_EQ(complete(0, 0), 0u);
  EXPECT_EQ(reader_->live(), 1u);
  EXPECT_EQ(complete(1, 1), 1u);
  EXPECT_EQ(reader_->live(), 0u);
  EXPECT_TRUE(flights_.empty());
}

TEST_F(FlightsTest, OneRangeMayCompleteSeveralListsAndPartsOfOthers) {
  add(0, 2);
  add(2, 1);
  add(3, 2);
  EXPECT_EQ(complete(1, 3), 1u);
  EXPECT_EQ(flights_.size(), 2u);
  EXPECT_EQ(complete(0, 0), 1u);
  EXPECT_EQ(complete(4, 4), 1u);
}

TEST_F(FlightsTest, NumbersWrapAround) {
  add(0xfffffffe, 4);
  EXPECT_EQ(complete(0, 1), 0u);
  EXPECT_EQ(reader_->live(), 1u);
  EXPECT_EQ(complete(0xfffffffe, 0xffffffff), 1u);
}

TEST_F(FlightsTest, AnOverdueListIsReportedOnce) {
  add(0, 1, 100);
  add(1, 1, 200);
  EXPECT_FALSE(flights_.take_overdue(100));
  EXPECT_TRUE(flights_.take_overdue(101));
  EXPECT_FALSE(flights_.take_overdue(101));
  EXPECT_TRUE(flights_.take_overdue(201));
  complete(0, 1);
}

TEST_F(FlightsTest, EqualsTheSlowModel) {
  const uint64_t seed = tests::seed();
  std::mt19937_64 random(seed);
  uint32_t next = 0xffffff00;
  std::vector<std::set<uint32_t>> model;
  std::vector<uint32_t> open;  // numbers that have not completed, in order
  for (int step = 0; step < 20'000; ++step) {
    if (model.size() < 16 && random() % 2 == 0) {
      const auto sends = static_cast<uint32_t>(1 + random() % 5);
      add(next, sends);
      std::set<uint32_t>& numbers = model.emplace_back();
      for (uint32_t i = 0; i < sends; ++i, ++next) {
        numbers.insert(next);
        open.push_back(next);
      }
    } else if (!open.empty()) {
      const size_t at = random() % open.size();
      size_t end = at + 1;  // a range of neighbours, perhaps of several lists
      while (end < open.size() && open[end] == open[end - 1] + 1 && random() % 4 != 0) ++end;
      for (size_t i = at; i < end; ++i) {
        for (std::set<uint32_t>& numbers : model) numbers.erase(open[i]);
      }
      const uint32_t low = open[at];
      const uint32_t high = open[end - 1];
      open.erase(open.begin() + static_cast<ptrdiff_t>(at),
                 open.begin() + static_cast<ptrdiff_t>(end));
      const size_t before = model.size();
      std::erase_if(model, [](const std::set<uint32_t>& numbers) { return numbers.empty(); });
      ASSERT_EQ(complete(low, high), before - model.size());
      ASSERT_EQ(flights_.size(), model.size());
      ASSERT_EQ(reader_->live(), model.size());
    }
  }
  for (const uint32_t number : open) complete(number, number);
  EXPECT_TRUE(flights_.empty());
}

}  // namespace
}  // namespace petps::transport
