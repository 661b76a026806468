// Pools written by every version of the format (clean-VERSION, killed-VERSION). Each later
// version opens them, or reports that it cannot.
//
// tests/golden/pool/*.lines hold a pool as text: its length, then each 64-byte line that is not
// all zeros, as offset and bytes in hexadecimal. PETPS_WRITE_GOLDEN=1 writes the pools of this
// version again; use it only for a new format version.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include "base/checksum.h"
#include "model.h"
#include "pool/layout.h"
#include "rig.h"
#include "tests/native/media/simulated_medium.h"

namespace petps::table {
namespace {

using testing::Change;
using testing::Model;

constexpr size_t kCapacity = size_t{3} << 20;
constexpr uint64_t kMetadata = uint64_t{1} << 20;

std::string path_of(const std::string& name) {
  return std::string(PETPS_GOLDEN_FOLDER) + "/pool/" + name + ".lines";
}

void write_lines(const std::string& name, const std::byte* bytes, uint64_t length) {
  std::ofstream file(path_of(name));
  file << length << "\n";
  for (uint64_t offset = 0; offset < length; offset += 64) {
    char text[160];
    int used = std::snprintf(text, sizeof text, "%llx ", static_cast<unsigned long long>(offset));
    bool any = false;
    for (uint64_t i = 0; i < 64; ++i) {
      const auto byte = static_cast<unsigned>(bytes[offset + i]);
      any = any || byte != 0;
      used += std::snprintf(text + used, sizeof text - static_cast<size_t>(used), "%02x", byte);
    }
    if (any) file << text << "\n";
  }
}

// Read the pool's bytes into zeroed memory; return its length.
uint64_t read_lines(const std::string& name, std::byte* bytes) {
  std::ifstream file(path_of(name));
  uint64_t length = 0;
  file >> length;
  std::string offset;
  std::string line;
  while (file >> offset >> line) {
    const uint64_t at = std::stoull(offset, nullptr, 16);
    for (uint64_t i = 0; i < 64; ++i) {
      bytes[at + i] = static_cast<std::byte>(std::stoul(line.substr(2 * i, 2), nullptr, 16));
    }
  }
  return length;
}

std::vector<Change> rows(uint64_t from, uint64_t to, uint64_t factor) {
  std::vector<Change> changes;
  for (uint64_t key = from; key < to; ++key) changes.push_back({key, key * factor, false});
  return changes;
}

std::unique_ptr<Tables> attach(std::byte* memory, uint64_t bytes) {
  auto pool = pool::Pool::attach(media::Media::borrow(memory, bytes, kCapacity, nullptr));
  EXPECT_TRUE(pool.ok()) << pool.status().to_string();
  if (!pool.ok()) return nullptr;
  auto tables = Tables::attach(std::move(pool).value(), /*background=*/false);
  EXPECT_TRUE(tables.ok()) << tables.status().to_string();
  return tables.ok() ? std::move(tables).value() : nullptr;
}

// Make the contents of both golden pools; "killed" stops before the close.
std::unique_ptr<Tables> make_contents(media::SimulatedMedium& disk, Model* items, Model* users) {
  auto pool = pool::Pool::format(disk.media(kMetadata), pool::kTestUnitBytes);
  EXPECT_TRUE(pool.ok() && pool.value()->create_instance("ranking", "ranking@7", 3).ok());
  auto tables = Tables::attach(std::move(pool).value(), /*background=*/false).value();
  pool::TableSpec with_default = testing::spec("users", 22, 72);
  with_default.dim = 18;
  with_default.dtype = 1;
  with_default.feed = pool::Feed::kDelta;
  with_default.default_row.assign(72, std::byte{0x5A});
  Table* a = tables->create_table(testing::spec("items", 100)).value().get();
  Table* b = tables->create_table(with_default).value().get();
  const auto apply_both = [](Table* table, Model* model, const std::vector<Change>& changes) {
    EXPECT_TRUE(testing::apply(*table, changes).ok());
    testing::apply(model, changes);
  };
  apply_both(a, items, rows(1000, 1060, 3));
  apply_both(a, items, rows(1020, 1030, 5));
  apply_both(a, items, {{1001, 0, true}, {1002, 0, true}});
  apply_both(b, users, rows(1, 23, 7));  // the table has two buckets, so some keys are displaced
  EXPECT_TRUE(b->rehome().ok());
  EXPECT_TRUE(tables->pool().create_instance("ranking", "ranking@8", 3).ok());
  EXPECT_TRUE(tables->pool().set_alias("live", 2).ok());
  EXPECT_TRUE(
      tables->record_progress({1, 0, 11, 12, 13, 14, pool::ProgressState::kFollowing, 0}).ok());
  EXPECT_TRUE(
      tables->record_progress({1, 2, 21, 22, 23, 24, pool::ProgressState::kCatchingUp, 25}).ok());
  EXPECT_TRUE(
      tables->record_progress({2, 0, 31, 32, 33, 34, pool::ProgressState::kConflict, 0, 0xABCDEF})
          .ok());
  EXPECT_TRUE(
      tables->record_progress({2, 1, 41, 42, 43, 44, pool::ProgressState::kIncomplete, 45, 1})
          .ok());
  EXPECT_TRUE(
      tables->record_progress({1, 0, 11, 15, 16, 17, pool::ProgressState::kFollowing, 0}).ok());
  // From version 4 on: rows that expire.
  EXPECT_TRUE(tables->set_expiry(b->id(), 4800).ok());
  for (const uint64_t version : {18, 19}) {
    const pool::Progress progress = {1, 0, 11, 15, 16, version};
    const pool::Commit commit = {1, 0, version, version * 1'000'000'000'000};
    EXPECT_TRUE(tables->record_progress({&progress, 1}, {&commit, 1}).ok());
  }
  return tables;
}

void expect_contents(const Tables& tables, const Model& items, const Model& users, int version) {
  testing::expect_clean(tables);
  EXPECT_EQ(tables.verify().rows, items.size() + users.size());
  const TablePointer a = tables.find("ranking@7", "items");
  const TablePointer b = tables.find("ranking@7", "users");
  ASSERT_TRUE(a != nullptr && b != nullptr);
  std::vector<uint64_t> keys;
  for (uint64_t key = 0; key < 1100; ++key) keys.push_back(key);
  EXPECT_EQ(testing::compare(*a, items, keys), "");
  EXPECT_EQ(testing::compare(*b, users, keys), "");
  EXPECT_EQ(a->default_row(), nullptr);
  ASSERT_NE(b->default_row(), nullptr);
  EXPECT_EQ(b->default_row()[71], std::byte{0x5A});
  EXPECT_EQ(b->record().spec.feed, pool::Feed::kDelta);
  EXPECT_EQ(b->record().spec.dtype, 1);
  EXPECT_EQ(tables.resolve("live").value().name, "ranking@8");
  EXPECT_EQ(tables.resolve("ranking").value().partitions, 3u);
  const auto progress = const_cast<Tables&>(tables).pool().all_progress();
  ASSERT_EQ(progress.size(), version == 1 ? 2u : 4u);
  EXPECT_EQ(progress[0].seq, 15u);
  EXPECT_EQ(progress[0].publisher, 0u);
  EXPECT_EQ(progress[1].target, 25u);
  EXPECT_EQ(progress[1].state, pool::ProgressState::kCatchingUp);
  if (version == 1) return;
  EXPECT_EQ(progress[2].state, pool::ProgressState::kConflict);
  EXPECT_EQ(progress[2].publisher, 0xABCDEFu);
  EXPECT_EQ(progress[3].state, pool::ProgressState::kIncomplete);
  EXPECT_EQ(progress[3].target, 45u);
  EXPECT_EQ(progress[3].publisher, 1u);
  const auto clocks = const_cast<Tables&>(tables).pool().clocks(b->id());
  ASSERT_EQ(clocks.size(), version < 4 ? 0u : 3u);
  if (version < 4) return;
  EXPECT_EQ(progress[0].version, 19u);
  EXPECT_EQ(b->record().spec.expire_after, 4800u);
  EXPECT_EQ(clocks[0].version, 19u);
  EXPECT_EQ(clocks[0].time_ns, 19'000'000'000'000u);
  EXPECT_EQ(clocks[0].cell_ns, 100'000'000'000u);
  EXPECT_EQ(clocks[0].bounds[0], 20u);
  EXPECT_EQ(clocks[0].bounds[10], 19u);
  EXPECT_EQ(clocks[0].bounds[11], 0u);
  EXPECT_EQ(clocks[1].time_ns, 0u);
}

struct Golden {
  bool clean;
  int version;
};

class GoldenPool : public ::testing::TestWithParam<Golden> {
 protected:
  bool clean() const { return GetParam().clean; }
  int version() const { return GetParam().version; }
  std::string name() const { return (clean() ? "clean-" : "killed-") + std::to_string(version()); }
};

TEST_P(GoldenPool, OpensAndVerifies) {
  media::SimulatedMedium written(kCapacity);
  Model items;
  Model users;
  auto tables_written = make_contents(written, &items, &users);
  if (clean()) {
    ASSERT_TRUE(tables_written->close().ok());
  }
  if (std::getenv("PETPS_WRITE_GOLDEN") != nullptr &&
      version() == static_cast<int>(pool::layout::kFormatVersion))
    write_lines(name(), written.memory(), written.size());
  std::vector<std::byte> memory(kCapacity + 4096);
  std::byte* base =
      memory.data() + (4096 - reinterpret_cast<uintptr_t>(memory.data()) % 4096) % 4096;
  const uint64_t length = read_lines(name(), base);
  ASSERT_GT(length, kMetadata) << path_of(name());
  auto tables = attach(base, length);
  ASSERT_NE(tables, nullptr);
  EXPECT_EQ(tables->pool().was_clean(), clean());
  EXPECT_EQ(tables->pool().generation(), clean() ? 1u : 2u);
  expect_contents(*tables, items, users, version());
  if (clean()) {
    EXPECT_EQ(tables->find(1)->status().rows, items.size());
  }
  tables->walk();
  expect_contents(*tables, items, users, version());
  EXPECT_EQ(tables->verify().unreachable_slots, 0u);
  ASSERT_TRUE(testing::apply(*tables->find(1), {{5, 50, false}}).ok());
  items[5] = 50;
  expect_contents(*tables, items, users, version());
}

template <typename T>
T at(const std::byte* bytes, uint64_t offset) {
  T value;
  std::memcpy(&value, bytes + offset, sizeof value);
  return value;
}

// The offsets are literals here and not taken from layout.h, because they pin layout.h. FORMAT.md
// gives the same offsets in prose.
struct Offsets {
  uint32_t version;
  uint64_t second_copy;
  uint64_t progress;
  uint64_t extents;
};

class GoldenPoolBytes : public ::testing::TestWithParam<Offsets> {
 protected:
  void SetUp() override {
    read_lines("clean-" + std::to_string(GetParam().version), memory.data());
  }
  std::vector<std::byte> memory = std::vector<std::byte>(kCapacity);
};

TEST_P(GoldenPoolBytes, Superblock) {
  const std::byte* copies[2] = {memory.data(), memory.data() + GetParam().second_copy};
  const std::byte* copy =
      at<uint64_t>(copies[0], 24) > at<uint64_t>(copies[1], 24) ? copies[0] : copies[1];
  EXPECT_EQ(std::memcmp(copy, "PETPS_01", 8), 0);
  EXPECT_EQ(at<uint32_t>(copy, 8), GetParam().version);
  EXPECT_EQ(at<uint32_t>(copy, 12), 144u + 2 * 136 + 2 * 136 + 2 * 72);
  EXPECT_EQ(at<uint64_t>(copy, 64), 65536u);  // unit
  EXPECT_EQ(at<uint32_t>(copy, 72), 1u);      // generation
  EXPECT_EQ(at<uint32_t>(copy, 76), 1u);      // clean
  EXPECT_EQ(at<uint32_t>(copy, 80), 0u);      // durability: power
  EXPECT_EQ(at<uint32_t>(copy, 84), 3u);      // next table
  EXPECT_EQ(at<uint32_t>(copy, 88), 3u);      // next instance
  EXPECT_EQ(at<uint32_t>(copy, 92), 2u);      // tables
  EXPECT_EQ(at<uint32_t>(copy, 96), 2u);      // instances
  EXPECT_EQ(at<uint32_t>(copy, 100), 2u);     // aliases
  const std::byte* users = copy + 144 + 136;
  EXPECT_EQ(at<uint32_t>(users, 0), 2u);    // id
  EXPECT_EQ(at<uint32_t>(users, 4), 1u);    // instance
  EXPECT_EQ(at<uint8_t>(users, 8), 1u);     // dtype
  EXPECT_EQ(at<uint8_t>(users, 9), 1u);     // feed: delta
  EXPECT_EQ(at<uint32_t>(users, 12), 18u);  // dim
  EXPECT_EQ(at<uint32_t>(users, 16), 72u);  // row bytes
  EXPECT_EQ(at<uint64_t>(users, 24), 22u);  // capacity
  EXPECT_EQ(at<uint64_t>(users, 40), 2u);   // buckets
  EXPECT_EQ(at<uint64_t>(users, 56), 22u);  // rows
  EXPECT_EQ(std::memcmp(users + 72, "users", 6), 0);
  const std::byte* newer = copy + 144 + 2 * 136 + 136;
  EXPECT_EQ(at<uint32_t>(newer, 0), 2u);
  EXPECT_EQ(at<uint32_t>(newer, 4), 3u);  // partitions
  EXPECT_EQ(std::memcmp(newer + 8, "ranking", 8), 0);
  EXPECT_EQ(std::memcmp(newer + 72, "ranking@8", 10), 0);
  const std::byte* alias = copy + 144 + 4 * 136;
  EXPECT_EQ(at<uint32_t>(alias, 0), 1u);
  EXPECT_EQ(std::memcmp(alias + 8, "ranking", 8), 0);
  EXPECT_EQ(at<uint32_t>(alias, 72), 2u);
  EXPECT_EQ(std::memcmp(alias + 72 + 8, "live", 5), 0);
}

TEST_P(GoldenPoolBytes, ProgressAndExtents) {
  // Turn 2 is in the first record, turn 1 in the second.
  const std::byte* first = memory.data() + GetParam().progress;
  EXPECT_EQ(at<uint32_t>(first, 0), 1u);    // instance
  EXPECT_EQ(at<uint32_t>(first, 4), 0u);    // partition
  EXPECT_EQ(at<uint64_t>(first, 8), 11u);   // run
  EXPECT_EQ(at<uint64_t>(first, 16), 15u);  // seq
  EXPECT_EQ(at<uint64_t>(first, 24), 16u);  // offset
  EXPECT_EQ(at<uint64_t>(first, 32), 17u);  // version
  EXPECT_EQ(at<uint64_t>(first, 48), 2u);   // turn
  EXPECT_EQ(at<uint32_t>(first, 60), base::checksum32(first, 60));
  EXPECT_EQ(at<uint64_t>(first + 64, 16), 12u);
  EXPECT_EQ(at<uint64_t>(first + 64, 48), 1u);
  const std::byte* second = first + 128 + 64;
  EXPECT_EQ(at<uint32_t>(second, 4), 2u);
  EXPECT_EQ(at<uint64_t>(second, 40), 25u);  // target
  EXPECT_EQ(at<uint8_t>(second, 56), 1u);    // catching up
  const std::byte* third = first + 2 * 128 + 64;
  EXPECT_EQ(at<uint32_t>(third, 56), 0xABCDEF04u);  // publisher's mark, conflict
  const std::byte* fourth = first + 3 * 128 + 64;
  EXPECT_EQ(at<uint64_t>(fourth, 40), 45u);      // target
  EXPECT_EQ(at<uint32_t>(fourth, 56), 0x0103u);  // publisher's mark, incomplete
  // Buckets of table 1; buckets of table 2, and slots of table 2 for its default row; slots of
  // table 1. Each word has kind, check, table and units.
  const std::byte* extents = memory.data() + GetParam().extents;
  const uint64_t expected[4][2] = {{1, 1}, {1, 2}, {2, 2}, {2, 1}};
  for (uint64_t i = 0; i < 4; ++i) {
    const auto word = at<uint64_t>(extents, i * 8);
    EXPECT_EQ(word & 15, expected[i][0]) << i;
    EXPECT_EQ((word >> 16) & 0xFFFFFF, expected[i][1]) << i;
    EXPECT_EQ(word >> 40, 1u) << i;
    const uint64_t checked[2] = {word & ~uint64_t{0xFFF0}, i};
    EXPECT_EQ((word >> 4) & 0xFFF, base::checksum64(checked, sizeof checked) & 0xFFF) << i;
  }
  EXPECT_EQ(at<uint64_t>(extents, 32), 0u);
}

TEST(GoldenClocks, HaveTheirBytes) {
  std::vector<std::byte> memory(kCapacity);
  read_lines("clean-4", memory.data());
  const std::byte* const copy =
      at<uint64_t>(memory.data(), 24) > at<uint64_t>(memory.data() + 655360, 24)
          ? memory.data()
          : memory.data() + 655360;
  EXPECT_EQ(at<uint32_t>(copy, 8), 4u);
  EXPECT_EQ(at<uint32_t>(copy + 144 + 136, 20), 4800u);  // table 2: expire_after
  const auto word = at<uint64_t>(memory.data() + 1576960, 32);
  EXPECT_EQ(word & 15, 3u);  // clocks
  EXPECT_EQ((word >> 16) & 0xFFFFFF, 2u);
  // The pair of partition 0: turn 2 is in its first record. 2 MiB of metadata and four extents of
  // 64 KiB are before it.
  const std::byte* const record = memory.data() + 2097152 + uint64_t{4} * 65536;
  EXPECT_EQ(at<uint32_t>(record, 0), 2u);                 // table
  EXPECT_EQ(at<uint32_t>(record, 4), 0u);                 // partition
  EXPECT_EQ(at<uint64_t>(record, 8), 2u);                 // turn
  EXPECT_EQ(at<uint64_t>(record, 16), 100'000'000'000u);  // cell
  EXPECT_EQ(at<uint64_t>(record, 24), 19'000'000'000'000u);
  EXPECT_EQ(at<uint64_t>(record, 32), 19u);  // version
  EXPECT_EQ(at<uint64_t>(record, 40), 20u);  // bounds[0]
  EXPECT_EQ(at<uint64_t>(record, 504), base::checksum64(record, 504));
  EXPECT_EQ(at<uint64_t>(record + 512, 8), 1u);
}

INSTANTIATE_TEST_SUITE_P(Pools, GoldenPool,
                         ::testing::Values(Golden{true, 1}, Golden{false, 1}, Golden{true, 2},
                                           Golden{false, 2}, Golden{true, 3}, Golden{false, 3},
                                           Golden{true, 4}, Golden{false, 4}),
                         [](const auto& pool) {
                           return (pool.param.clean ? "clean_" : "killed_") +
                                  std::to_string(pool.param.version);
                         });

INSTANTIATE_TEST_SUITE_P(Versions, GoldenPoolBytes,
                         ::testing::Values(Offsets{2, 131072, 266240, 528384},
                                           Offsets{3, 655360, 1314816, 1576960}),
                         [](const auto& of) { return std::to_string(of.param.version); });

}  // namespace
}  // namespace petps::table
