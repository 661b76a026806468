// Tests of pins, retirement and reclaiming, one rule at a time.
#include "epoch/epoch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <thread>

namespace petps::epoch {
namespace {

class Collector : public Reclaimer {
 public:
  void reclaim(std::span<const uint64_t> reclaimed) override {
    items.insert(items.end(), reclaimed.begin(), reclaimed.end());
  }
  std::vector<uint64_t> items;
};

using Items = std::vector<uint64_t>;

class EpochTest : public testing::Test {
 protected:
  void retire(const Items& items) { domain.retire(collector, items); }

  Domain domain;
  Collector collector;
};

TEST_F(EpochTest, WithoutPinsEverythingRetiredIsReclaimed) {
  retire({1, 2, 3});
  retire({4});
  EXPECT_EQ(domain.retired_items(), 4u);
  EXPECT_EQ(domain.reclaim(), 4u);
  EXPECT_EQ(collector.items, (Items{1, 2, 3, 4}));
  EXPECT_EQ(domain.retired_items(), 0u);
  EXPECT_EQ(domain.reclaim(), 0u);
}

TEST_F(EpochTest, APinHoldsWhatIsRetiredAfterIt) {
  Reader* reader = domain.lease();
  Pin pin = reader->pin();
  ASSERT_TRUE(pin);
  retire({1});
  EXPECT_EQ(domain.reclaim(), 0u);
  pin.drop();
  EXPECT_EQ(domain.reclaim(), 1u);
}

TEST_F(EpochTest, APinDoesNotHoldWhatWasRetiredBeforeIt) {
  Reader* reader = domain.lease();
  retire({1});
  const Pin pin = reader->pin();
  retire({2});
  EXPECT_EQ(domain.reclaim(), 1u);
  EXPECT_EQ(collector.items, Items{1});
}

TEST_F(EpochTest, PinsDroppedOutOfOrderHoldTheirOwnAndNothingElse) {
  Reader* reader = domain.lease();
  Pin first = reader->pin();
  retire({1});
  Pin second = reader->pin();
  retire({2});
  Pin third = reader->pin();
  retire({3});
  second.drop();  // a first-in-first-out list would drop the first pin here
  EXPECT_EQ(domain.reclaim(), 0u);
  first.drop();
  EXPECT_EQ(domain.reclaim(), 2u);
  EXPECT_EQ(collector.items, (Items{1, 2}));
  third.drop();
  EXPECT_EQ(domain.reclaim(), 1u);
}

TEST_F(EpochTest, PinsOfOtherReadersHoldItemsToo) {
  Reader* reader = domain.lease();
  Reader* other = domain.lease();
  ASSERT_NE(reader, other);
  Pin pin = other->pin();
  retire({1});
  Pin later = reader->pin();
  EXPECT_EQ(domain.reclaim(), 0u);
  pin.drop();
  EXPECT_EQ(domain.reclaim(), 1u);
}

TEST_F(EpochTest, OldestIsTheSmallestLiveEpoch) {
  EXPECT_EQ(domain.oldest(), domain.current() + 1);
  Reader* reader = domain.lease();
  const uint64_t start = domain.current();
  Pin pin = reader->pin();
  retire({1});
  retire({2});
  EXPECT_EQ(domain.current(), start + 2);
  EXPECT_EQ(domain.oldest(), start);
  pin.drop();
  EXPECT_EQ(domain.oldest(), domain.current() + 1);
}

TEST_F(EpochTest, RetiringNothingDoesNotStepTheEpoch) {
  const uint64_t before = domain.current();
  retire({});
  EXPECT_EQ(domain.current(), before);
  EXPECT_EQ(domain.reclaim(), 0u);
}

TEST_F(EpochTest, AFullListReturnsAnEmptyPin) {
  Reader* reader = domain.lease();
  std::vector<Pin> pins;
  for (size_t i = 0; i < kPinsPerReader; ++i) {
    pins.push_back(reader->pin());
    ASSERT_TRUE(pins.back());
  }
  EXPECT_EQ(reader->live(), kPinsPerReader);
  EXPECT_FALSE(reader->pin());
  pins[100].drop();
  EXPECT_TRUE(pins[100] = reader->pin());
  EXPECT_FALSE(reader->pin());
  pins.clear();
  EXPECT_EQ(reader->live(), 0u);
}

TEST_F(EpochTest, EveryPlaceOfAFullListIsScanned) {
  Reader* reader = domain.lease();
  std::vector<Pin> pins;
  for (size_t i = 0; i < kPinsPerReader; ++i) pins.push_back(reader->pin());
  retire({1});
  for (size_t i = 0; i < kPinsPerReader; ++i) {
    ASSERT_EQ(domain.reclaim(), 0u) << "while " << kPinsPerReader - i << " pins live";
    pins[(i * 37) % kPinsPerReader].drop();  // every place once, not in order
  }
  EXPECT_EQ(domain.reclaim(), 1u);
}

TEST_F(EpochTest, AMovedPinIsOnePin) {
  Reader* reader = domain.lease();
  Pin pin = reader->pin();
  Pin moved = std::move(pin);
  EXPECT_EQ(reader->live(), 1u);
  retire({1});
  pin.drop();  // NOLINT: the moved-from pin is empty
  EXPECT_EQ(domain.reclaim(), 0u);
  moved = reader->pin();  // drops the old epoch; the new one is live
  EXPECT_EQ(reader->live(), 1u);
  EXPECT_EQ(domain.reclaim(), 1u);
}

TEST_F(EpochTest, APinMovesToAnotherThread) {
  Reader* reader = domain.lease();
  Pin pin = reader->pin();
  retire({1});
  std::thread completion([moved = std::move(pin)]() mutable { moved.drop(); });
  completion.join();
  EXPECT_EQ(domain.reclaim(), 1u);
  EXPECT_EQ(reader->live(), 0u);
}

TEST_F(EpochTest, AReleasedReaderIsLeasedAgainOnceItsPinsAreGone) {
  Reader* reader = domain.lease();
  Pin pin = reader->pin();
  domain.release(reader);
  Reader* other = domain.lease();
  EXPECT_NE(other, reader) << "its list still holds a pin";
  retire({1});
  EXPECT_EQ(domain.reclaim(), 0u) << "which counts although nobody leases the list";
  pin.drop();
  EXPECT_EQ(domain.reclaim(), 1u);
  EXPECT_EQ(domain.lease(), reader);
  domain.release(nullptr);
}

TEST_F(EpochTest, LeasesAreLimited) {
  std::vector<Reader*> readers;
  for (size_t i = 0; i < kMaxReaders; ++i) readers.push_back(domain.lease());
  EXPECT_EQ(std::count(readers.begin(), readers.end(), nullptr), 0);
  EXPECT_EQ(domain.lease(), nullptr);
  domain.release(readers[5]);
  EXPECT_EQ(domain.lease(), readers[5]);
}

TEST_F(EpochTest, OwnersGetTheirOwnItems) {
  Collector other;
  retire({1});
  domain.retire(other, Items{2, 3});
  retire({4});
  EXPECT_EQ(domain.reclaim(), 4u);
  EXPECT_EQ(collector.items, (Items{1, 4}));
  EXPECT_EQ(other.items, (Items{2, 3}));
}

// An owner that calls back into the domain: reclaim() holds no lock while it calls an owner.
class Recursive : public Reclaimer {
 public:
  explicit Recursive(Domain& domain) : domain_(domain) {}
  void reclaim(std::span<const uint64_t> items) override {
    if (items.front() > 0) domain_.retire(*this, Items{items.front() - 1});
    domain_.release(domain_.lease());
    calls += 1;
  }
  int calls = 0;

 private:
  Domain& domain_;
};

TEST_F(EpochTest, AnOwnerMayRetireAndLeaseWhileItReclaims) {
  Recursive owner(domain);
  domain.retire(owner, Items{3});
  for (int i = 0; i < 4; ++i) EXPECT_EQ(domain.reclaim(), 1u);
  EXPECT_EQ(domain.reclaim(), 0u);
  EXPECT_EQ(owner.calls, 4);
}

TEST_F(EpochTest, DisabledPinsProtectNothing) {
  domain.disable_pins_for_test();
  Reader* reader = domain.lease();
  const Pin pin = reader->pin();
  EXPECT_TRUE(pin);
  EXPECT_EQ(reader->live(), 1u);
  retire({1});
  EXPECT_EQ(domain.reclaim(), 1u);
}

TEST_F(EpochTest, ALargeBatchStepsTheEpochOnce) {
  Items items(1'000'000);
  std::iota(items.begin(), items.end(), uint64_t{1});
  const uint64_t before = domain.current();
  retire(items);
  EXPECT_EQ(domain.current(), before + 1);
  EXPECT_EQ(domain.reclaim(), items.size());
  EXPECT_EQ(collector.items, items);
}

}  // namespace
}  // namespace petps::epoch
