// Slots against a slow model: every slot is either free, or taken, or waiting for the walk.
#include "pool/slots.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "memory_pool.h"
#include "tests/seed.h"

namespace petps::pool {
namespace {

using testing_support::Memory;
using testing_support::spec;

class Fuzz {
 public:
  Fuzz(uint32_t row_bytes, bool on_file, uint64_t seed) : random_(seed), row_bytes_(row_bytes) {
    if (on_file) {
      memory_.kind = media::Kind::kFile;
      memory_.durability = media::Durability::kProcess;
    }
    pool_ = memory_.format();
    EXPECT_TRUE(pool_->create_table(spec("t", 2000, row_bytes)).ok());
  }

  void run(int rounds) {
    for (int round = 0; round < rounds && !::testing::Test::HasFailure(); ++round) {
      const uint64_t kind = random_() % 20;
      if (kind < 9) take();
      if (kind >= 9 && kind < 18) release();
      if (kind == 18) reopen(random_() % 2 == 0);
      if (kind == 19) walk();
      check();
    }
  }

 private:
  Slots& slots() { return pool_->slots(1); }

  void take() {
    std::vector<SlotRef> refs(1 + random_() % 60);
    if (taken_.size() + refs.size() > 2000) return;
    bool wait = false;
    base::Status status = slots().allocate(refs, &wait);
    if (!status.ok() && wait) {  // fresh extents alone do not suffice
      walk();
      status = slots().allocate(refs, &wait);
    }
    ASSERT_TRUE(status.ok()) << status.to_string();
    for (const SlotRef ref : refs) {
      ASSERT_TRUE(slots().is_slot(ref));
      ASSERT_FALSE(slots().is_slot(ref + 1));
      ASSERT_TRUE(taken_.insert(ref).second) << "slot " << ref << " was allocated twice";
      ASSERT_FALSE(waiting_.contains(ref))
          << "slot " << ref << " waits for the walk and was allocated";
      std::memset(slots().row(ref), static_cast<int>(ref & 0xFF), row_bytes_);
      slots().header(ref)->key = ref;
    }
  }

  void release() {
    std::vector<SlotRef> refs;
    for (const SlotRef ref : taken_) {
      if (random_() % 8 == 0) refs.push_back(ref);
    }
    for (const SlotRef ref : refs) {
      taken_.erase(ref);
      if (slots().needs_walk() && ref < old_end_) waiting_.insert(ref);
    }
    slots().release(refs);
  }

  void walk() {
    if (!slots().needs_walk()) return;
    for (const SlotRef ref : taken_) slots().mark(ref);
    for (const SlotRef ref : waiting_) slots().mark(ref);  // like a slot that a reader still reads
    slots().finish_walk();
    waiting_.clear();
  }

  void reopen(bool clean) {
    if (clean) {
      walk();
      media::Flusher flusher(pool_->medium());
      slots().store_free_maps(flusher);
    }
    memory_.keep(*pool_);
    pool_ = memory_.attach().value();
    old_end_ = memory_.used;
    waiting_.clear();
    if (slots().total() > 0) {
      ASSERT_TRUE(slots().needs_walk());
      ASSERT_EQ(slots().free_count(), 0u);
    }
    if (clean && slots().needs_walk()) {
      slots().load_free_maps();
      ASSERT_FALSE(slots().needs_walk());
    }
  }

  void check() {
    if (!slots().needs_walk()) {
      ASSERT_EQ(slots().free_count() + taken_.size(), slots().total());
    }
    for (const SlotRef ref : taken_) {
      ASSERT_EQ(slots().header(ref)->key, ref);
      ASSERT_EQ(*slots().row(ref), static_cast<std::byte>(ref & 0xFF));
      ASSERT_EQ(slots().row(ref)[row_bytes_ - 1], static_cast<std::byte>(ref & 0xFF));
      ASSERT_FALSE(slots().is_free(ref));
    }
  }

