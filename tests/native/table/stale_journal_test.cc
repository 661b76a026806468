// The journal of hot moves outlives the table to which it belongs.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "rig.h"
#include "tests/native/media/temporary_folder.h"

namespace petps::table {
namespace {

struct Journal {
  uint64_t key;
  uint64_t from;
  uint64_t to;
};

Journal journal_of(const pool::Pool& pool) {
  Journal journal;
  std::memcpy(&journal, pool.journal(), sizeof journal);
  return journal;
}

// Fill the buckets with keys so that some are displaced, then delete some keys, so that displaced
// ones move.
void move_entries(Table& table) {
  std::vector<uint64_t> keys;
  for (uint64_t key = 0; key < table.record().spec.capacity; ++key) keys.push_back(key);
  std::vector<std::byte> rows(keys.size() * table.record().spec.row_bytes);
  ASSERT_TRUE(table.apply({.keys = keys, .rows = rows.data()}).ok());
  std::vector<uint64_t> gone;
  for (const uint64_t key : keys) {
    if (key % 3 == 0) gone.push_back(key);
  }
  const std::vector<uint8_t> deleted(gone.size(), 1);
  ASSERT_TRUE(table.apply({.keys = gone, .deleted = deleted}).ok());
  const auto moved = table.rehome();
  ASSERT_TRUE(moved.ok());
  ASSERT_GT(moved.value(), 0u);
}

pool::TableSpec spec_of(const std::string& name, uint32_t instance, uint32_t row_bytes,
                        uint64_t capacity) {
  pool::TableSpec spec = testing::spec(name, capacity, row_bytes);
  spec.instance = instance;
  return spec;
}

// The rows look like the entry of the last moved key at every offset.
TEST(StaleJournal, OpeningChangesNoRowsThatReplacedTheBucketsOfADroppedTable) {
  testing_support::TemporaryFolder folder;
  TablesOptions options;
  options.background = false;
  options.pool.media.path = folder.path("pool");
  options.pool.unit_bytes = pool::kTestUnitBytes;
  {
    auto tables = Tables::create(options).value();
    ASSERT_TRUE(tables->pool().create_instance("m", "m@1", 1).ok());
    ASSERT_TRUE(tables->pool().create_instance("m", "m@2", 1).ok());
    // Its buckets take two units, the smallest free extent for the slots of the next table. The
    // next table's buckets take the one unit of this table's first slots.
    const auto dropped = tables->create_table(spec_of("dropped", 1, 8, 5000)).value();
    const uint64_t buckets = dropped->record().bucket_offset;
    move_entries(*dropped);
    const Journal journal = journal_of(tables->pool());
    ASSERT_GT(journal.from, buckets);
    ASSERT_TRUE(tables->switch_alias("m", 2).ok());
    ASSERT_TRUE(tables->drop_instance(1).ok());
  }
  {
    auto tables = Tables::open(options).value();
    tables->walk();
    const Journal journal = journal_of(tables->pool());
    constexpr uint32_t kRowBytes = 4096;
    const auto rows = tables->create_table(spec_of("rows", 2, kRowBytes, 64)).value();
    std::vector<uint64_t> row(kRowBytes / 8);
    for (size_t i = 0; i < row.size(); ++i) row[i] = i % 2 == 0 ? journal.key : 1;
    const auto holds = [&](uint64_t at) {  // true if a row there looks like the entry
      uint64_t words[2];
      std::memcpy(words, tables->pool().at(at), sizeof words);
      return words[0] == journal.key && words[1] == 1;
    };
    for (uint64_t key = 0; key < 64; ++key) {
      ASSERT_TRUE(
          rows->apply({.keys = {&key, 1}, .rows = reinterpret_cast<std::byte*>(row.data())}).ok());
    }
    ASSERT_TRUE(holds(journal.from) && holds(journal.to)) << "the space was not used again";
  }  // killed
  const auto tables = Tables::open(options).value();
  testing::expect_clean(*tables);
}

}  // namespace
}  // namespace petps::table
