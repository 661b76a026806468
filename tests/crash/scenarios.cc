#include "scenarios.h"

#include <algorithm>

#include "base/crc32c.h"
#include "table/slice.h"

namespace petps::crash {

void start(Driver& d, const std::shared_ptr<const Shape>& shape, size_t rows) {
  d.format();
  d.create_table(shape);
  if (rows > 0) d.apply("t", d.random_changes("t", rows, 0, 0));
}

void two_instances(Driver& d) {
  start(d, shape_of(table_spec("t", 40, kOddRow), 40, 40), 30);
  d.create_instance("model@2");
  d.create_table(of_instance("model@2", table_spec("u", 40, kOddRow), 40, 41));
  d.apply("u", d.random_changes("u", 30, 0, 0));
  for (uint32_t instance = 1; instance <= 2; ++instance) {
    for (uint32_t partition = 0; partition < 3; ++partition)
      d.record_progress({instance, partition, instance, 1, 1, 1, {}, 0});
  }
}

std::shared_ptr<const Shape> of_instance(const std::string& instance, const pool::TableSpec& spec,
                                         size_t keys, uint64_t seed) {
  auto shape = std::make_shared<Shape>(*shape_of(spec, keys, seed));
  shape->instance = instance;
  return shape;
}

namespace {

using Begin = std::function<void()>;
using base::Status;
using media::Site;

constexpr uint32_t kLongRow = 512;  // streamed past the cache

// Rewrite rows until the allocator has completed a round and returns slots that held rows before.
void rewrite_all_slots(Driver& d, const std::string& table) {
  const uint64_t slots = d.table(table).status().slots;
  for (uint64_t used = 0; used < slots; used += 8) d.apply(table, d.random_changes(table, 0, 8, 0));
}

// Return the keys that are displaced now.
std::vector<uint64_t> displaced_keys(Driver& d, const std::string& table) {
  std::vector<uint64_t> keys;
  const index::Index& index = d.table(table).impl().index();
  const TableWorld& world = *d.world.find(table);
  for (size_t i = 0; i < world.values.size(); ++i) {
    if (world.values[i] != 0 && index.find_one(world.shape->keys[i]).distance > 0)
      keys.push_back(world.shape->keys[i]);
  }
  return keys;
}

// Delete `count` keys from the home bucket of a displaced key, so that re-homing has work to do.
void make_room_at_home(Driver& d, const std::string& table, size_t count) {
  const std::vector<uint64_t> displaced = displaced_keys(d, table);
  if (displaced.empty()) {
    d.problem = "no key is displaced";
    return;
  }
  const index::Index& index = d.table(table).impl().index();
  const uint64_t home = index.path_of(displaced.front()).home;
  const TableWorld& world = *d.world.find(table);
  std::vector<Change> changes;
  for (size_t i = 0; i < world.values.size() && changes.size() < count; ++i) {
    if (world.values[i] != 0 && index.find_one(world.shape->keys[i]).bucket == home)
      changes.push_back({world.shape->keys[i], 0});
  }
  d.apply(table, changes);
}

void insert(Driver& d, const Begin& begin, uint32_t row_bytes) {
  start(d, shape_of(table_spec("t", 120, row_bytes), 120, 1), 50);
  begin();
  d.apply("t", d.random_changes("t", 1, 0, 0));
  d.apply("t", d.random_changes("t", 1, 0, 0));
  d.apply("t", d.random_changes("t", 12, 0, 0));
  d.apply("t", d.random_changes("t", 24, 0, 0));
}

void update(Driver& d, const Begin& begin, uint32_t row_bytes) {
  start(d, shape_of(table_spec("t", 60, row_bytes), 60, 2), 50);
  rewrite_all_slots(d, "t");
  begin();
  d.apply("t", d.random_changes("t", 0, 1, 0));
  d.apply("t", d.random_changes("t", 0, 1, 0));
  d.apply("t", d.random_changes("t", 0, 12, 0));
  d.apply("t", d.random_changes("t", 0, 30, 0));
}

void erase(Driver& d, const Begin& begin) {
  start(d, crowded_shape(table_spec("t", 56, kOddRow), 24, 32, 3), 56);
  begin();
  d.apply("t", d.random_changes("t", 0, 0, 1));
  d.apply("t", d.random_changes("t", 0, 0, 1));
  d.apply("t", d.random_changes("t", 0, 0, 20));
  d.apply("t", d.random_changes("t", 0, 0, 34));
}

void mixed(Driver& d, const Begin& begin) {
  start(d, shape_of(table_spec("t", 80, kOddRow), 90, 4), 50);
  rewrite_all_slots(d, "t");
  begin();
  for (int i = 0; i < 4; ++i) d.apply("t", d.random_changes("t", 6, 6, 6));
}

void duplicates(Driver& d, const Begin& begin) {
  start(d, shape_of(table_spec("t", 60, kOddRow), 70, 5), 30);
  begin();
  for (int i = 0; i < 3; ++i) {
    std::vector<Change> changes = d.random_changes("t", 4, 3, 3);
    const std::vector<Change> first = changes;
    for (const Change& change : first) {  // again, with another row or as a deletion
      changes.push_back({change.key, (d.random() & 1) != 0 ? d.next_value() : 0});
    }
    for (const Change& change : first) {
      if ((d.random() & 1) != 0) changes.push_back({change.key, d.next_value()});
    }
    d.apply("t", changes);
  }
}

void two_buckets(Driver& d, const Begin& begin) {
  start(d, crowded_shape(table_spec("t", 22, kOddRow), 24, 8, 6), 12);
  begin();
  d.apply("t", d.random_changes("t", 4, 0, 0));
  d.apply("t", d.random_changes("t", 6, 0, 0));  // full
  d.apply("t", d.random_changes("t", 0, 4, 6));
  d.apply("t", d.random_changes("t", 6, 4, 0));
  d.apply("t", d.random_changes("t", 0, 2, 8));
}

void displacement(Driver& d, const Begin& begin) {
  start(d, crowded_shape(table_spec("t", 56, kOddRow), 40, 30, 7), 20);
  begin();
  d.apply("t", d.random_changes("t", 1, 0, 0));
  d.apply("t", d.random_changes("t", 12, 0, 0));
  d.apply("t", d.random_changes("t", 20, 2, 2));
  d.apply("t", d.random_changes("t", 2, 6, 10));
  d.apply("t", d.random_changes("t", 11, 0, 0));
}

void hot_moves(Driver& d, const Begin& begin) {
  start(d, crowded_shape(table_spec("t", 56, kOddRow), 30, 30, 8), 54);
  begin();
  for (int i = 0; i < 3 && d.problem.empty(); ++i) {
    const std::vector<uint64_t> hot = displaced_keys(d, "t");
    if (hot.empty()) break;
    d.migrate("t", {hot[0], hot[hot.size() / 2]});
  }
  d.apply("t", d.random_changes("t", 2, 4, 8));
  if (!d.problem.empty()) return;
  std::vector<uint64_t> hot = displaced_keys(d, "t");
  hot.resize(std::min<size_t>(hot.size(), 6));
  d.migrate("t", hot);
}

void rehoming(Driver& d, const Begin& begin) {
  start(d, crowded_shape(table_spec("t", 56, kOddRow), 34, 26, 9), 56);
  make_room_at_home(d, "t", 6);
  begin();
  d.rehome("t");
  d.apply("t", d.random_changes("t", 0, 0, 8));
  d.rehome("t");
  d.apply("t", d.random_changes("t", 6, 2, 0));
}

void table_creation(Driver& d, const Begin& begin) {
  d.format();
  begin();
  d.create_table(shape_of(table_spec("t", 40, kOddRow), 40, 10));
  d.apply("t", d.random_changes("t", 10, 0, 0));
  d.create_table(shape_of(table_spec("u", 30, kLongRow, /*with_default=*/true), 30, 11));
  d.apply("u", d.random_changes("u", 10, 0, 0));
  d.create_table(shape_of(table_spec("v", 30, 8, /*with_default=*/true), 30, 12));
  d.apply("t", d.random_changes("t", 3, 3, 3));
}

// Each batch needs more slots than are free, so extents are added in its middle.
void extent_growth(Driver& d, const Begin& begin) {
  start(d, shape_of(table_spec("t", 900, kLongRow), 700, 13), 100);
  begin();
  d.apply("t", d.random_changes("t", 60, 0, 0));
  d.apply("t", d.random_changes("t", 40, 60, 0));
  const uint64_t free = d.problem.empty() ? d.table("t").status().free_slots : 0;
  d.apply("t", d.random_changes("t", free + 4, 0, 4));
}

void catalogue(Driver& d, const Begin& begin) {
  start(d, shape_of(table_spec("t", 30, kOddRow), 30, 14), 10);
  begin();
  d.set_alias("live", "model@1");
  d.create_instance("model@2");
  d.set_alias("live", "model@2");
  d.set_alias("next", "model@1");
  d.set_feed("t", pool::Feed::kDelta);
  d.set_durability(media::Durability::kProcess);
  d.set_feed("t", pool::Feed::kPush);
  d.apply("t", d.random_changes("t", 4, 2, 2));
}

void alias_switch(Driver& d, const Begin& begin) {
  two_instances(d);
  begin();
  d.set_alias("model", "model@2");
  d.apply("u", d.random_changes("u", 3, 3, 3));
  d.set_alias("model", "model@1");
  d.open();
  d.set_alias("model", "model@2");
  d.set_alias("model", "model@2");
}

void dropping(Driver& d, const Begin& begin) {
  two_instances(d);
  d.set_alias("model", "model@2");
  begin();
  d.drop_instance("model@1");
  if (d.tables != nullptr) d.tables->reclaim();
  // This table takes the space of the dropped table, buckets and slots, and more.
  d.create_table(
      of_instance("model@2", table_spec("v", 40, kOddRow, /*with_default=*/true), 40, 42));
  d.apply("v", d.random_changes("v", 20, 0, 0));
  d.create_instance("model@3");
  d.record_progress({3, 1, 5, 1, 1, 1, {}, 0});  // uses a progress pair that model@1 had
  d.apply("u", d.random_changes("u", 3, 3, 3));
  d.open();
  d.create_table(of_instance("model@3", table_spec("w", 40, kLongRow), 40, 43));
  d.apply("w", d.random_changes("w", 10, 0, 0));
}

// The space of a dropped table is free for the next process that opens the pool, whatever was in
// progress.
void dropping_and_reopening(Driver& d, const Begin& begin) {
  two_instances(d);
  d.set_alias("model", "model@2");
  d.drop_instance("model@1");
  begin();
  d.open();
  d.create_table(of_instance("model@2", table_spec("v", 40, kOddRow), 40, 44));
  d.apply("v", d.random_changes("v", 30, 0, 0));
  d.close();
  d.open();
  d.apply("v", d.random_changes("v", 5, 5, 5));
}

void progress(Driver& d, const Begin& begin) {
  start(d, shape_of(table_spec("t", 30, kOddRow), 30, 15), 10);
  begin();
  for (uint64_t seq = 1; seq <= 3; ++seq) {
    for (uint32_t partition = 0; partition < 3; ++partition) {
      d.record_progress(
          {1, partition, 7, seq, seq * 1000 + partition, seq, pool::ProgressState::kFollowing, 0});
    }
  }
  d.apply("t", d.random_changes("t", 3, 3, 1));
  d.record_progress({1, 1, 8, 1, 1, 3, pool::ProgressState::kCatchingUp, 9});
}

// Several partitions are recorded for the first time, with one drain for all records. The second
// window claims more pairs behind them, and the third one uses pairs of both.
void progress_together(Driver& d, const Begin& begin) {
  d.format();
  begin();
  const std::vector<std::vector<uint32_t>> windows = {{0, 1, 2}, {3, 1, 4, 5}, {0, 2, 3, 5}};
  for (uint64_t seq = 1; seq <= windows.size(); ++seq) {
    std::vector<pool::Progress> all;
    for (const uint32_t partition : windows[seq - 1])
      all.push_back({1, partition, 7, seq, seq * 10, seq, pool::ProgressState::kFollowing, 0});
    d.record_progress(all);
  }
}

// Closes twice, so that the second close overwrites what the first one stored.
void clean_close(Driver& d, const Begin& begin) {
  start(d, crowded_shape(table_spec("t", 56, kOddRow), 30, 30, 16), 40);
  begin();
  d.close();
  d.open();
  d.apply("t", d.random_changes("t", 6, 6, 6));  // before the stored free list is read
  d.walk();
  d.apply("t", d.random_changes("t", 4, 8, 6));
  d.close();
  d.open();
  d.walk();
  d.apply("t", d.random_changes("t", 4, 8, 6));
  d.close();
  d.open();
}

// The process dies; the next one finds buckets of an older generation and no free list.
void reopening(Driver& d, const Begin& begin) {
  start(d, crowded_shape(table_spec("t", 56, kOddRow), 30, 30, 17), 40);
  begin();
  d.open();
  d.apply("t", d.random_changes("t", 4, 4, 4));
  d.open();
  d.apply("t", d.random_changes("t", 1, 4, 1));
  d.walk();
  d.apply("t", d.random_changes("t", 4, 8, 4));
}

// The power fails when an entry is at both places of a move. The next opening completes the move.
void interrupted_move(Driver& d, const Begin& begin) {
  start(d, crowded_shape(table_spec("t", 56, kOddRow), 30, 30, 18), 56);
  make_room_at_home(d, "t", 6);
  d.medium().settle();
  constexpr size_t kVacatedDrainOfMove = 2;  // after the drains of the journal and of the copy
  d.medium().fail_drain(kVacatedDrainOfMove);
  if (d.table("t").rehome().ok()) d.problem = "the interrupted move did not fail";
  d.drop();
  d.medium().crash_exhaustive(d.medium().events(), 0);  // nothing that was not durable survives
  begin();
  d.open();
  d.rehome("t");
  d.apply("t", d.random_changes("t", 4, 4, 4));
}

// The process is killed when its deletions are visible but not durable. The next process inserts
// those keys again, before its walk. A power cut must not bring an old entry back beside the new
// one.
void killed_erase(Driver& d, const Begin& begin) {
  start(d, crowded_shape(table_spec("t", kMoreThanSlots, kOddRow), 40, 20, 22), 58);
  std::vector<Change> away;  // deletions of displaced keys
  std::vector<Change> home;  // deletions of keys in the home bucket of the first displaced key
  const std::vector<uint64_t> displaced = displaced_keys(d, "t");
  for (const uint64_t key : displaced) {
    if (away.size() < 8) away.push_back({key, 0});
  }
  const index::Index& index = d.table("t").impl().index();
  for (const uint64_t key : d.world.find("t")->shape->keys) {
    const index::Place place = index.find_one(key);
    if (home.size() < 8 && place.ref != 0 && place.bucket == index.path_of(displaced.front()).home)
      home.push_back({key, 0});
  }
  std::vector<Change> both = away;
  both.insert(both.end(), home.begin(), home.end());
  d.kill_before_drain(1, /*seen=*/true, [&] { d.apply("t", both); });
  d.open();
  begin();
  for (Change& change : away) change.value = d.next_value();
  d.apply("t", {away.begin(), away.begin() + 3});  // their home buckets have room now
  d.apply("t", {away.begin() + 3, away.end()});
  if (d.problem.empty() && d.table("t").impl().walked()) d.problem = "new keys waited for the walk";
  d.walk();
  for (Change& change : home) change.value = d.next_value();
  d.apply("t", home);
}

// The process is killed when rows are published but not drained. The next process walks and
// reuses the slots that they replaced.
void killed_update(Driver& d, const Begin& begin) {
  start(d, shape_of(table_spec("t", 60, kOddRow), 60, 23), 50);
  const std::vector<Change> changes = d.random_changes("t", 4, 16, 0);
  d.kill_before_drain(1, /*seen=*/true, [&] { d.apply("t", changes); });
  begin();
  d.open();
  d.walk();
  d.apply("t", d.random_changes("t", 0, 12, 0));
  d.apply("t", d.random_changes("t", 0, 20, 4));
}

// The process is killed when the copy of a moved entry is visible but not durable.
void killed_move(Driver& d, const Begin& begin) {
  start(d, crowded_shape(table_spec("t", 56, kOddRow), 30, 30, 24), 56);
  make_room_at_home(d, "t", 6);
  constexpr size_t kMovedDrainOfMove = 1;
  d.kill_before_drain(kMovedDrainOfMove, /*seen=*/false, [&] { d.rehome("t"); });
  begin();
  d.open();
  d.rehome("t");
  d.apply("t", d.random_changes("t", 4, 4, 4));
}

// The process is killed when the place that an entry left is visibly empty, but not durably. The
// next process deletes the key.
void killed_departure(Driver& d, const Begin& begin) {
  start(d, crowded_shape(table_spec("t", 700, kOddRow), 40, 20, 26), 58);
  make_room_at_home(d, "t", 1);
  const std::vector<uint64_t> displaced = displaced_keys(d, "t");
  constexpr size_t kVacatedDrainOfMove = 2;
  d.kill_before_drain(kVacatedDrainOfMove, /*seen=*/false, [&] { d.rehome("t"); });
  d.open();
  begin();
  const index::Index& index = d.table("t").impl().index();
  std::vector<Change> moved;
  for (const uint64_t key : displaced) {
    if (index.find_one(key).distance == 0) moved.push_back({key, 0});
  }
  d.apply("t", moved);
  d.walk();
  for (Change& change : moved) change.value = d.next_value();
  d.apply("t", moved);
}

// The process is killed three times, each time with something visible but not durable: an extent
// record, a progress record, a superblock.
void killed_metadata(Driver& d, const Begin& begin) {
  start(d, shape_of(table_spec("t", 900, kLongRow), 700, 25), 100);
  const std::vector<Change> many = d.random_changes("t", 40, 0, 0);
  d.kill_before_drain(0, /*seen=*/false, [&] { d.apply("t", many); });
  d.open();
  d.kill_before_drain(0, /*seen=*/true, [&] { d.record_progress({1, 0, 7, 1, 1, 1, {}, 0}); });
  d.open();
  d.record_progress({1, 1, 7, 1, 1, 1, {}, 0});
  constexpr size_t kCleanFlagDrain = 1;  // follows the drain of the close itself
  d.walk();
  d.kill_before_drain(kCleanFlagDrain, /*seen=*/true, [&] { d.close(); });
  begin();
  d.open();
  d.apply("t", d.random_changes("t", 40, 4, 4));
  d.record_progress({1, 2, 7, 1, 1, 1, {}, 0});
}

// The process is killed when counters are raised and their entries are not published. The
// counters are too high; a recount lowers them between writes to the table.
void recounting(Driver& d, const Begin& begin) {
  start(d, crowded_shape(table_spec("t", 56, kOddRow), 40, 30, 27), 36);
  d.kill_before_drain(0, /*seen=*/false, [&] { d.apply("t", d.random_changes("t", 16, 0, 0)); });
  d.open();
  d.walk();
  if (d.problem.empty() && d.tables->verify().high_counters == 0) d.problem = "no counter is high";
  begin();
  d.recount("t");
  if (d.problem.empty() && d.tables->verify().high_counters != 0) d.problem = "a counter is high";
  d.apply("t", d.random_changes("t", 12, 2, 6));
  d.rehome("t");
  d.recount("t");
  d.apply("t", d.random_changes("t", 6, 2, 20));
  d.recount("t");
}

// exchange and erase alone, without a batch: they are durable when they return.
void single_forms(Driver& d, const Begin& begin) {
  start(d, crowded_shape(table_spec("t", 56, kOddRow), 40, 20, 19), 14);
  begin();
  for (int i = 0; i < 8 && d.problem.empty(); ++i) {
    const bool erases = i % 3 == 2;
    const auto changes = erases ? d.random_changes("t", 0, 0, 1)
                                : d.random_changes("t", i % 3 == 0 ? 1 : 0, i % 3, 0);
    const Change change = changes.front();
    const auto act = [&]() -> Status {
      table::Table::Impl& table = d.table("t").impl();
      const pool::SlotRef old = table.index().find_one(change.key).ref;
      if (erases) return table.index().erase(change.key, old);
      pool::SlotRef ref = 0;
      table::Retiring retiring(table);
      PETPS_RETURN_IF_ERROR(table.allocate({&ref, 1}, retiring));
      std::vector<std::byte> row(kOddRow);
      write_row(change.key, change.value, row.data(), row.size());
      d.history.add("t", change.key, change.value);
      media::Flusher flusher(table.pool.medium());
      flusher.copy(table.slots.row(ref), row.data(), row.size(), Site::kRow);
      const pool::SlotHeader header{change.key, 0, base::crc32c(row.data(), row.size())};
      flusher.copy(table.slots.header(ref), &header, sizeof header, Site::kRowHeader);
      PETPS_RETURN_IF_ERROR(flusher.drain(Site::kFilled));
      return table.index().exchange(change.key, ref).status();
    };
    d.step(erases ? "erase" : "exchange", act,
           [&](World* w) { w->find("t")->write(change.key, change.value); });
  }
}

// Random steps in random order.
void everything(Driver& d, const Begin& begin) {
  start(d, crowded_shape(table_spec("t", 80, kOddRow), 30, 70, 20), 40);
  d.create_table(shape_of(table_spec("u", 40, 264), 50, 21));
  begin();
  for (int i = 0; i < 24 && d.problem.empty(); ++i) {
    const std::string table = (d.random() & 1) != 0 ? "t" : "u";
    switch (d.random() % 10) {
      case 0:
        d.close();
        d.open();
        break;
      case 1:
        d.open();
        break;
      case 2:
        d.walk();
        break;
      case 3:
        d.rehome("t");
        d.recount("t");
        break;
      case 4:
        d.migrate("t", displaced_keys(d, "t"));
        break;
      case 5:
        d.record_progress(
            {1, static_cast<uint32_t>(d.random() % 3), 1, d.next_value(), 5, 6, {}, 0});
        break;
      default:
        d.apply(table, d.random_changes(table, d.random() % 8, d.random() % 8, d.random() % 8));
    }
  }
}

}  // namespace

const std::vector<Scenario>& scenarios() {
  static const std::vector<Scenario> all = [] {
    std::vector<Scenario> every = {
        {"insert", [](Driver& d, const Begin& b) { insert(d, b, kOddRow); }},
        {"insert_long_rows", [](Driver& d, const Begin& b) { insert(d, b, kLongRow); }},
        {"update", [](Driver& d, const Begin& b) { update(d, b, kOddRow); }},
        {"update_long_rows", [](Driver& d, const Begin& b) { update(d, b, kLongRow); }},
        {"erase", erase},
        {"mixed_batch", mixed},
        {"duplicates_in_batch", duplicates},
        {"two_buckets", two_buckets},
        {"displacement", displacement},
        {"hot_moves", hot_moves},
        {"rehoming", rehoming},
        {"table_creation", table_creation},
        {"extent_growth", extent_growth},
        {"catalogue", catalogue},
        {"alias_switch", alias_switch},
        {"dropping", dropping},
        {"dropping_and_reopening", dropping_and_reopening},
        {"progress", progress},
        {"progress_together", progress_together},
        {"clean_close", clean_close},
        {"reopening", reopening},
        {"interrupted_move", interrupted_move},
        {"killed_erase", killed_erase},
        {"killed_update", killed_update},
        {"killed_move", killed_move},
        {"killed_departure", killed_departure},
        {"killed_metadata", killed_metadata},
        {"recounting", recounting},
        {"single_forms", single_forms},
        {"everything", everything},
    };
    every.insert(every.end(), growth_scenarios().begin(), growth_scenarios().end());
    return every;
  }();
  return all;
}

}  // namespace petps::crash