  std::mt19937_64 random_;
  uint32_t row_bytes_;
  Memory memory_;
  std::unique_ptr<Pool> pool_;
  std::set<SlotRef> taken_;
  std::set<SlotRef> waiting_;  // released, but in an extent that the walk has not yet checked
  uint64_t old_end_ = 0;
};

TEST(Slots, AgreeWithASlowModel) {
  for (const uint32_t row_bytes : {8u, 72u, 512u, 1000u}) {
    for (uint64_t i = 0; i < 6; ++i) {
      const bool on_file = i % 2 == 1;
      SCOPED_TRACE("row bytes " + std::to_string(row_bytes) + (on_file ? ", on a file" : "") +
                   ", seed " + std::to_string(tests::seed() + i));
      Fuzz(row_bytes, on_file, tests::seed() + i).run(150);
      if (HasFailure()) return;
    }
  }
}

TEST(Slots, ATornFreeMapIsIgnored) {
  Memory memory;
  {
    auto pool = memory.format();
    ASSERT_TRUE(pool->create_table(spec("t", 100)).ok());
    bool wait = false;
    std::vector<SlotRef> refs(10);
    ASSERT_TRUE(pool->slots(1).allocate(refs, &wait).ok());
    media::Flusher flusher(pool->medium());
    pool->slots(1).store_free_maps(flusher);
    memory.keep(*pool);
  }
  const uint64_t slots_extent = memory.used - kTestUnitBytes;
  memory.base()[slots_extent + 16] ^= std::byte{1};
  auto pool = memory.attach().value();
  pool->slots(1).load_free_maps();
  EXPECT_TRUE(pool->slots(1).needs_walk());
  memory.base()[slots_extent + 16] ^= std::byte{1};
  pool->slots(1).load_free_maps();
  EXPECT_FALSE(pool->slots(1).needs_walk());
  EXPECT_EQ(pool->slots(1).free_count(), pool->slots(1).total() - 10);
}

// A damaged entry may name anything. What is released is then kept out of use, and counted.
TEST(Slots, ARefOfADamagedEntryIsKeptUnused) {
  for (const bool is_walking : {false, true}) {
    Memory memory;
    auto pool = memory.format();
    ASSERT_TRUE(pool->create_table(spec("t", 100)).ok());
    bool wait = false;
    std::vector<SlotRef> refs(10);
    ASSERT_TRUE(pool->slots(1).allocate(refs, &wait).ok());
    if (is_walking) {
      memory.keep(*pool);
      pool.reset();
      pool = memory.attach().value();
      ASSERT_TRUE(pool->begin_writing().ok());
      for (const SlotRef ref : refs) pool->slots(1).mark(ref);
    }
    Slots& slots = pool->slots(1);
    ASSERT_EQ(slots.needs_walk(), is_walking);
    SlotRef end = refs[0];
    while (slots.is_slot(end)) end += slots.row_bytes();
    const uint64_t most = slots.max_slots();
    const std::vector<SlotRef> damaged = {0,   8,           refs[1] + 1, end - slots.row_bytes(),
                                          end, memory.used, ~uint64_t{0}};
    slots.release(damaged);
    slots.release(std::span(refs).first(1));
    slots.finish_walk();
    EXPECT_EQ(slots.kept_unused(), damaged.size());
    EXPECT_EQ(slots.max_slots(), most + damaged.size());
    EXPECT_EQ(slots.free_count(), slots.total() - refs.size() + 1);
    EXPECT_TRUE(slots.is_free(refs[0]));
    EXPECT_FALSE(slots.is_free(refs[1]));
  }
}

TEST(Slots, AllocationFromAFullPoolTakesNothing) {
  Memory memory;
  auto pool = memory.format();
  ASSERT_TRUE(pool->create_table(spec("t", 30'000, 4096)).ok());
  bool wait = false;
  std::vector<SlotRef> refs(64);
  base::Status status;
  while (status.ok()) status = pool->slots(1).allocate(refs, &wait);
  EXPECT_EQ(status.code(), base::Code::kResourceExhausted);
  EXPECT_FALSE(wait) << "there is nothing that a walk would free";
  const uint64_t left = pool->slots(1).free_count();
  EXPECT_LT(left, 64u);
  if (left > 0) {
    EXPECT_TRUE(pool->slots(1).allocate({refs.data(), left}, &wait).ok());
  }
  EXPECT_EQ(pool->slots(1).free_count(), 0u);
}

// Rows that are replaced continuously need free slots near one another.
TEST(Slots, AWrittenTableKeepsAShareOfItsSlotsFree) {
  Memory memory;
  auto pool = memory.format();
  ASSERT_TRUE(pool->create_table(spec("t", 20'000, 64)).ok());
  Slots& slots = pool->slots(1);
  bool wait = false;
  std::vector<SlotRef> live(20'000);
  ASSERT_TRUE(slots.allocate(live, &wait).ok());
  std::mt19937_64 random(tests::seed());
  std::vector<SlotRef> taken(50);
  std::vector<SlotHeader*> headers(taken.size());
  for (int round = 0; round < 4000; ++round) {
    ASSERT_TRUE(slots.allocate(taken, &wait, headers.data()).ok());
    for (size_t i = 0; i < taken.size(); ++i) {
      ASSERT_EQ(headers[i], slots.header(taken[i]));
      std::swap(live[random() % live.size()], taken[i]);
    }
    slots.release(taken);
  }
  EXPECT_GE(slots.free_count(), slots.total() / 16);
  EXPECT_LE(slots.total(), slots.max_slots());
}

TEST(Slots, ATableThatIsOnlyLoadedTakesNoSpareSlots) {
  for (const media::Kind kind : {media::Kind::kDram, media::Kind::kFile}) {
    Memory memory(uint64_t{64} << 20);
    memory.kind = kind;
    memory.durability = media::Durability::kProcess;
    const auto pool = memory.format();
    ASSERT_TRUE(pool->create_table(spec("t", 60'000, 512)).ok());
    Slots& slots = pool->slots(1);
    bool wait = false;
    std::vector<SlotRef> refs(50);
    for (uint64_t loaded = 0; loaded < 50'000; loaded += refs.size())
      ASSERT_TRUE(slots.allocate(refs, &wait).ok());
    EXPECT_LE(slots.free_count(), kSlotsExtentMaxUnits * kTestUnitBytes / 512) << "one extent";
  }
}

// Replace rows of a file. Return the number of 64 KiB regions that were written.
size_t regions_written(media::Durability durability) {
  Memory memory;
  memory.kind = media::Kind::kFile;
  memory.durability = durability;
  const auto pool = memory.format();
  EXPECT_TRUE(pool->create_table(spec("t", 2000, 512)).ok());
  Slots& slots = pool->slots(1);
  bool wait = false;
  std::vector<SlotRef> live(1000);
  EXPECT_TRUE(slots.allocate(live, &wait).ok());
  std::set<uint64_t> regions;
  for (const SlotRef ref : live) regions.insert(ref / 65536);
  std::mt19937_64 random(tests::seed());
  std::vector<SlotRef> taken(50);
  for (int round = 0; round < 200; ++round) {
    EXPECT_TRUE(slots.allocate(taken, &wait).ok());
    for (SlotRef& ref : taken) {
      regions.insert(ref / 65536);
      std::swap(live[random() % live.size()], ref);
    }
    slots.release(taken);
  }
  return regions.size();
}

// The first store to a clean page of a file is expensive, and later the kernel writes its folio.
TEST(Slots, SlotsInPagesWrittenAShortTimeAgoComeFirst) {
  const size_t rows = 1050;  // 50 of them are in flight
  EXPECT_LE(regions_written(media::Durability::kProcess), rows * 512 / 65536 + 3);
  EXPECT_GT(regions_written(media::Durability::kPower), rows * 512 / 65536 + 5);
}

// Free one slot in each region of a file that was not written a short time ago, except for ten
// regions, which become free as a whole. Return the number of regions that the next rows touch.
size_t regions_of_next_rows(media::Durability durability) {
  Memory memory(uint64_t{128} << 20);
  memory.kind = media::Kind::kFile;
  memory.durability = durability;
  const auto pool = memory.format();
  EXPECT_TRUE(pool->create_table(spec("t", 1000, 512)).ok());
  Slots& slots = pool->slots(1);
  bool wait = false;
  std::vector<SlotRef> live(slots.max_slots());  // so that the table takes no spare slots
  EXPECT_TRUE(slots.allocate(live, &wait).ok());
  std::vector<SlotRef> rest(slots.free_count());
  EXPECT_TRUE(slots.allocate(rest, &wait).ok());
  std::vector<SlotRef> freed;
  std::set<uint64_t> seen;
  const uint64_t dense = live[live.size() / 2] / 65536;
  for (const SlotRef ref : live) {
    if (ref < live[live.size() / 4]) continue;  // written last, below
    const bool is_dense = ref / 65536 >= dense && ref / 65536 < dense + 10;
    if (is_dense || seen.insert(ref / 65536).second) freed.push_back(ref);
  }
  slots.release(freed);
  EXPECT_EQ(slots.free_count(), freed.size());
  std::vector<SlotRef> next(100);
  EXPECT_TRUE(slots.allocate(next, &wait).ok());
  std::set<uint64_t> regions;
  for (const SlotRef ref : next) regions.insert(ref / 65536);
  EXPECT_EQ(regions.contains(dense), durability == media::Durability::kProcess);
  return regions.size();
}

TEST(Slots, RegionsWithManyFreeSlotsComeBeforeSparseOnes) {
  EXPECT_LE(regions_of_next_rows(media::Durability::kProcess), 4u);
  EXPECT_GT(regions_of_next_rows(media::Durability::kPower), 50u);
}

}  // namespace
}  // namespace petps::pool
