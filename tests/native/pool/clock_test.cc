// Event times: their arithmetic beside a slow model that keeps every commit, and their records in
// the pool. Does not cover the walk that deletes rows (tests/native/table/expire_test.cc) or torn
// writes of a real crash (tests/crash).
#include <map>
#include <random>

#include "memory_pool.h"
#include "pool/slots.h"

namespace petps::pool {
namespace {

using testing_support::Memory;
using testing_support::spec;

constexpr uint64_t kStart = uint64_t{1'700'000'000} * kNsPerSecond;

EventClock clock_for(uint32_t expire_after) {
  EventClock clock;
  clock.cell_ns = EventClock::cell_of(expire_after);
  return clock;
}

// All commits with the event time of each, computed as EXPIRY.md defines it.
struct SlowClock {
  uint64_t expire_ns;
  uint64_t now = 0;
  uint64_t shown = 0;
  uint64_t debt = 0;
  std::map<uint64_t, uint64_t> times;  // version -> event time at its commit
  void commit(uint64_t version, uint64_t at) {
    if (!times.empty() && version <= times.rbegin()->first) return;
    if (times.empty()) now = at;
    if (!times.empty() && at < shown) debt = std::min(debt + shown - at, expire_ns / 4);
    if (!times.empty() && at > shown) {
      const uint64_t passed = std::min(at - shown, expire_ns / 4);
      now += passed - std::min(passed, debt);
      debt -= std::min(debt, at - shown);
    }
    shown = at;
    times[version] = now;
  }
};

TEST(EventClock, ExpiresEachVersionWithinTheLastTwoCells) {
  const uint64_t seed = testing::UnitTest::GetInstance()->random_seed();
  std::mt19937_64 random(seed);
  for (int round = 0; round < 200; ++round) {
    const auto seconds = static_cast<uint32_t>(1 + random() % 1000);
    EventClock clock = clock_for(seconds);
    const uint64_t cell = clock.cell_ns;
    SlowClock slow{cell * kExpiryCells, 0, 0, 0, {}};
    uint64_t at = kStart + random() % slow.expire_ns;
    uint64_t version = random() % 3 == 0 ? (uint64_t{1} << 32) - 40 : random() % 100;
    for (int step = 0; step < 300; ++step) {
      // Mostly small steps, some back, some far ahead: a publisher whose clock jumps.
      const uint64_t kind = random() % 20;
      at += kind == 0 ? 10 * slow.expire_ns : random() % (slow.expire_ns / 10);
      if (kind == 1) at -= slow.expire_ns / 2;
      version += random() % 3;
      clock.commit(version, at);
      slow.commit(version, at);
      ASSERT_EQ(clock.time_ns, slow.now) << "seed " << seed;
      for (const auto& [committed, time] : slow.times) {
        const bool expires = clock.expires(static_cast<uint32_t>(committed));
        const uint64_t age = slow.now - time;
        ASSERT_TRUE(!expires || age >= slow.expire_ns) << "too early, seed " << seed;
        ASSERT_TRUE(expires || age < slow.expire_ns + 2 * cell) << "late, seed " << seed;
      }
    }
  }
}

TEST(EventClock, OneCommitAdvancesItByAQuarterAtMostAndNothingIsMadeUpFor) {
  EventClock clock = clock_for(4800);
  clock.commit(1, kStart);
  uint64_t at = kStart + 1'000'000 * kNsPerSecond;  // a pause of 11 days, or a wrong clock
  clock.commit(2, at);
  EXPECT_EQ(clock.time_ns, kStart + 1200 * kNsPerSecond);
  for (uint64_t version = 3; version < 1000; ++version) clock.commit(version, at += kNsPerSecond);
  EXPECT_EQ(clock.time_ns, kStart + (1200 + 997) * kNsPerSecond);
  EXPECT_FALSE(clock.expires(1));
  clock.commit(1000, kStart);  // the clock was set right, by more than a quarter
  EXPECT_EQ(clock.time_ns, kStart + (1200 + 997) * kNsPerSecond);
  clock.commit(1001, kStart + 1200 * kNsPerSecond);  // pays for that
  EXPECT_EQ(clock.time_ns, kStart + (1200 + 997) * kNsPerSecond);
  clock.commit(1002, kStart + 1207 * kNsPerSecond);
  EXPECT_EQ(clock.time_ns, kStart + (1200 + 997 + 7) * kNsPerSecond);
}

// The clocks of two publishers, or one that flaps, differ: event time does not gain that each time.
TEST(EventClock, AlternatingClocksDoNotPushIt) {
  for (const uint64_t skew : {uint64_t{60}, uint64_t{900}, uint64_t{1'000'000}}) {
    EventClock clock = clock_for(4800);
    uint64_t at = kStart;
    for (uint64_t version = 1; version <= 1000; ++version, at += kNsPerSecond)
      clock.commit(version, at + (version % 2) * skew * kNsPerSecond);
    const uint64_t advanced = (clock.time_ns - kStart) / kNsPerSecond;
    EXPECT_LE(advanced, skew + 1000 + 1200) << skew;
    EXPECT_LE(advanced - std::min<uint64_t>(advanced, skew), 2300u) << skew;
  }
}

// Whatever commits show before, a row never expires before its age by a clock that is right since.
TEST(EventClock, NoRowExpiresBeforeItsAge) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 200; ++round) {
    EventClock clock = clock_for(100);
    uint64_t version = 0;
    uint64_t at = random() % 2 == 0 ? kStart : random() % 3;
    for (int wrong = 0; wrong < 5; ++wrong) clock.commit(++version, random());
    std::map<uint64_t, uint64_t> times;
    for (int step = 0; step < 400; ++step) {
      at += random() % 10 == 0 ? random() % (500 * kNsPerSecond) : random() % (3 * kNsPerSecond);
      clock.commit(++version, at);
      times[version] = at;
      for (const auto& [committed, time] : times) {
        ASSERT_TRUE(!clock.expires(static_cast<uint32_t>(committed)) ||
                    at - time >= 100 * kNsPerSecond)
            << round << " " << committed;
      }
    }
    EXPECT_TRUE(clock.expires(static_cast<uint32_t>(times.begin()->first)));
  }
}

TEST(EventClock, ItsTimesMayBeAnything) {
  for (const uint64_t first : {uint64_t{0}, uint64_t{1}, UINT64_MAX}) {
    for (const uint32_t seconds : {1u, kMaxExpireAfter}) {
      EventClock clock = clock_for(seconds);
      const uint64_t step = clock.cell_ns * kExpiryCells / kExpirySteps;
      clock.commit(1, first);
      uint64_t before = clock.time_ns;
      for (uint64_t version = 2; version < 60; ++version) {
        if (clock.time_ns > UINT64_MAX - 2 * step) break;
        clock.commit(version, version % 2 == 0 ? UINT64_MAX : version);
        EXPECT_GE(clock.time_ns, before);
        EXPECT_LE(clock.time_ns - before, step);
        before = clock.time_ns;
      }
    }
  }
}

TEST(EventClock, CountsACommitOnce) {
  EventClock clock = clock_for(100);
  EXPECT_TRUE(clock.commit(5, kStart));
  const EventClock before = clock;
  EXPECT_FALSE(clock.commit(5, kStart + 50 * kNsPerSecond));
  EXPECT_FALSE(clock.commit(4, kStart + 50 * kNsPerSecond));
  EXPECT_EQ(clock.time_ns, before.time_ns);
  EXPECT_EQ(clock.bounds, before.bounds);
}

TEST(EventClock, KeepsRowsOfVersionsThatAreNotCommitted) {
  EventClock clock = clock_for(48);
  for (uint64_t version = 1; version <= 400; ++version)
    clock.commit(version, kStart + version * kNsPerSecond);
  EXPECT_TRUE(clock.expires(0));  // loaded before the first commit
  EXPECT_TRUE(clock.expires(350));
  EXPECT_FALSE(clock.expires(353));
  EXPECT_FALSE(clock.expires(401));
  EXPECT_FALSE(clock.expires(400 + kVersionsAhead));
  EXPECT_FALSE(clock.expires(401 + kVersionsAhead));  // older than version 0: no version at all
}

TEST(EventClock, AnotherExpireAfterNeverExpiresEarlier) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 100; ++round) {
    const auto first = static_cast<uint32_t>(1 + random() % 500);
    const auto second = static_cast<uint32_t>(1 + random() % 500);
    EventClock clock = clock_for(first);
    std::map<uint64_t, uint64_t> times;
    uint64_t at = kStart;
    const auto commit = [&](uint64_t version) {
      at += random() % (uint64_t{first} * kNsPerSecond / 20);
      clock.commit(version, at);
      times[version] = clock.time_ns;
    };
    for (uint64_t version = 1; version < 200; ++version) commit(version);
    clock.change_cell(EventClock::cell_of(second));
    for (uint64_t version = 200; version < 400; ++version) {
      for (const auto& [committed, time] : times) {
        ASSERT_TRUE(!clock.expires(static_cast<uint32_t>(committed)) ||
                    clock.time_ns - time >= clock.cell_ns * kExpiryCells)
            << first << " " << second;
      }
      commit(version);
    }
    EXPECT_TRUE(clock.time_ns - times[1] < 2 * clock.cell_ns * kExpiryCells || clock.expires(1));
  }
}

