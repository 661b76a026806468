// Expiry: which rows a walk deletes, beside writers and a growing index, for both feeds. Does not
// cover the arithmetic of event time (tests/native/pool/clock_test.cc) or crashes (tests/crash).
#include <thread>

#include "base/hash.h"
#include "model.h"
#include "rig.h"

namespace petps::table::testing {
namespace {

constexpr uint64_t kSecond = pool::kNsPerSecond;
constexpr uint64_t kStart = uint64_t{1'700'000'000} * kSecond;
constexpr uint32_t kAfter = 48;  // seconds: a cell is one second
constexpr uint32_t kPartitions = 3;

// A table that deltas feed, of an instance with three partitions.
class Expire : public ::testing::Test {
 protected:
  void SetUp() override {
    tables_ = Tables::attach(memory_.format(kPartitions), /*background=*/false).value();
    create(20'000);
  }
  void create(uint64_t capacity, const std::string& name = "t") {
    pool::TableSpec with = spec(name, capacity);
    with.feed = pool::Feed::kDelta;
    with.expire_after = kAfter;
    const TablePointer created = tables_->create_table(with).value();
    if (name == "t") table_ = created;
  }
  void reopen() {
    memory_.keep(tables_->pool());
    table_.reset();
    tables_.reset();
    tables_ = Tables::attach(memory_.attach().value(), false).value();
    table_ = tables_->find("model@1", "t");
  }
  static uint32_t partition_of(uint64_t key) { return base::partition_hash(key) % kPartitions; }

  // Write keys with the stamps that `stamp` gives them; the value of a row is its stamp.
  ApplyReport write(const std::vector<uint64_t>& keys,
                    const std::function<uint32_t(uint64_t)>& stamp) {
    std::vector<std::byte> rows(keys.size() * 64);
    std::vector<uint32_t> stamps;
    for (size_t i = 0; i < keys.size(); ++i) {
      stamps.push_back(stamp(keys[i]));
      write_row(keys[i], stamps[i], rows.data() + i * 64, 64);
    }
    Batch batch;
    batch.keys = keys;
    batch.rows = rows.data();
    batch.stamps = stamps;
    const auto report = table_->apply(batch);
    EXPECT_TRUE(report.ok()) << report.status().to_string();
    return report.value();
  }
  void commit(uint32_t partition, uint64_t version, uint64_t second) {
    pool::Progress progress;
    progress.instance = 1;
    progress.partition = partition;
    progress.run = 1;
    progress.version = version;
    const pool::Commit commit{1, partition, version, kStart + second * kSecond};
    ASSERT_TRUE(tables_->record_progress({&progress, 1}, {&commit, 1}).ok());
  }
  void commit_all(uint64_t version, uint64_t second) {
    for (uint32_t p = 0; p < kPartitions; ++p) commit(p, version, second);
  }
  uint64_t expire() {
    const auto deleted = table_->expire({});
    EXPECT_TRUE(deleted.ok()) << deleted.status().to_string();
    return deleted.value();
  }
  static std::vector<uint64_t> keys(uint64_t from, uint64_t to) {
    std::vector<uint64_t> all;
    for (uint64_t key = from; key < to; ++key) all.push_back(key);
    return all;
  }

  Memory memory_;
  std::unique_ptr<Tables> tables_;
  TablePointer table_;
};

TEST_F(Expire, DeletesTheRowsOfOldVersionsAndNoOthers) {
  Model model;
  for (uint64_t version = 1; version <= 120; ++version) {
    // Each version writes ten new keys, and again those of some versions ago.
    std::vector<uint64_t> written = keys(version * 10, version * 10 + 10);
    if (version > 20)
      for (uint64_t key = (version - 20) * 10; key < (version - 20) * 10 + 5; ++key)
        written.push_back(key);
    write(written, [&](uint64_t) { return static_cast<uint32_t>(version); });
    for (const uint64_t key : written) model[key] = version;
    commit_all(version, version);
  }
  // The event time is second 120. What was committed by second 70 is 50 cells old.
  uint64_t gone = 0;
  for (auto at = model.begin(); at != model.end();) {
    const bool is_old = at->second <= 120 - 50 + 1;
    gone += is_old ? 1 : 0;
    at = is_old ? model.erase(at) : std::next(at);
  }
  EXPECT_EQ(expire(), gone);
  EXPECT_EQ(compare(*table_, model, keys(0, 1300)), "");
  EXPECT_EQ(table_->status().rows, model.size());
  EXPECT_EQ(table_->status().expired, gone);
  EXPECT_EQ(expire(), 0u);
  expect_clean(*tables_);
  reopen();
  EXPECT_EQ(compare(*table_, model, keys(0, 1300)), "");
  EXPECT_EQ(expire(), 0u);
}

TEST_F(Expire, EachPartitionHasItsOwnTime) {
  write(keys(0, 300), [](uint64_t) { return 1u; });
  commit_all(1, 0);
  for (uint64_t second = 10; second <= 100; second += 10) commit(1, 1 + second, second);
  expire();
  Model model;
  for (uint64_t key = 0; key < 300; ++key)
    if (partition_of(key) != 1) model[key] = 1;
  EXPECT_LT(model.size(), 300u);
  EXPECT_EQ(compare(*table_, model, keys(0, 300)), "");
}

TEST_F(Expire, RowsThatWereLoadedBeforeTheFirstCommitAgeFromIt) {
  write(keys(0, 50), [](uint64_t) { return 0u; });
  commit_all(5, 1000);
  EXPECT_EQ(expire(), 0u);
  for (uint64_t second = 1010; second <= 1040; second += 10) commit_all(second, second);
  EXPECT_EQ(expire(), 0u);
  commit_all(2000, 1050);
  EXPECT_EQ(expire(), 50u);
}

TEST_F(Expire, ARowThatIsWrittenBesideTheWalkStays) {
  // The walk has collected the key, and then it is written again: the deletion must not take it.
  write(keys(0, 10'000), [](uint64_t) { return 1u; });
  commit_all(1, 0);
  for (uint64_t second = 12; second <= 60; second += 12) commit_all(second, second);
  const std::vector<uint64_t> kept = keys(0, 5000);
  std::thread writer;
  bool begun = false;
  ExpireOptions options;
  options.progress = [&](uint64_t, uint64_t) {
    if (!begun) {
      begun = true;
      writer = std::thread([&] {
        for (size_t at = 0; at < kept.size(); at += 100)
          write({kept.begin() + static_cast<int64_t>(at),
                 kept.begin() + static_cast<int64_t>(at + 100)},
                [](uint64_t) { return 61u; });
      });
    }
    return true;
  };
  ASSERT_TRUE(table_->expire(options).ok());
  writer.join();
  Model model;
  for (const uint64_t key : kept) model[key] = 61;
  EXPECT_EQ(compare(*table_, model, keys(0, 10'000)), "");
  EXPECT_EQ(table_->status().rows, model.size());
  expect_clean(*tables_);
}

TEST_F(Expire, ADeletionOfAStampSparesAnotherStamp) {
  write(keys(0, 4), [](uint64_t key) { return static_cast<uint32_t>(key); });
  const std::vector<uint64_t> all = keys(0, 4);
  const std::vector<uint8_t> deleted(4, 1);
  const std::vector<uint32_t> stamps = {0, 9, 2, 9};
  Batch batch;
  batch.keys = all;
  batch.deleted = deleted;
  batch.stamps = stamps;
  batch.only_of_stamp = true;
  EXPECT_EQ(table_->apply(batch).value().deleted, 2u);
  EXPECT_EQ(compare(*table_, {{1, 1}, {3, 3}}, all), "");
}

TEST_F(Expire, AWalkSurvivesTheGrowthOfItsTable) {
  write(keys(0, 10'000), [](uint64_t key) { return key % 2 == 0 ? 1u : 60u; });
  commit_all(1, 0);
  for (uint64_t second = 12; second <= 60; second += 12) commit_all(second, second);
  bool grown = false;
  ExpireOptions options;
  options.progress = [&](uint64_t done, uint64_t all) {
    if (!grown && done > all / 2) {
      grown = true;
      EXPECT_TRUE(table_->grow({40'000, false, nullptr}).ok());
      write(keys(50'000, 60'000), [](uint64_t) { return 1u; });  // only in the new array
    }
    return true;
  };
  ASSERT_TRUE(table_->expire(options).ok());
  EXPECT_TRUE(grown);
  EXPECT_EQ(table_->status().rows, 5000u);
  Model model;
  for (uint64_t key = 1; key < 10'000; key += 2) model[key] = 60;
  EXPECT_EQ(compare(*table_, model, keys(0, 10'000)), "");
  expect_clean(*tables_);
}

TEST_F(Expire, AWalkThatEndsEarlyIsNotReportedAsComplete) {
  write(keys(0, 10'000), [](uint64_t) { return 1u; });
  commit_all(1, 0);
  for (uint64_t second = 12; second <= 60; second += 12) commit_all(second, second);
  EXPECT_EQ(table_->status().expiry_delay, -1.0);
  const auto ended = table_->expire({true, [](uint64_t, uint64_t) { return false; }});
  ASSERT_TRUE(ended.ok());
  EXPECT_LT(ended.value(), 10'000u);
  EXPECT_EQ(table_->status().expiry_delay, -1.0);
  EXPECT_EQ(ended.value() + expire(), 10'000u);
  EXPECT_EQ(table_->status().expiry_delay, 2.0);  // two cells
  commit_all(64, 64);
  EXPECT_EQ(table_->status().expiry_delay, 6.0);
  EXPECT_EQ(table_->status().event_time_ns, kStart + 64 * kSecond);
}

TEST_F(Expire, ARuleThatIsLiftedEndsTheWalk) {
  write(keys(0, 10'000), [](uint64_t) { return 1u; });
  commit_all(1, 0);
  for (uint64_t second = 12; second <= 60; second += 12) commit_all(second, second);
  const auto lift = [&](uint64_t, uint64_t) {
    EXPECT_TRUE(tables_->set_expiry(table_->id(), 0).ok());
    return true;
  };
  ASSERT_TRUE(table_->expire({true, lift}).ok());
  const uint64_t left = table_->status().rows;
  EXPECT_GT(left, 5000u);
  EXPECT_EQ(expire(), 0u);
  EXPECT_EQ(table_->status().rows, left);
  EXPECT_EQ(table_->record_now().spec.expire_after, 0u);
}

TEST_F(Expire, PartitionsThatCatchUpExpireNothing) {
  write(keys(0, 300), [](uint64_t) { return 1u; });
  commit_all(1, 0);
  for (uint64_t second = 12; second <= 60; second += 12) commit_all(second, second);
  pool::Progress progress = *tables_->pool().read_progress(1, 2);
  progress.state = pool::ProgressState::kCatchingUp;
  ASSERT_TRUE(tables_->record_progress(progress).ok());
  expire();
  for (uint64_t key = 0; key < 300; ++key)
    EXPECT_EQ(table_->lookup_one(key) != nullptr, partition_of(key) == 2) << key;
}

TEST_F(Expire, ALowerAgeIsNotReportedAsDone) {
  write(keys(0, 100), [](uint64_t) { return 1u; });
  for (uint64_t second = 0; second <= 60; second += 12) commit_all(second + 1, second);
  expire();
  EXPECT_GE(table_->status().expiry_delay, 0.0);
  ASSERT_TRUE(tables_->set_expiry(table_->id(), 12).ok());
  EXPECT_EQ(table_->status().expiry_delay, -1.0);
}

TEST_F(Expire, ProgressIsRecordedWithItsCommits) {
  commit(0, 5, 10);
  commit(0, 5, 40);  // read again after a crash: counted once
  EXPECT_EQ(tables_->pool().clocks(table_->id())[0].time_ns, kStart + 10 * kSecond);
  EXPECT_EQ(tables_->pool().read_progress(1, 0)->version, 5u);
}

// Stamps find their rows however a batch is divided: beside other writers, with threads, and for
// keys that find room only later.
TEST_F(Expire, EveryRowHasItsOwnStampHoweverABatchIsDivided) {
  const auto check = [&](const std::vector<uint64_t>& written, uint32_t factor) {
    std::vector<const std::byte*> rows(written.size());
    table_->lookup(written, rows.data());
    for (size_t i = 0; i < written.size(); ++i) {
      ASSERT_NE(rows[i], nullptr);
      EXPECT_EQ(table_->stamp_of(rows[i]), written[i] * factor) << written[i];
    }
  };
  std::vector<uint64_t> many = keys(0, 12'000);
  std::vector<std::byte> rows(many.size() * 64);
  const auto apply = [&](uint32_t threads, uint32_t factor) {
    std::vector<uint32_t> stamps;
    for (const uint64_t key : many) stamps.push_back(static_cast<uint32_t>(key) * factor);
    Batch batch;
    batch.keys = many;
    batch.rows = rows.data();
    batch.stamps = stamps;
    batch.threads = threads;
    ASSERT_TRUE(table_->apply(batch).ok());
  };
  apply(3, 1);
  check(many, 1);
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) write(keys(15'000, 15'600), [](uint64_t) { return 1u; });
  });
  for (uint32_t round = 2; round < 6; ++round) {
    apply(1, round);
    check(many, round);
  }
  stop = true;
  other.join();
}

TEST_F(Expire, StampsOfKeysThatFindRoomLateAreTheirOwn) {
  create(100, "small");
  const TablePointer small = tables_->find("model@1", "small");
  std::vector<uint64_t> all = keys(0, 100);
  std::vector<std::byte> rows(200 * 64);
  Batch full;
  full.keys = all;
  full.rows = rows.data();
  ASSERT_EQ(small->apply(full).value().inserted, 100u);
  std::vector<uint64_t> mixed;  // new keys first, then deletions that make room
  std::vector<uint8_t> deleted;
  std::vector<uint32_t> stamps;
  for (uint64_t i = 0; i < 100; ++i) {
    mixed.push_back(1000 + i);
    deleted.push_back(0);
    stamps.push_back(static_cast<uint32_t>(7 * i));
  }
  for (uint64_t i = 0; i < 100; ++i) {
    mixed.push_back(i);
    deleted.push_back(1);
    stamps.push_back(0);
  }
  Batch batch;
  batch.keys = mixed;
  batch.rows = rows.data();
  batch.deleted = deleted;
  batch.stamps = stamps;
  ASSERT_EQ(small->apply(batch).value().inserted, 100u);
  for (uint64_t i = 0; i < 100; ++i) EXPECT_EQ(small->stamp_of(small->lookup_one(1000 + i)), 7 * i);
}

TEST_F(Expire, AWalkReportsTheTimesOfItsBeginning) {
  write(keys(0, 10'000), [](uint64_t) { return 1u; });
  commit_all(1, 0);
  for (uint64_t second = 12; second <= 60; second += 12) commit_all(second, second);
  bool begun = false;
  const auto commit_once = [&](uint64_t, uint64_t) {
    if (!begun) commit_all(70, 70);
    begun = true;
    return true;
  };
  ASSERT_TRUE(table_->expire({false, commit_once}).ok());
  EXPECT_EQ(table_->status().expiry_delay, 12.0);  // ten seconds and two cells
}

TEST_F(Expire, ATableThatIsDroppedEndsItsWalkAndItsTicks) {
  pool::TableSpec pushed = spec("pushed", 100);
  pushed.expire_after = kAfter;
  const TablePointer table = tables_->create_table(pushed).value();
  ASSERT_TRUE(tables_->tick(table->id(), kStart).ok());
  ASSERT_TRUE(tables_->drop_table(table->id()).ok());
  EXPECT_EQ(tables_->tick(table->id(), kStart + kSecond).code(), base::Code::kNotFound);
  EXPECT_EQ(tables_->set_expiry(table->id(), 5).code(), base::Code::kNotFound);
  EXPECT_TRUE(table->expire({}).ok());
  EXPECT_EQ(table->status().expiry_delay, 0.0);
}

// ---- tables that pushes feed ----

class ExpirePushes : public ::testing::Test {
 protected:
  void write(uint64_t from, uint64_t to) {
    std::vector<Change> changes;
    for (uint64_t key = from; key < to; ++key) changes.push_back({key, key, false});
    ASSERT_TRUE(testing::apply(*rig_.table, changes).ok());
  }
  void tick(uint64_t second) {
    ASSERT_TRUE(rig_.tables->tick(rig_.table->id(), kStart + second * kSecond).ok());
  }
  void let_expire(uint32_t seconds) {
    ASSERT_TRUE(rig_.tables->set_expiry(rig_.table->id(), seconds).ok());
  }
  uint64_t expire() { return rig_.table->expire({}).value(); }
  Rig rig_{1000};
};

TEST_F(ExpirePushes, RowsAgeByTheServersClock) {
  write(0, 10);  // before the rule
  let_expire(kAfter);
  write(10, 20);
  tick(0);
  write(20, 30);
  for (uint64_t second = 1; second <= 48; ++second) tick(second);
  EXPECT_EQ(expire(), 0u);
  tick(49);
  EXPECT_EQ(expire(), 20u);
  tick(51);
  EXPECT_EQ(expire(), 10u);
}

TEST_F(ExpirePushes, AWriteMakesARowYoungAgain) {
  let_expire(kAfter);
  write(0, 10);
  for (uint64_t second = 0; second <= 40; ++second) tick(second);
  write(0, 5);
  for (uint64_t second = 41; second <= 60; ++second) tick(second);
  EXPECT_EQ(expire(), 5u);
  EXPECT_EQ(compare(*rig_.table, {{0, 0}, {1, 1}, {2, 2}, {3, 3}, {4, 4}}, {0, 1, 2, 3, 4, 5, 9}),
            "");
}

TEST_F(ExpirePushes, TimeNeverGoesBackOverARestart) {
  let_expire(kAfter);
  write(0, 10);
  for (uint64_t second = 0; second <= 30; ++second) tick(second);
  rig_.reopen();
  tick(5);  // the machine's clock was set back
  EXPECT_EQ(rig_.table->status().event_time_ns, kStart + 30 * kSecond);
  write(10, 20);
  for (uint64_t second = 31; second <= 50; ++second) tick(second);
  EXPECT_EQ(expire(), 10u);
}

TEST_F(ExpirePushes, AClockThatIsSetBackGoesOnFromThere) {
  let_expire(kAfter);
  tick(1000);
  write(0, 10);
  tick(0);  // a quarter of the age is paid for first
  for (uint64_t second = 1; second <= 12 + 50; ++second) tick(second);
  EXPECT_EQ(expire(), 10u);
}

TEST_F(ExpirePushes, AClockThatJumpsDoesNotExpireTheTable) {
  let_expire(kAfter);
  write(0, 10);
  tick(0);
  tick(1'000'000);
  tick(2'000'000);
  EXPECT_EQ(expire(), 0u);
}

TEST_F(ExpirePushes, RowsOfAnEarlierRuleAgeFromTheNextOne) {
  let_expire(kAfter);
  for (uint64_t second = 0; second < 200; ++second) tick(second);
  write(0, 10);
  tick(200);
  let_expire(0);
  EXPECT_EQ(rig_.table->status().expiry_delay, 0.0);
  let_expire(kAfter);
  for (uint64_t second = 1000; second <= 1048; ++second) tick(second);
  EXPECT_EQ(expire(), 0u);
  tick(1049);
  EXPECT_EQ(expire(), 10u);
}

TEST_F(ExpirePushes, ARowThatIsPushedAfterAPauseStays) {
  let_expire(kAfter);
  write(0, 10);
  for (uint64_t second = 0; second <= 10; ++second) tick(second);
  rig_.reopen();
  write(10, 20);  // a month later
  for (uint64_t second = 3'000'000; second <= 3'000'040; ++second) tick(second);
  rig_.tables->walk();
  EXPECT_EQ(expire(), 10u);  // the pause counts a quarter, and the first rows are old
  EXPECT_EQ(rig_.table->status().rows, 10u);
}

TEST_F(ExpirePushes, ALowerAgeSparesWhatWasJustPushed) {
  let_expire(48 * 3600);
  tick(0);
  write(0, 10);
  let_expire(60);  // half an hour later, before the next tick
  for (uint64_t second = 1800; second < 1840; ++second) tick(second);
  EXPECT_EQ(expire(), 0u);
}

TEST_F(ExpirePushes, AStampThatAPushGivesDoesNotCount) {
  let_expire(kAfter);
  const std::vector<uint64_t> all = {1, 2};
  const std::vector<std::byte> rows(128);
  const std::vector<uint32_t> stamps = {1, 2};
  Batch batch;
  batch.keys = all;
  batch.rows = rows.data();
  batch.stamps = stamps;
  ASSERT_TRUE(rig_.table->apply(batch).ok());
  for (uint64_t second = 0; second < 40; ++second) tick(second);
  EXPECT_EQ(expire(), 0u);
}

TEST_F(ExpirePushes, TicksAreForTablesThatPushesFeedAndWhoseRowsExpire) {
  EXPECT_EQ(rig_.tables->tick(rig_.table->id(), kStart).code(), base::Code::kFailedPrecondition);
  EXPECT_EQ(rig_.tables->tick(99, kStart).code(), base::Code::kNotFound);
}

}  // namespace
}  // namespace petps::table::testing
