// Scrubbing: which rows a pass finds damaged, what their removal spares, and which keys can be
// restored, beside writers, growth and drop. Does not cover crashes (tests/crash), the list of
// missing rows or the choice of a base (tests/python/server).
#include <atomic>
#include <set>
#include <thread>

#include "model.h"
#include "rig.h"
#include "tests/seed.h"

namespace petps::table::testing {
namespace {

constexpr uint64_t kRowBytes = 64;

class Scrub : public ::testing::Test {
 protected:
  Scrub() : rig_(20'000, kRowBytes) {}

  void write(uint64_t from, uint64_t to, uint64_t value) {
    std::vector<Change> changes;
    for (uint64_t key = from; key < to; ++key) changes.push_back({key, value, false});
    apply_changes(changes);
    petps::table::testing::apply(&model_, changes);
  }
  void apply_changes(const std::vector<Change>& changes) {
    ASSERT_TRUE(petps::table::testing::apply(*rig_.table, changes).ok());
  }
  Table::Impl& impl() { return rig_.table->impl(); }
  pool::SlotRef slot_of(uint64_t key) { return rig_.index().find_one(key).ref; }
  index::Entry& entry_of(uint64_t key) {
    const index::Place place = rig_.index().find_one(key);
    return const_cast<index::Bucket&>(rig_.index().bucket(place.bucket)).entries[place.entry];
  }
  uint64_t offset_of(const pool::SlotHeader* header) {
    return static_cast<uint64_t>(reinterpret_cast<const std::byte*>(header) - rig_.memory.base());
  }
  void flip(uint64_t offset) { rig_.memory.base()[offset] ^= std::byte{0x10}; }
  void damage_row(uint64_t key) { flip(slot_of(key) + key % kRowBytes); }

  std::vector<DamagedRow> scrub(uint64_t bytes = uint64_t{1} << 14) {
    ScrubCursor cursor;
    std::vector<DamagedRow> found;
    for (bool complete = false; !complete;) {
      const auto step = rig_.table->scrub(&cursor, bytes);
      EXPECT_TRUE(step.ok()) << step.status().to_string();
      found.insert(found.end(), step.value().damaged.begin(), step.value().damaged.end());
      rows_read_ += step.value().rows;
      complete = step.value().complete;
    }
    return found;
  }
  uint64_t remove(const std::vector<DamagedRow>& rows) {
    const auto removed = rig_.table->remove_damaged(rows);
    EXPECT_TRUE(removed.ok()) << removed.status().to_string();
    return removed.value();
  }
  ApplyReport restore(const std::vector<uint64_t>& keys, uint64_t value) {
    std::vector<std::byte> rows(keys.size() * kRowBytes);
    for (size_t i = 0; i < keys.size(); ++i)
      write_row(keys[i], value, rows.data() + i * kRowBytes, kRowBytes);
    const std::vector<uint32_t> stamps(keys.size(), 7);
    const auto report = rig_.table->restore(keys, rows.data(), stamps);
    EXPECT_TRUE(report.ok()) << report.status().to_string();
    return report.value();
  }
  std::set<uint64_t> missing() {
    const std::vector<uint64_t> keys = rig_.table->missing_keys();
    return {keys.begin(), keys.end()};
  }
  static std::vector<uint64_t> keys(uint64_t from, uint64_t to) {
    std::vector<uint64_t> all;
    for (uint64_t key = from; key < to; ++key) all.push_back(key);
    return all;
  }

  Rig rig_;
  Model model_;
  uint64_t rows_read_ = 0;
};

TEST_F(Scrub, FindsEachFaultAndRemovesOnlyWhatIsDamaged) {
  write(0, 5000, 1);
  EXPECT_TRUE(scrub().empty());
  EXPECT_EQ(rows_read_, 5000u);
  std::map<uint64_t, Fault> faults;
  for (uint64_t key = 0; key < kRowBytes; ++key) {  // each byte of a row
    damage_row(key);
    faults[key] = Fault::kChecksum;
  }
  const auto header = [&](uint64_t key) { return offset_of(impl().slots.header(slot_of(key))); };
  flip(header(1000) + offsetof(pool::SlotHeader, crc));
  faults[1000] = Fault::kChecksum;
  flip(header(1001) + offsetof(pool::SlotHeader, key));
  faults[1001] = Fault::kOtherKey;
  entry_of(1002).ref += 8;  // within a row
  faults[1002] = Fault::kNoSlot;
  entry_of(1003).ref = uint64_t{1} << 60;  // beyond the pool
  faults[1003] = Fault::kNoSlot;
  entry_of(1004).ref = ~uint64_t{0} - 7;  // an address there would overflow
  faults[1004] = Fault::kNoSlot;
  std::set<pool::SlotRef> slots;
  for (const auto& [key, fault] : faults) slots.insert(slot_of(key));

  const std::vector<DamagedRow> found = scrub();
  std::map<uint64_t, Fault> reported;
  for (const DamagedRow& row : found) {
    reported[row.key] = row.fault;
    EXPECT_EQ(row.slot, slot_of(row.key));
  }
  EXPECT_EQ(reported, faults);
  const std::vector<uint64_t> some = {0, 999, 1000, 1003, 60'000};
  std::vector<uint8_t> marks(some.size());
  ASSERT_TRUE(rig_.table->find_damaged(some, marks).ok());
  EXPECT_EQ(marks, (std::vector<uint8_t>{1, 0, 1, 1, 0}));

  EXPECT_EQ(remove(found), faults.size());
  for (const auto& [key, fault] : faults) model_.erase(key);
  EXPECT_EQ(compare(*rig_.table, model_, keys(0, 5000)), "");
  EXPECT_EQ(rig_.table->status().rows, model_.size());
  EXPECT_EQ(rig_.table->status().missing_rows, faults.size());
  EXPECT_EQ(rig_.table->status().damaged_slots, faults.size());
  EXPECT_TRUE(scrub().empty());
  expect_clean(*rig_.tables);

  // No row gets one of these slots, however often all others are used.
  const uint64_t rounds = rig_.table->status().slots / 5000 + 3;
  for (uint64_t round = 0; round < rounds; ++round) {
    write(0, 5000, 2 + round);
    rig_.tables->reclaim();
    for (uint64_t key = 0; key < 5000; ++key)
      ASSERT_FALSE(slots.contains(slot_of(key))) << "key " << key << " in round " << round;
  }
  EXPECT_EQ(compare(*rig_.table, model_, keys(0, 5000)), "");
  expect_clean(*rig_.tables);
}

// Writers do not look at the header of a slot that they replace. A ref that is no slot, or a free
// one, must neither end the process nor free another row.
TEST_F(Scrub, AWriteOverADamagedEntryLeaksOneSlot) {
  write(0, 100, 1);
  rig_.tables->reclaim();
  const pool::SlotRef slot = slot_of(5);
  pool::SlotRef end = slot;
  while (impl().slots.is_slot(end)) end += kRowBytes;
  ASSERT_TRUE(impl().slots.is_free(end - kRowBytes));
  const std::vector<uint64_t> refs = {
      slot + 8,         // within a row
      end - kRowBytes,  // a free slot, which is not the next to be taken
      end,              // where the next slot would be
      offset_of(impl().slots.header(slot)),
      64,                 // the superblock
      uint64_t{1} << 60,  // beyond the pool
      ~uint64_t{0} - 7,   // beyond any
  };
  std::vector<Change> changes;
  for (uint64_t i = 0; i < refs.size(); ++i) entry_of(10 + i).ref = refs[i];
  for (uint64_t i = 0; i < refs.size(); ++i) entry_of(30 + i).ref = refs[i];
  for (uint64_t i = 0; i < refs.size(); ++i) changes.push_back({10 + i, 2, false});
  apply_changes(changes);  // the short way: every key exists
  petps::table::testing::apply(&model_, changes);
  changes.clear();
  for (uint64_t i = 0; i < refs.size(); ++i) changes.push_back({30 + i, 0, true});
  apply_changes(changes);
  petps::table::testing::apply(&model_, changes);
  rig_.tables->reclaim();
  EXPECT_EQ(rig_.table->status().damaged_slots, 2 * refs.size());
  for (uint64_t round = 2; round < 100; ++round) {  // every slot is used again
    write(0, 100, round);
    rig_.tables->reclaim();
  }
  EXPECT_EQ(compare(*rig_.table, model_, keys(0, 100)), "");
  EXPECT_EQ(rig_.table->status().damaged_slots, 2 * refs.size());
  expect_clean(*rig_.tables);
}

TEST_F(Scrub, SparesARowThatWasWrittenSinceTheLook) {
  write(0, 100, 1);
  damage_row(5);
  damage_row(6);
  const std::vector<DamagedRow> found = scrub();
  ASSERT_EQ(found.size(), 2u);
  write(5, 6, 2);
  EXPECT_EQ(remove(found), 1u);
  model_.erase(6);
  EXPECT_EQ(compare(*rig_.table, model_, keys(0, 100)), "");
  EXPECT_EQ(missing(), std::set<uint64_t>{6});
}

// The list of missing rows has the header of the first row, so it must not stand for the second.
TEST_F(Scrub, SparesANewRowThatIsDamagedToo) {
  write(0, 100, 1);
  damage_row(5);
  const std::vector<DamagedRow> found = scrub();
  write(5, 6, 2);
  damage_row(5);
  EXPECT_EQ(remove(found), 0u);
  EXPECT_EQ(remove(scrub()), 1u);
  EXPECT_EQ(missing(), std::set<uint64_t>{5});
}

// The slot that the look named may have another row of the same key when the deletion comes.
TEST_F(Scrub, LooksAgainBeforeItRemoves) {
  write(0, 100, 1);
  damage_row(5);
  const std::vector<DamagedRow> found = scrub();
  ASSERT_EQ(found.size(), 1u);
  damage_row(5);  // flips the bit back
  EXPECT_EQ(remove(found), 0u);
  EXPECT_EQ(compare(*rig_.table, model_, keys(0, 100)), "");
  EXPECT_TRUE(missing().empty());
}

// An entry whose ref is damaged may name the slot of another key, which must keep its row.
TEST_F(Scrub, LeavesTheSlotOfAnotherKeyAlone) {
  write(0, 100, 1);
  const pool::SlotRef slot = slot_of(8);
  entry_of(7).ref = slot;
  const std::vector<DamagedRow> found = scrub();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].key, 7u);
  EXPECT_EQ(found[0].fault, Fault::kOtherKey);
  EXPECT_EQ(remove(found), 1u);
  model_.erase(7);
  EXPECT_FALSE(impl().slots.is_free(slot));
  for (uint64_t value = 2; value < 5; ++value) {
    write(8, 9, value);  // releases the slot, once
    rig_.tables->reclaim();
  }
  EXPECT_EQ(compare(*rig_.table, model_, keys(0, 100)), "");
  expect_clean(*rig_.tables);
}

TEST_F(Scrub, RestoresOnlyWhatNothingTouchedSince) {
  write(0, 100, 1);
  for (uint64_t key = 0; key < 10; ++key) damage_row(key);
  EXPECT_EQ(remove(scrub()), 10u);
  write(0, 2, 2);
  apply_changes({{2, 0, true}, {3, 0, true}});  // deletions of absent keys
  EXPECT_EQ(missing(), (std::set<uint64_t>{4, 5, 6, 7, 8, 9}));
  // Keys that were written or deleted since, one that never was, and one that was never damaged.
  const ApplyReport report = restore({0, 2, 4, 5, 50, 5000}, 1);
  EXPECT_EQ(report.inserted, 2u);
  EXPECT_EQ(report.updated, 0u);
  for (const uint64_t key : {2, 3, 6, 7, 8, 9}) model_.erase(key);
  EXPECT_EQ(compare(*rig_.table, model_, keys(0, 6000)), "");
  EXPECT_EQ(rig_.table->stamp_of(rig_.table->lookup_one(4)), 7u);
  EXPECT_EQ(missing(), (std::set<uint64_t>{6, 7, 8, 9}));
  // A row that exists is not replaced, also if all keys of the batch exist.
  EXPECT_EQ(restore({4, 5}, 9).updated, 0u);
  EXPECT_EQ(compare(*rig_.table, model_, keys(0, 6000)), "");
  expect_clean(*rig_.tables);
}

TEST_F(Scrub, AFullTableKeepsWhatItCannotRestoreAsMissing) {
  const TablePointer small =
      rig_.tables->create_table(pool::testing_support::spec("small", 100, kRowBytes)).value();
  rig_.table = small;
  write(0, 100, 1);
  damage_row(3);
  EXPECT_EQ(remove(scrub()), 1u);
  write(500, 501, 1);  // takes the room
  EXPECT_EQ(restore({3}, 1).refused, 1u);
  EXPECT_EQ(missing(), std::set<uint64_t>{3});
  apply_changes({{500, 0, true}});
  EXPECT_EQ(restore({3}, 1).inserted, 1u);
  EXPECT_TRUE(missing().empty());
}

TEST_F(Scrub, RemembersMissingKeysOfAnEarlierOpen) {
  write(0, 100, 1);
  damage_row(3);
  damage_row(4);
  EXPECT_EQ(remove(scrub()), 2u);
  rig_.reopen();
  model_.erase(3);
  model_.erase(4);
  EXPECT_EQ(compare(*rig_.table, model_, keys(0, 100)), "");
  EXPECT_TRUE(missing().empty());
  EXPECT_EQ(restore({3}, 1).inserted, 0u);
  const std::vector<uint64_t> known = {3, 4, 50};
  ASSERT_TRUE(rig_.table->note_missing(known).ok());
  EXPECT_EQ(missing(), (std::set<uint64_t>{3, 4}));
  EXPECT_EQ(restore(known, 1).inserted, 2u);
}

// The old extents' slots are not known as free yet, and must not become free by the walk.
TEST_F(Scrub, WorksBeforeTheWalkOfAnUncleanOpen) {
  write(0, 1000, 1);
  damage_row(3);
  const pool::SlotRef slot = slot_of(3);
  rig_.reopen();
  ASSERT_FALSE(rig_.tables->walked());
  EXPECT_EQ(remove(scrub()), 1u);
  rig_.tables->walk();
  EXPECT_FALSE(impl().slots.is_free(slot));
  model_.erase(3);
  EXPECT_EQ(compare(*rig_.table, model_, keys(0, 1000)), "");
}

TEST_F(Scrub, BeginsAgainWhenTheTableHasGrown) {
  write(0, 10'000, 1);
  ScrubCursor cursor;
  auto step = rig_.table->scrub(&cursor, uint64_t{1} << 18);
  ASSERT_TRUE(step.ok());
  ASSERT_FALSE(step.value().complete);
  ASSERT_TRUE(rig_.table->grow({40'000, false, nullptr}).ok());
  damage_row(123);
  uint64_t rows = 0;
  std::vector<DamagedRow> found;
  do {
    step = rig_.table->scrub(&cursor, uint64_t{1} << 18);
    ASSERT_TRUE(step.ok());
    rows += step.value().rows;
    found.insert(found.end(), step.value().damaged.begin(), step.value().damaged.end());
  } while (!step.value().complete);
  EXPECT_EQ(rows, 10'000u);
  EXPECT_EQ(step.value().bucket_count, rig_.table->bucket_count());
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].key, 123u);
}

TEST_F(Scrub, ReportsADamagedDefaultRow) {
  pool::TableSpec with = pool::testing_support::spec("d", 100, kRowBytes);
  with.default_row.assign(kRowBytes, std::byte{7});
  const TablePointer table = rig_.tables->create_table(with).value();
  ScrubCursor cursor;
  EXPECT_FALSE(table->scrub(&cursor, 1 << 20).value().default_row_damaged);
  flip(table->record().default_row + 3);
  cursor = {};
  const ScrubStep step = table->scrub(&cursor, 1 << 20).value();
  EXPECT_TRUE(step.complete);
  EXPECT_TRUE(step.default_row_damaged);
  EXPECT_TRUE(step.damaged.empty());
}

// Writers replace, insert and delete other rows while the table grows, and passes remove the
// damaged ones. No row that is whole may go, and each damaged row goes exactly once.
TEST_F(Scrub, RunsBesideWritersAndGrowth) {
  constexpr uint64_t kQuiet = 4000;  // keys [0, kQuiet) that no writer touches
  write(0, kQuiet, 1);
  std::mt19937_64 random(tests::seed());
  std::set<uint64_t> damaged;
  while (damaged.size() < 40) damaged.insert(random() % kQuiet);
  for (const uint64_t key : damaged) damage_row(key);
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (uint64_t number = 1; number <= 2; ++number) {
    writers.emplace_back([&, number] {
      std::mt19937_64 own(tests::seed() + number);
      while (!stop) {
        std::vector<Change> changes;
        for (int i = 0; i < 300; ++i)
          changes.push_back({number * 100'000 + own() % 3000, own() % 1000 + 1, own() % 8 == 0});
        apply_changes(changes);
      }
    });
  }
  writers.emplace_back([&] {
    for (uint64_t capacity = 22'000; !stop && capacity < 60'000; capacity += 4000)
      EXPECT_TRUE(rig_.table->grow({capacity, false, nullptr}).ok());
  });
  uint64_t removed = 0;
  for (int pass = 0; pass < 12; ++pass) removed += remove(scrub());
  stop = true;
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(removed, damaged.size()) << "seed " << tests::seed();
  EXPECT_EQ(missing(), damaged);
  for (const uint64_t key : damaged) model_.erase(key);
  EXPECT_EQ(compare(*rig_.table, model_, keys(0, kQuiet)), "");
  expect_clean(*rig_.tables);
}

// The divided batch of a restore, beside writers of the same keys: each key has either the row that
// was restored or a writer's, and a key that a writer deleted last stays deleted.
TEST_F(Scrub, RestoresBesideWriters) {
  constexpr uint64_t kKeys = 3000;
  write(0, kKeys, 1);
  for (uint64_t key = 0; key < kKeys; ++key) damage_row(key);
  EXPECT_EQ(remove(scrub()), kKeys);
  std::thread writer([&] {
    for (uint64_t from = 0; from < kKeys; from += 100) {
      std::vector<Change> changes;
      for (uint64_t key = from; key < from + 100; ++key) changes.push_back({key, 2, key % 3 == 0});
      apply_changes(changes);
    }
  });
  const uint64_t restored = restore(keys(0, kKeys), 1).inserted;
  writer.join();
  EXPECT_LE(restored, kKeys);
  for (uint64_t key = 0; key < kKeys; ++key) {
    if (key % 3 == 0) {
      model_.erase(key);
    } else {
      model_[key] = 2;
    }
  }
  EXPECT_EQ(compare(*rig_.table, model_, keys(0, kKeys)), "");
  EXPECT_TRUE(missing().empty());
  EXPECT_EQ(restore(keys(0, kKeys), 1).inserted, 0u);
  expect_clean(*rig_.tables);
}

TEST_F(Scrub, EndsWithADroppedTable) {
  const TablePointer other =
      rig_.tables->create_table(pool::testing_support::spec("other", 1000, kRowBytes)).value();
  rig_.table = other;
  write(0, 1000, 1);
  damage_row(3);
  const std::vector<DamagedRow> found = scrub();
  ASSERT_TRUE(rig_.tables->drop_table(other->id()).ok());
  const auto removed = other->remove_damaged(found);
  EXPECT_EQ(removed.status().code(), base::Code::kNotFound);
  const std::vector<uint64_t> known = {3};
  EXPECT_EQ(other->note_missing(known).code(), base::Code::kNotFound);
  EXPECT_EQ(scrub().size(), 1u);  // a table can be read as long as somebody holds it
}

// An altered entry may name any place, also one where no memory is.
TEST_F(Scrub, ARefOutsideThePoolIsNoRow) {
  write(1, 50, 1);
  const std::vector<uint64_t> wanted = {7};
  for (const uint64_t ref : {rig_.tables->pool().medium().size() - kRowBytes + 1, uint64_t{1} << 46,
                             uint64_t{1} << 60}) {
    entry_of(7).ref = ref;
    const std::byte* row = rig_.memory.base();
    rig_.table->lookup(wanted, &row);
    EXPECT_EQ(row, nullptr) << ref;
    rig_.table->lookup(wanted, &row, [](size_t, size_t) {});
    EXPECT_EQ(row, nullptr) << ref;
    EXPECT_EQ(rig_.table->lookup_one(7), nullptr) << ref;
    EXPECT_EQ(rig_.table->scan(0, rig_.table->bucket_count()).rows.size(), 48u) << ref;
    const std::vector<DamagedRow> damaged = scrub();
    ASSERT_EQ(damaged.size(), 1u) << ref;
    EXPECT_EQ(damaged[0].fault, Fault::kNoSlot) << ref;
  }
  EXPECT_EQ(remove(scrub()), 1u);
  EXPECT_TRUE(scrub().empty());
}

}  // namespace
}  // namespace petps::table::testing