class Clocks : public testing::Test {
 protected:
  void SetUp() override { pool_ = memory_.format(3); }
  void TearDown() override { pool_.reset(); }
  TableRecord create(uint32_t expire_after, const std::string& name = "t",
                     Feed feed = Feed::kDelta) {
    TableSpec with = spec(name, 100);
    with.feed = feed;
    with.expire_after = expire_after;
    auto created = pool_->create_table(with);
    EXPECT_TRUE(created.ok()) << created.status().to_string();
    return created.value();
  }
  void commit(std::vector<Commit> commits) {
    media::Flusher flusher(pool_->medium());
    EXPECT_TRUE(pool_->write_clocks(commits, flusher).ok());
    EXPECT_TRUE(flusher.drain(media::Site::kClocked).ok());
  }
  uint32_t written_version() {
    const uint64_t second = layout::kMap.superblock_bytes;
    const bool newer = memory_.read<uint64_t>(second + 24) > memory_.read<uint64_t>(24);
    return memory_.read<uint32_t>((newer ? second : 0) + 8);
  }
  Memory memory_;
  std::unique_ptr<Pool> pool_;
};

TEST_F(Clocks, SurviveAReopen) {
  const TableRecord table = create(3600);
  commit({{1, 0, 7, kStart}, {1, 2, 7, kStart + 5}, {1, 0, 8, kStart + 9}, {2, 1, 1, kStart}});
  memory_.reopen(&pool_);
  const std::vector<EventClock> clocks = pool_->clocks(table.id);
  ASSERT_EQ(clocks.size(), 3u);
  EXPECT_EQ(clocks[0].version, 8u);
  EXPECT_EQ(clocks[0].time_ns, kStart + 9);
  EXPECT_EQ(clocks[0].bounds[0], 9u);
  EXPECT_EQ(clocks[0].cell_ns, 75 * kNsPerSecond);
  EXPECT_EQ(clocks[1].time_ns, 0u);
  EXPECT_EQ(clocks[2].time_ns, kStart + 5);
  EXPECT_EQ(pool_->tables()[0].spec.expire_after, 3600u);
}

