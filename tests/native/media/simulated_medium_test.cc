// Tests the simulator: what is durable stays, what is not durable may be any prefix, and nothing
// else happens.
#include "simulated_medium.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <set>

namespace petps::media {
namespace {

constexpr uint64_t kBytes = 64 * 1024;
constexpr Site kRowSite = Site::kRow;

using States = std::set<std::vector<uint64_t>>;

class SimulatedMediumTest : public testing::Test {
 protected:
  void store(uint64_t offset, uint64_t value) {
    std::memcpy(disk.memory() + offset, &value, sizeof value);
    media->report_store(disk.memory() + offset, sizeof value);
  }
  void flush(uint64_t offset, uint64_t bytes = 8, Site site = kRowSite) {
    flusher.flush(disk.memory() + offset, bytes, site);
  }
  void drain(Site site = Site::kFilled) { ASSERT_TRUE(flusher.drain(site).ok()); }
  uint64_t word(uint64_t offset) {
    uint64_t value = 0;
    std::memcpy(&value, disk.memory() + offset, sizeof value);
    return value;
  }
  std::vector<uint64_t> words(const std::vector<uint64_t>& offsets) {
    std::vector<uint64_t> words;
    for (const uint64_t offset : offsets) words.push_back(word(offset));
    return words;
  }
  // Try all states of a crash at `point`; return every content of the words.
  States all_states(size_t point, const std::vector<uint64_t>& offsets) {
    States seen;
    const uint64_t states = disk.state_count(point);
    for (uint64_t i = 0; i < states; ++i) {
      disk.crash_exhaustive(point, i);
      seen.insert(words(offsets));
      disk.undo();
    }
    return seen;
  }
  // Do the same with random states.
  States draw_states(size_t point, const std::vector<uint64_t>& offsets) {
    States seen;
    for (int i = 0; i < 3000; ++i) {
      disk.crash(point, random);
      seen.insert(words(offsets));
      disk.undo();
    }
    return seen;
  }