TEST_F(Clocks, ATornRecordLeavesTheOneBefore) {
  const TableRecord table = create(3600);
  commit({{1, 1, 7, kStart}});
  commit({{1, 1, 8, kStart + 50}});
  uint64_t newest = 0;
  for (uint64_t at = pool_->medium().size() - 64 * 1024; at < pool_->medium().size(); at += 512) {
    if (memory_.read<uint32_t>(at) == table.id && memory_.read<uint64_t>(at + 8) == 2) newest = at;
  }
  ASSERT_NE(newest, 0u);
  memory_.write<uint64_t>(newest + 24, 1);
  memory_.reopen(&pool_);
  EXPECT_EQ(pool_->clocks(table.id)[1].version, 7u);
  commit({{1, 1, 8, kStart + 60}});
  memory_.reopen(&pool_);
  EXPECT_EQ(pool_->clocks(table.id)[1].time_ns, kStart + 60);
}

TEST_F(Clocks, AFormatThatOlderReleasesRefuseIsWrittenOnlyWhenRowsExpire) {
  const TableRecord table = create(0);
  EXPECT_EQ(written_version(), 3u);
  EXPECT_TRUE(pool_->clocks(table.id).empty());
  ASSERT_TRUE(pool_->set_expiry(table.id, 60).ok());
  EXPECT_EQ(written_version(), 4u);
  EXPECT_EQ(pool_->clocks(table.id).size(), 3u);
  memory_.reopen(&pool_);
  ASSERT_TRUE(pool_->set_expiry(table.id, 0).ok());
  EXPECT_EQ(written_version(), 4u);  // an extent of clocks is left
  EXPECT_TRUE(pool_->clocks(table.id).empty());
}

TEST_F(Clocks, AnEarlierExpiryDoesNotCountAgain) {
  const TableRecord table = create(60);
  commit({{1, 0, 7, kStart}});
  const uint64_t size = pool_->medium().size();
  ASSERT_TRUE(pool_->set_expiry(table.id, 0).ok());
  commit({{1, 0, 8, kStart + 1}});  // nothing expires, so nothing is counted
  ASSERT_TRUE(pool_->set_expiry(table.id, 120).ok());
  EXPECT_EQ(pool_->clocks(table.id)[0].time_ns, 0u);
  EXPECT_EQ(pool_->medium().size(), size);  // the extent is used again
  memory_.reopen(&pool_);
  EXPECT_EQ(pool_->clocks(table.id)[0].time_ns, 0u);
  EXPECT_EQ(pool_->clocks(table.id)[0].version, 7u);  // versions go on
  EXPECT_EQ(pool_->clocks(table.id)[0].cell_ns, 120 * kNsPerSecond / 48);
}

TEST_F(Clocks, AnotherExpireAfterHoldsAfterAReopenWithoutAWrite) {
  const TableRecord table = create(60);
  commit({{1, 0, 7, kStart}});
  ASSERT_TRUE(pool_->set_expiry(table.id, 600).ok());
  memory_.reopen(&pool_);
  EXPECT_EQ(pool_->clocks(table.id)[0].cell_ns, 600 * kNsPerSecond / 48);
  EXPECT_EQ(pool_->clocks(table.id)[0].bounds[0], 8u);
}

TEST_F(Clocks, ADroppedTableGivesItsClocksBack) {
  const TableRecord table = create(60, "a", Feed::kPush);
  ASSERT_TRUE(pool_->drop_table(table.id).ok());
  const uint64_t free = pool_->free_bytes();
  pool_->free_table(table.id);
  EXPECT_EQ(pool_->free_bytes() - free, 2 * kTestUnitBytes);  // buckets and clocks
  const uint64_t size = pool_->medium().size();
  const TableRecord next = create(60, "b", Feed::kPush);
  EXPECT_EQ(pool_->medium().size(), size);
  EXPECT_EQ(pool_->clocks(next.id)[0].time_ns, 0u);
}

TEST_F(Clocks, RefusesWhatItCannotKeep) {
  const TableRecord table = create(60, "a", Feed::kPush);
  EXPECT_EQ(pool_->set_expiry(table.id, kMaxExpireAfter + 1).code(), base::Code::kInvalidArgument);
  EXPECT_EQ(pool_->set_expiry(99, 1).code(), base::Code::kNotFound);
  EXPECT_EQ(pool_->set_feed(table.id, Feed::kDelta).code(), base::Code::kFailedPrecondition);
  media::Flusher flusher(pool_->medium());
  const Commit beyond{1, 3, 1, kStart};
  EXPECT_EQ(pool_->write_clocks({&beyond, 1}, flusher).status().code(),
            base::Code::kInvalidArgument);
}

TEST_F(Clocks, ATableWhoseClocksAreGoneIsRefused) {
  const TableRecord table = create(60);
  const uint64_t second = layout::kMap.extents();
  uint64_t at = second;
  layout::ExtentWord extent;
  uint64_t position = 0;
  while (layout::unpack_extent(memory_.read<uint64_t>(at), position, &extent) &&
         extent.kind != static_cast<uint32_t>(layout::ExtentKind::kClocks)) {
    at += 8;
    position += 1;
  }
  extent.table = table.id + 1;
  memory_.write(at, layout::pack_extent(extent, position));
  memory_.keep(*pool_);
  pool_.reset();
  EXPECT_EQ(memory_.attach().status().code(), base::Code::kDataLoss);
}

}  // namespace
}  // namespace petps::pool