  SimulatedMedium disk{kBytes};
  std::unique_ptr<Media> media = disk.media(kBytes);
  Flusher flusher{*media};
  std::mt19937_64 random{20240611};
};

TEST_F(SimulatedMediumTest, StoresOfOneLineSurviveAsPrefixes) {
  store(0, 1);
  store(8, 2);
  store(0, 3);
  const States expected = {{0, 0}, {1, 0}, {1, 2}, {3, 2}};
  EXPECT_EQ(all_states(3, {0, 8}), expected);
  EXPECT_EQ(draw_states(3, {0, 8}), expected);
  EXPECT_EQ(all_states(1, {0, 8}), (States{{0, 0}, {1, 0}}));
  EXPECT_EQ(all_states(0, {0, 8}), (States{{0, 0}}));
}

TEST_F(SimulatedMediumTest, LinesAreIndependent) {
  store(0, 1);
  store(64, 2);
  const States expected = {{0, 0}, {1, 0}, {0, 2}, {1, 2}};
  EXPECT_EQ(all_states(2, {0, 64}), expected);
  EXPECT_EQ(draw_states(2, {0, 64}), expected);
}

TEST_F(SimulatedMediumTest, OnlyAFlushAndADrainTogetherMakeDurable) {
  store(0, 1);
  drain();  // no flush before it
  EXPECT_EQ(all_states(disk.events(), {0}), (States{{0}, {1}}));
  flush(0);  // no drain after it
  EXPECT_EQ(all_states(disk.events(), {0}), (States{{0}, {1}}));
  store(0, 2);  // after the flush
  drain();
  EXPECT_EQ(all_states(disk.events(), {0}), (States{{1}, {2}}));
}

TEST_F(SimulatedMediumTest, AFlushTakesEveryLineThatTheRangeTouches) {
  store(56, 1);
  store(64, 2);
  store(128, 3);
  flush(63, 2);  // last byte of line 0, first of line 1
  drain();
  EXPECT_EQ(all_states(disk.events(), {56, 64, 128}), (States{{1, 2, 0}, {1, 2, 3}}));
}

TEST_F(SimulatedMediumTest, EarlierPointsForgetLaterDrains) {
  store(0, 1);
  flush(0);
  const size_t before = disk.events();
  drain();
  EXPECT_EQ(disk.drains(), std::vector<size_t>{before});
  EXPECT_EQ(all_states(before, {0}), (States{{0}, {1}}));
  EXPECT_EQ(all_states(before + 1, {0}), (States{{1}}));
  EXPECT_EQ(disk.open_lines(before), 1u);
  EXPECT_EQ(disk.open_lines(before + 1), 0u);
}

TEST_F(SimulatedMediumTest, LongStoresAreSplitAndShortOnesAreWhole) {
  const uint64_t pair[2] = {7, 8};
  std::memcpy(disk.memory() + 16, pair, sizeof pair);
  media->report_store(disk.memory() + 16, sizeof pair);
  EXPECT_EQ(all_states(1, {16, 24}), (States{{0, 0}, {7, 0}, {7, 8}}));
  disk.set_any_word(true);
  EXPECT_EQ(draw_states(1, {16, 24}), (States{{0, 0}, {7, 0}, {0, 8}, {7, 8}}));
  disk.set_any_word(false);
  disk.memory()[64 + 3] = std::byte{0xff};
  media->report_store(disk.memory() + 64 + 3, 1);
  EXPECT_EQ(all_states(2, {64}), (States{{0}, {0xff000000}}));
}

TEST_F(SimulatedMediumTest, AnyWordLeavesOneWordStoresInOrder) {
  disk.set_any_word(true);
  store(0, 1);
  store(8, 2);
  EXPECT_EQ(draw_states(2, {0, 8}), (States{{0, 0}, {1, 0}, {1, 2}}));
}

TEST_F(SimulatedMediumTest, RecordsEveryLineOfACopy) {
  std::vector<std::byte> row(600, std::byte{5});
  flusher.copy(disk.memory() + 4096, row.data(), row.size(),
               kRowSite);  // long enough to be streamed
  EXPECT_EQ(disk.events(), 2u);
  EXPECT_EQ(disk.open_lines(2), 10u);
  drain();
  EXPECT_EQ(disk.open_lines(disk.events()), 0u);
  disk.crash(disk.events(), random);
  EXPECT_EQ(std::memcmp(disk.memory() + 4096, row.data(), row.size()), 0);
  disk.undo();
}

TEST_F(SimulatedMediumTest, SuppressedSitesDoNothing) {
  disk.suppress(kRowSite);
  store(0, 1);
  flush(0);
  drain();
  EXPECT_EQ(all_states(disk.events(), {0}), (States{{0}, {1}}));
  disk.suppress_none();
  disk.suppress(Site::kFilled);
  flush(0);
  drain(Site::kFilled);
  EXPECT_EQ(all_states(disk.events(), {0}), (States{{0}, {1}}));
  drain(Site::kPublished);  // drains the flush of the suppressed drain
  EXPECT_EQ(all_states(disk.events(), {0}), (States{{1}}));
  EXPECT_TRUE(disk.sites_reached().test(static_cast<size_t>(Site::kPublished)));
  EXPECT_FALSE(disk.sites_reached().test(static_cast<size_t>(Site::kProgress)));
}

TEST_F(SimulatedMediumTest, AFailedDrainMakesNothingDurable) {
  store(0, 1);
  flush(0);
  disk.fail_drain();
  EXPECT_FALSE(flusher.drain(Site::kFilled).ok());
  EXPECT_TRUE(media->failed());
  EXPECT_EQ(all_states(disk.events(), {0}), (States{{0}, {1}}));
  EXPECT_FALSE(flusher.drain(Site::kFilled).ok()) << "a failed medium stays failed";
}

TEST_F(SimulatedMediumTest, UndoRestoresTheLiveMemoryAndTheRunGoesOn) {
  store(0, 1);
  flush(0);
  drain();
  store(8, 2);
  for (int i = 0; i < 50; ++i) {
    disk.crash(disk.events(), random);
    auto reopened = disk.media();
    Flusher writer(*reopened);
    const uint64_t other = 99;
    writer.copy(disk.memory() + 512, &other, sizeof other, kRowSite);
    ASSERT_TRUE(writer.drain(Site::kFilled).ok());
    disk.undo();
  }
  EXPECT_EQ(word(0), 1u);
  EXPECT_EQ(word(8), 2u);
  EXPECT_EQ(word(512), 0u);
  EXPECT_TRUE(disk.check_all_recorded());
  flush(8);
  drain();
  EXPECT_EQ(all_states(disk.events(), {0, 8}), (States{{1, 2}}));
}

TEST_F(SimulatedMediumTest, ASecondCrashStartsFromTheFirst) {
  store(0, 1);
  disk.crash_exhaustive(1, 1);  // the store landed
  auto reopened = disk.media();
  Flusher writer(*reopened);
  const uint64_t next = 2;
  writer.copy(disk.memory(), &next, sizeof next, kRowSite);
  EXPECT_EQ(disk.depth(), 1u);
  EXPECT_EQ(all_states(disk.events(), {0}), (States{{1}, {2}}))
      << "what the first crash left is durable";
  EXPECT_EQ(word(0), 2u);
  disk.undo();
  disk.crash_exhaustive(1, 0);
  EXPECT_EQ(word(0), 0u);
  disk.undo();
  EXPECT_EQ(word(0), 1u);
}

TEST_F(SimulatedMediumTest, AKilledProcessLeavesStoresThatPowerMayStillTake) {
  store(0, 1);
  flush(0);
  drain();
  store(0, 2);
  const size_t killed = disk.events();
  flush(0);
  drain();
  disk.kill(killed);
  EXPECT_EQ(word(0), 2u) << "the next process sees it";
  EXPECT_EQ(all_states(disk.events(), {0}), (States{{1}, {2}})) << "but it is not durable";
  auto reopened = disk.media();
  Flusher writer(*reopened);
  ASSERT_TRUE(writer.drain(Site::kFilled).ok());
  EXPECT_EQ(all_states(disk.events(), {0}), (States{{1}, {2}})) << "nor by a drain alone";
  writer.flush(disk.memory(), 8, Site::kRow);
  ASSERT_TRUE(writer.drain(Site::kFilled).ok());
  EXPECT_EQ(all_states(disk.events(), {0}), (States{{2}}));
  disk.undo();
  EXPECT_EQ(word(0), 2u);
  EXPECT_EQ(all_states(disk.events(), {0}), (States{{2}}));
}

TEST_F(SimulatedMediumTest, SettleKeepsOnlyWhatIsOpen) {
  store(0, 1);
  flush(0);
  drain();
  store(0, 2);
  store(64, 3);
  store(8, 4);
  flush(0);
  disk.settle();
  EXPECT_EQ(disk.events(), 3u);
  EXPECT_EQ(all_states(disk.events(), {0, 8, 64}),
            (States{{1, 0, 0}, {2, 0, 0}, {2, 4, 0}, {1, 0, 3}, {2, 0, 3}, {2, 4, 3}}));
  drain();  // the flush before settle() is still in flight
  EXPECT_EQ(all_states(disk.events(), {0, 8, 64}), (States{{2, 4, 0}, {2, 4, 3}}));
  flush(64);
  drain();
  disk.settle();
  EXPECT_EQ(disk.events(), 0u);
  EXPECT_EQ(disk.state_count(0), 1u);
}

TEST_F(SimulatedMediumTest, UnrecordedStoresFailTheTest) {
  store(0, 1);
  flush(0);
  disk.memory()[4100] = std::byte{1};  // not reported
  EXPECT_NONFATAL_FAILURE(static_cast<void>(flusher.drain(Site::kFilled)), "offset 4096");
  disk.memory()[4100] = std::byte{0};
  EXPECT_TRUE(disk.check_all_recorded());
}

TEST_F(SimulatedMediumTest, UnrecordedStoresOnACrashStateAreFoundToo) {
  store(0, 1);
  disk.crash(1, random);
  disk.memory()[40] = std::byte{1};
  EXPECT_NONFATAL_FAILURE(disk.check_all_recorded(), "offset 40");
  disk.memory()[40] = std::byte{0};
  disk.undo();
}

TEST(SimulatedGrowth, TheLengthAtTheCrashIsTheLengthAtThePoint) {
  SimulatedMedium disk(kBytes);
  std::mt19937_64 random(1);
  auto media = disk.media(4096);
  const uint64_t one = 1;
  Flusher flusher(*media);
  flusher.copy(disk.memory(), &one, sizeof one, kRowSite);
  const size_t before = disk.events();
  ASSERT_TRUE(media->grow(8192).ok());
  flusher.copy(disk.memory() + 4096, &one, sizeof one, kRowSite);
  disk.crash(before, random);
  EXPECT_EQ(disk.media()->size(), 4096u);
  auto shorter = disk.media();
  ASSERT_TRUE(shorter->grow(8192).ok());
  disk.undo();
  disk.crash(before + 1, random);
  EXPECT_EQ(disk.media()->size(), 8192u);
  disk.undo();
  EXPECT_EQ(disk.size(), 8192u);
}

TEST(SimulatedGrowth, GrownSpaceIsZeroEvenAfterAnEarlierLife) {
  SimulatedMedium disk(kBytes);
  std::mt19937_64 random(1);
  {
    auto media = disk.media(8192);
    Flusher flusher(*media);
    const uint64_t old = 77;
    flusher.copy(disk.memory() + 4096, &old, sizeof old, kRowSite);
    ASSERT_TRUE(flusher.drain(Site::kFilled).ok());
    disk.settle();
  }
  auto media = disk.media(4096);
  ASSERT_TRUE(media->grow(8192).ok());
  EXPECT_TRUE(disk.check_all_recorded());
  disk.crash(disk.events(), random);
  EXPECT_EQ(disk.memory()[4096], std::byte{0});
  disk.undo();
}

// The processor time of this thread: a busy machine does not count.
double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// A run of the crash suite has 200,000 states of a 4 MiB image; this limits the simulator's share
// of the time.
TEST(SimulatedCost, AStateCostsItsLinesAndNotTheImage) {
  SimulatedMedium disk(size_t{4} << 20);
  auto media = disk.media(size_t{4} << 20);
  Flusher flusher(*media);
  std::mt19937_64 random(7);
  for (int i = 0; i < 200; ++i) {
    const uint64_t value = random();
    flusher.copy(disk.memory() + random() % (size_t{4} << 20) / 8 * 8, &value, sizeof value,
                 kRowSite);
  }
  constexpr int kStates = 20000;
  const double start = thread_seconds();
  for (int i = 0; i < kStates; ++i) {
    disk.crash(disk.events(), random);
    disk.undo();
  }
  const double seconds = thread_seconds() - start;
  RecordProperty("microseconds_per_state", static_cast<int>(seconds * 1e6 / kStates));
  std::printf("[media] %.2f us per crash state of 200 open lines\n", seconds * 1e6 / kStates);
  EXPECT_LT(seconds / kStates, 1e-3) << "copying 4 MiB twice per state would take longer than this";
}

}  // namespace
}  // namespace petps::media
