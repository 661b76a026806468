// Faults in a pool's metadata and their error messages; limits of the catalogue.
#include "pool/pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "memory_pool.h"
#include "pool/layout.h"
#include "pool/slots.h"

namespace petps::pool {
namespace {

using base::Code;
using testing_support::contains;
using testing_support::Memory;
using testing_support::spec;

// The offsets of the two superblock copies.
constexpr uint64_t kCopies[2] = {layout::kMap.superblock(0), layout::kMap.superblock(1)};

TEST(Pool, ReopensWithEverythingThatWasWritten) {
  Memory memory;
  {
    auto pool = memory.format();
    TableSpec with_default = spec("users", 100, 72);
    with_default.default_row.assign(72, std::byte{7});
    ASSERT_TRUE(pool->create_table(spec("items", 1000)).ok());
    ASSERT_TRUE(pool->create_table(with_default).ok());
    ASSERT_TRUE(pool->create_instance("model", "model@2", 2).ok());
    ASSERT_TRUE(pool->set_alias("live", 2).ok());
    ASSERT_TRUE(pool->set_feed(2, Feed::kDelta).ok());
    media::Flusher flusher(pool->medium());
    ASSERT_TRUE(
        pool->write_progress({1, 1, 5, 6, 7, 8, ProgressState::kCatchingUp, 9}, flusher).ok());
    memory.keep(*pool);
  }
  auto pool = memory.attach().value();
  const auto tables = pool->tables();
  ASSERT_EQ(tables.size(), 2u);
  EXPECT_EQ(tables[0].spec.name, "items");
  EXPECT_EQ(tables[0].spec.feed, Feed::kPush);
  EXPECT_EQ(tables[0].default_row, 0u);
  EXPECT_EQ(tables[1].spec.name, "users");
  EXPECT_EQ(tables[1].spec.feed, Feed::kDelta);
  EXPECT_EQ(tables[1].spec.row_bytes, 72u);
  ASSERT_NE(tables[1].default_row, 0u);
  EXPECT_EQ(*pool->slots(2).row(tables[1].default_row), std::byte{7});
  ASSERT_EQ(pool->instances().size(), 2u);
  EXPECT_EQ(pool->instances()[1].name, "model@2");
  const auto aliases = pool->aliases();
  ASSERT_EQ(aliases.size(), 2u);
  EXPECT_EQ(aliases[0].name, "model") << "it still refers to the first instance";
  EXPECT_EQ(aliases[0].instance, 1u);
  EXPECT_EQ(aliases[1].name, "live");
  EXPECT_EQ(aliases[1].instance, 2u);
  EXPECT_EQ(aliases[1].previous, 0u);
  const auto progress = pool->read_progress(1, 1);
  ASSERT_TRUE(progress.has_value());
  EXPECT_EQ(progress->seq, 6u);
  EXPECT_EQ(progress->state, ProgressState::kCatchingUp);
  EXPECT_FALSE(pool->read_progress(1, 0).has_value());
  std::vector<std::string> problems;
  pool->verify_metadata(&problems);
  EXPECT_TRUE(problems.empty()) << problems.front();
}

TEST(Pool, OpenRefusesBytesThatAreNotAPool) {
  Memory memory;
  memory.used = layout::kMap.metadata_bytes;
  auto pool = memory.attach();
  EXPECT_EQ(pool.status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(contains(pool.status(), "not a petps pool")) << pool.status().to_string();
  EXPECT_TRUE(contains(pool.status(), "signature")) << pool.status().to_string();
  EXPECT_TRUE(contains(pool.status(), "petps create")) << pool.status().to_string();
  memory.used = 5000;
  pool = memory.attach();
  EXPECT_EQ(pool.status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(contains(pool.status(), "shorter than a pool's metadata (5000 bytes)"))
      << pool.status().to_string();
}

// Write a header as another version would, with a correct checksum.
void set_format_version(Memory& memory, uint64_t copy, uint32_t version) {
  auto header = memory.read<layout::Superblock>(copy);
  header.format_version = version;
  header.checksum = 0;
  const uint64_t parts[2] = {
      base::checksum64(&header, sizeof header),
      base::checksum64(memory.base() + copy + sizeof header, header.length - sizeof header)};
  header.checksum = base::checksum64(parts, sizeof parts);
  memory.write(copy, header);
}

TEST(Pool, OpenRefusesANewerFormatVersion) {
  Memory memory;
  memory.format();
  for (const uint64_t copy : kCopies) set_format_version(memory, copy, layout::kFormatVersion + 1);
  const auto pool = memory.attach();
  EXPECT_EQ(pool.status().code(), Code::kUnimplemented);
  EXPECT_TRUE(contains(pool.status(), "format version 5")) << pool.status().to_string();
  EXPECT_TRUE(contains(pool.status(), "reads versions 1 to 4")) << pool.status().to_string();
  EXPECT_TRUE(contains(pool.status(), "export")) << pool.status().to_string();
}

TEST(Pool, OpenRefusesATruncatedPool) {
  Memory memory;
  memory.format_with_table();
  memory.used -= 4096;
  const auto pool = memory.attach();
  EXPECT_EQ(pool.status().code(), Code::kDataLoss);
  EXPECT_TRUE(contains(pool.status(), "cut short")) << pool.status().to_string();
  EXPECT_TRUE(contains(pool.status(), std::to_string(memory.used))) << pool.status().to_string();
  EXPECT_TRUE(contains(pool.status(), "copy it again")) << pool.status().to_string();
}

// Damages each byte of a copy that the checksum covers, one at a time.
TEST(Pool, OpensWithOneDamagedSuperblockCopy) {
  Memory memory;
  memory.format_with_table();
  for (const uint64_t copy : kCopies) {
    const auto length = memory.read<layout::Superblock>(copy).length;
    for (uint64_t at = 0; at < length; ++at) {
      memory.base()[copy + at] ^= std::byte{0x10};
      const auto pool = memory.attach();
      ASSERT_TRUE(pool.ok()) << "byte " << at << ": " << pool.status().to_string();
      memory.base()[copy + at] ^= std::byte{0x10};
    }
  }
}

TEST(Pool, ReadsTheNewerSuperblockCopy) {
  Memory memory;
  {
    auto pool = memory.format();
    ASSERT_TRUE(pool->set_alias("live", 1).ok());
    memory.keep(*pool);
  }
  EXPECT_EQ(memory.attach().value()->aliases().size(), 1u);
  const auto a = memory.read<layout::Superblock>(kCopies[0]);
  const auto b = memory.read<layout::Superblock>(kCopies[1]);
  ASSERT_EQ(std::max(a.sequence, b.sequence), std::min(a.sequence, b.sequence) + 1);
  memory.base()[kCopies[a.sequence > b.sequence ? 0 : 1]] ^= std::byte{1};
  EXPECT_EQ(memory.attach().value()->aliases().size(), 0u) << "the older copy is read";
}

TEST(Pool, OpenRefusesTwoDamagedSuperblockCopies) {
  Memory memory;
  memory.format();
  for (const uint64_t copy : kCopies) memory.base()[copy + 40] ^= std::byte{1};
  const auto pool = memory.attach();
  EXPECT_EQ(pool.status().code(), Code::kDataLoss);
  EXPECT_TRUE(contains(pool.status(), "both superblock copies")) << pool.status().to_string();
  EXPECT_TRUE(contains(pool.status(), "petps load")) << pool.status().to_string();
}

TEST(Pool, OpenRefusesADamagedExtentRecord) {
  Memory memory;
  memory.format_with_table();
  for (int bit = 0; bit < 64; ++bit) {
    const auto word = memory.read<uint64_t>(layout::kMap.extents());
    memory.write(layout::kMap.extents(), word ^ (uint64_t{1} << bit));
    const auto pool = memory.attach();
    EXPECT_FALSE(pool.ok()) << "bit " << bit;
    EXPECT_EQ(pool.status().code(), Code::kDataLoss);
    EXPECT_TRUE(contains(pool.status(), "extent record 0")) << pool.status().to_string();
    memory.write(layout::kMap.extents(), word);
  }
  EXPECT_TRUE(memory.attach().ok());
}

// The table's buckets are in an extent that no record names as this table's.
TEST(Pool, OpenRefusesATableWithoutItsExtents) {
  Memory memory;
  memory.format_with_table();
  memory.write(layout::kMap.extents(), uint64_t{0});
  const auto pool = memory.attach();
  EXPECT_EQ(pool.status().code(), Code::kDataLoss);
  EXPECT_TRUE(contains(pool.status(), "table 't'")) << pool.status().to_string();
}

TEST(Pool, VerifyReportsAHoleInTheExtentRecords) {
  Memory memory;
  auto pool = memory.format();
  ASSERT_TRUE(pool->create_table(spec("t", 100)).ok());
  bool wait = false;
  std::vector<SlotRef> refs(10);
  ASSERT_TRUE(pool->slots(1).allocate(refs, &wait).ok());
  std::vector<std::string> problems;
  pool->verify_metadata(&problems);
  EXPECT_TRUE(problems.empty());
  memory.write(layout::kMap.extents(), uint64_t{0});
  pool->verify_metadata(&problems);
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_EQ(problems[0], "extent record 0 is missing before later ones");
}

TEST(Pool, ProgressSurvivesADamagedRecord) {
  Memory memory;
  {
    auto pool = memory.format();
    for (uint64_t seq = 1; seq <= 2; ++seq) {
      media::Flusher flusher(pool->medium());
      ASSERT_TRUE(pool->write_progress({1, 0, 1, seq, 0, 0, {}, 0}, flusher).ok());
    }
    memory.keep(*pool);
  }
  ASSERT_EQ(memory.attach().value()->read_progress(1, 0)->seq, 2u);
  memory.base()[layout::kMap.progress() + 8] ^= std::byte{1};  // turn 2 is in the first record
  EXPECT_EQ(memory.attach().value()->read_progress(1, 0)->seq, 1u);
}

struct DrainCounter : media::Observer {
  void on_store(const void*, size_t) override {}
  void on_flush(const void*, size_t, media::Site) override {}
  base::Status on_drain(media::Site) override {
    ++drains;
    return base::Status();
  }
  int drains = 0;
};

std::vector<Progress> window_of(uint32_t partitions, uint64_t seq) {
  std::vector<Progress> all;
  for (uint32_t p = 0; p < partitions; ++p) all.push_back({1, p, 7, seq, seq, seq, {}, 0});
  return all;
}

// A window takes two drains if it claims pairs and one drain otherwise, whatever the number of
// partitions.
TEST(Pool, ProgressOfAWindowCostsOneDrain) {
  Memory memory;
  { memory.keep(*memory.format()); }
  DrainCounter counter;
  auto pool = std::move(Pool::attach(media::Media::borrow(memory.base(), memory.used,
                                                          Memory::kReserve, &counter)))
                  .value();
  for (uint64_t seq = 1; seq <= 3; ++seq) {
    counter.drains = 0;
    media::Flusher flusher(pool->medium());
    ASSERT_TRUE(pool->write_progress(window_of(1024, seq), flusher).ok());
    ASSERT_TRUE(flusher.drain(media::Site::kProgressed).ok());
    EXPECT_EQ(counter.drains, seq == 1 ? 2 : 1);
  }
  pool.reset();
  pool = memory.attach().value();
  EXPECT_EQ(pool->all_progress().size(), 1024u);
  for (const Progress& progress : pool->all_progress()) ASSERT_EQ(progress.seq, 3u);
}

TEST(Pool, AWindowOfProgressThatIsRefusedChangesNothing) {
  Memory memory;
  auto pool = memory.format();
  media::Flusher flusher(pool->medium());
  ASSERT_TRUE(pool->write_progress(window_of(3, 1), flusher).ok());
  std::vector<Progress> twice = window_of(4, 2);
  twice.push_back(twice.front());
  const base::Status refused = pool->write_progress(twice, flusher);
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_TRUE(contains(refused, "partition 0 appears twice")) << refused.message();
  EXPECT_EQ(pool->write_progress(window_of(kMaxProgress + 1, 2), flusher).code(),
            Code::kResourceExhausted);
  std::vector<Progress> unknown = window_of(4, 2);
  unknown.back().instance = 9;
  EXPECT_EQ(pool->write_progress(unknown, flusher).code(), Code::kNotFound);
  memory.reopen(&pool);
  ASSERT_EQ(pool->all_progress().size(), 3u);
  for (const Progress& progress : pool->all_progress()) EXPECT_EQ(progress.seq, 1u);
}

// A crash comes between the marks of a window and its records: the pairs are used again, and none
// is lost.
TEST(Pool, PairsThatACrashLeftWithoutARecordAreUsedAgain) {
  Memory memory;
  auto pool = memory.format();
  for (uint64_t round = 1; round <= 3; ++round) {
    {
      media::Flusher flusher(pool->medium());
      ASSERT_TRUE(pool->write_progress(window_of(kMaxProgress, round), flusher).ok());
    }
    for (uint32_t pair = 0; pair < kMaxProgress; ++pair) {  // tear them: no record is whole
      for (const uint64_t record : {0, 64})
        memory.base()[layout::kMap.progress() + pair * 128 + record + 60] ^= std::byte{1};
    }
    memory.reopen(&pool);
    EXPECT_TRUE(pool->all_progress().empty());
  }
}

TEST(Pool, GenerationRisesOnlyAfterAnUncleanStop) {
  Memory memory;
  auto pool = memory.format();
  memory.reopen(&pool);
  EXPECT_TRUE(pool->was_clean());
  EXPECT_EQ(pool->generation(), 1u);
  ASSERT_TRUE(pool->begin_writing().ok());
  memory.reopen(&pool);
  EXPECT_FALSE(pool->was_clean());
  EXPECT_EQ(pool->generation(), 2u);
  ASSERT_TRUE(pool->begin_writing().ok());
  memory.reopen(&pool);
  EXPECT_EQ(pool->generation(), 3u);
  ASSERT_TRUE(pool->begin_writing().ok());
  ASSERT_TRUE(pool->finish_clean().ok());
  memory.reopen(&pool);
  EXPECT_TRUE(pool->was_clean());
  EXPECT_EQ(pool->generation(), 3u);
}

TEST(Pool, BadTablesAreRefusedWithTheReason) {
  Memory memory;
  auto pool = memory.format();
  const auto expect_refusal = [&](TableSpec s, Code code, const std::string& text) {
    const auto result = pool->create_table(s);
    EXPECT_EQ(result.status().code(), code) << text;
    EXPECT_TRUE(contains(result.status(), text)) << result.status().to_string();
  };
  TableSpec s = spec("t", 10);
  s.dim = 5000;
  expect_refusal(s, Code::kInvalidArgument, "dim 5000 is outside 1..4096");
  s = spec("t", 10, 0);
  expect_refusal(s, Code::kInvalidArgument, "a row of 0 bytes");
  s = spec("t", 0);
  expect_refusal(s, Code::kInvalidArgument, "capacity");
  s = spec("t", 10);
  s.default_row.resize(63);
  expect_refusal(s, Code::kInvalidArgument, "the default row has 63 bytes, a row has 64");
  s = spec("t", 10);
  s.instance = 9;
  expect_refusal(s, Code::kNotFound, "instance 9 does not exist");
  expect_refusal(spec("", 10), Code::kInvalidArgument, "1 to 63 characters");
  expect_refusal(spec(std::string(64, 'a'), 10), Code::kInvalidArgument, "1 to 63 characters");
  expect_refusal(spec("a b", 10), Code::kInvalidArgument, "'a b'");
  ASSERT_TRUE(pool->create_table(spec("t", 10)).ok());
  expect_refusal(spec("t", 10), Code::kAlreadyExists, "table 't'");
  EXPECT_EQ(pool->tables().size(), 1u);
}

TEST(Pool, ATableThatDoesNotFitChangesNothing) {
  Memory memory;
  auto pool = memory.format();
  const auto result = pool->create_table(spec("t", uint64_t{1} << 30));
  EXPECT_EQ(result.status().code(), Code::kResourceExhausted) << result.status().to_string();
  EXPECT_TRUE(pool->tables().empty());
  EXPECT_TRUE(pool->create_table(spec("t", 100)).ok());
}

// The walk and writers make the bits of the slots. Opening reads one record per extent and
// nothing more.
TEST(Pool, OpeningAllocatesNothingThatGrowsWithTheSlots) {
  Memory memory;
  std::vector<SlotRef> refs(5000);
  {
    auto pool = memory.format();
    ASSERT_TRUE(pool->create_table(spec("t", 100'000, 4)).ok());
    bool wait = false;
    ASSERT_TRUE(pool->slots(1).allocate(refs, &wait).ok());
    memory.keep(*pool);
  }
  auto pool = memory.attach().value();
  Slots& slots = pool->slots(1);
  ASSERT_TRUE(slots.needs_walk());
  const uint64_t opened = slots.allocator_bytes();
  slots.mark(refs[17]);
  slots.mark(refs[4999]);
  EXPECT_GT(slots.allocator_bytes(), opened);
  slots.finish_walk();
  EXPECT_GE(slots.allocator_bytes(), opened + slots.total() / 8) << "now there is one bit per slot";
  EXPECT_FALSE(slots.is_free(refs[17]));
  EXPECT_FALSE(slots.is_free(refs[4999]));
  EXPECT_TRUE(slots.is_free(refs[18]));
  EXPECT_EQ(slots.free_count(), slots.total() - 2);
}

TEST(Pool, HoldsUpToTheLimitOfTables) {
  Memory memory((kMaxTables + 64) * kTestUnitBytes);
  {
    auto pool = memory.format();
    ASSERT_TRUE(pool->create_instance("other", "other@1", 1).ok());
    for (uint32_t i = 0; i < kMaxTables; ++i) {
      TableSpec table = spec("t" + std::to_string(i / 2), 1, 4);
      table.instance = 1 + i % 2;
      ASSERT_TRUE(pool->create_table(table).ok()) << i;
    }
    const auto too_many = pool->create_table(spec("more", 1, 4));
    EXPECT_EQ(too_many.status().code(), Code::kResourceExhausted);
    EXPECT_TRUE(contains(too_many.status(), "at most 4096 tables"))
        << too_many.status().to_string();
    memory.keep(*pool);
  }
  const auto reopened = memory.attach().value();
  EXPECT_EQ(reopened->tables().size(), kMaxTables);
  EXPECT_EQ(reopened->tables().back().spec.name, "t2047");
}

TEST(Pool, HoldsUpToTheLimitsOfInstancesAndAliases) {
  Memory memory;
  auto pool = memory.format();
  for (uint32_t i = 1; i < kMaxInstances; ++i) {
    ASSERT_TRUE(pool->create_instance("model", "model@" + std::to_string(i + 1), 2).ok());
  }
  const auto too_many = pool->create_instance("model", "model@99", 2);
  EXPECT_EQ(too_many.status().code(), Code::kResourceExhausted);
  EXPECT_TRUE(contains(too_many.status(), "at most 64 instances")) << too_many.status().to_string();
  for (uint32_t i = 1; i < kMaxAliases; ++i)  // "model" is the first alias
    ASSERT_TRUE(pool->set_alias("a" + std::to_string(i), 1 + i % 5).ok());
  EXPECT_EQ(pool->set_alias("b", 1).code(), Code::kResourceExhausted);
  EXPECT_TRUE(pool->set_alias("a3", 7).ok()) << "an existing alias can be switched";
  EXPECT_EQ(pool->set_alias("a3", 70).code(), Code::kNotFound);
  const auto other = pool->create_instance("model", "model@1", 2);
  EXPECT_EQ(other.status().code(), Code::kAlreadyExists);
  memory.keep(*pool);
  const auto reopened = memory.attach().value();
  EXPECT_EQ(reopened->instances().size(), kMaxInstances);
  EXPECT_EQ(reopened->aliases().size(), kMaxAliases);
}

TEST(Pool, PartitionsOfAModelNeverChange) {
  Memory memory;
  auto pool = memory.format();
  const auto result = pool->create_instance("model", "model@2", 3);
  EXPECT_EQ(result.status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(contains(result.status(), "2 partitions, which never change"))
      << result.status().to_string();
}

}  // namespace
std::vector<std::string> frozen(const Pool& pool) {
  std::vector<std::string> names;
  for (const InstanceRecord& instance : pool.instances()) {
    if (instance.frozen) names.push_back(instance.name);
  }
  return names;
}

TEST(Versions, AnAliasSwitchesBackAndForthAndFreezesTheInstanceItLeaves) {
  Memory memory;
  auto pool = memory.format();
  ASSERT_TRUE(pool->create_instance("model", "model@2", 2).ok());
  EXPECT_EQ(pool->aliases()[0].instance, 1u) << "the model name still refers to the first instance";
  EXPECT_EQ(pool->aliases()[0].previous, 0u) << "there is nothing to go back to";
  ASSERT_TRUE(pool->set_alias("model", 2).ok());
  EXPECT_EQ(frozen(*pool), std::vector<std::string>{"model@1"});
  ASSERT_TRUE(pool->set_alias("model", 2).ok()) << "switching to the same instance changes nothing";
  EXPECT_EQ(pool->aliases()[0].previous, 1u);
  memory.reopen(&pool);
  EXPECT_EQ(pool->aliases()[0].instance, 2u);
  EXPECT_EQ(frozen(*pool), std::vector<std::string>{"model@1"});
  ASSERT_TRUE(pool->set_alias("model", pool->aliases()[0].previous).ok());
  EXPECT_EQ(pool->aliases()[0].instance, 1u);
  EXPECT_EQ(frozen(*pool), std::vector<std::string>{"model@2"});
  ASSERT_TRUE(pool->set_alias("model", pool->aliases()[0].previous).ok())
      << "switching forth again";
  EXPECT_EQ(pool->aliases()[0].instance, 2u);
  ASSERT_TRUE(pool->set_alias("kept", 2).ok());
  ASSERT_TRUE(pool->set_alias("model", 1).ok());
  EXPECT_EQ(frozen(*pool), std::vector<std::string>{}) << "another alias still refers to model@2";
}

TEST(Versions, UnlessFrozenRefusesAnInstanceThatTheAliasLeft) {
  Memory memory;
  auto pool = memory.format();
  ASSERT_TRUE(pool->create_instance("model", "model@2", 2).ok());
  ASSERT_TRUE(pool->set_alias("model", 2, /*unless_frozen=*/true).ok())
      << "no alias was switched away from it";
  ASSERT_TRUE(pool->set_alias("model", 1).ok());
  const auto refused = pool->set_alias("model", 2, /*unless_frozen=*/true);
  EXPECT_EQ(refused.code(), Code::kFailedPrecondition);
  EXPECT_EQ(refused.message(), "alias 'model' was switched away from 'model@2'");
  EXPECT_EQ(pool->aliases()[0].instance, 1u);
  EXPECT_TRUE(pool->set_alias("model", 2).ok());
}

TEST(Versions, NamesAreConsistentBesideAWriter) {
  Memory memory;
  auto pool = memory.format();
  std::atomic<bool> done{false};
  std::thread switcher([&] {
    uint32_t current = 1;
    for (int i = 2; i < 2000; ++i) {
      const auto created = pool->create_instance("model", "model@" + std::to_string(i), 2);
      if (!created.ok() || !pool->set_alias("model", created.value().id).ok() ||
          !pool->drop_instance(current).ok())
        ADD_FAILURE() << i;
      current = created.value().id;
    }
    done = true;
  });
  while (!done) {
    const Names names = pool->names();
    for (const AliasRecord& alias : names.aliases) {  // no alias until there are two instances
      EXPECT_TRUE(
          std::any_of(names.instances.begin(), names.instances.end(),
                      [&](const InstanceRecord& record) { return record.id == alias.instance; }))
          << alias.instance;
    }
  }
  switcher.join();
}

TEST(Versions, AnInstanceWithANameIsNotDropped) {
  Memory memory;
  auto pool = memory.format();
  const auto only = pool->drop_instance(1);
  EXPECT_EQ(only.code(), Code::kFailedPrecondition) << "the plain name refers to the only instance";
  EXPECT_TRUE(contains(only, "petps alias")) << only.to_string();
  ASSERT_TRUE(pool->create_instance("model", "model@2", 2).ok());
  EXPECT_EQ(pool->drop_instance(1).code(), Code::kFailedPrecondition);
  EXPECT_EQ(pool->drop_instance(9).code(), Code::kNotFound);
  ASSERT_TRUE(pool->set_alias("model", 2).ok());
  EXPECT_EQ(pool->drop_instance(2).code(), Code::kFailedPrecondition);
  ASSERT_TRUE(pool->drop_instance(1).ok());
  EXPECT_EQ(pool->aliases()[0].previous, 0u) << "there is nothing left to go back to";
  media::Flusher flusher(pool->medium());
  EXPECT_EQ(pool->write_progress({1, 0, 1, 1, 1, 1, {}, 0}, flusher).code(), Code::kNotFound);
  ASSERT_TRUE(pool->create_instance("model", "model@1", 2).ok());
  EXPECT_EQ(pool->instances().back().id, 3u) << "ids are never reused";
}

// Creates model after model in one pool: the space and progress of a dropped one go to the next
// one, before and after an open.
TEST(Versions, SpaceAndProgressOfDroppedInstancesAreReused) {
  Memory memory;
  auto pool = memory.format();
  std::vector<SlotRef> refs(3000);
  bool wait = false;
  uint64_t bytes = 0;
  for (uint32_t round = 1; round <= 40; ++round) {
    const uint32_t instance = round;
    if (round > 1) {
      ASSERT_TRUE(pool->create_instance("model", "model@" + std::to_string(round), 2).ok());
    }
    auto table_spec = spec("t", 4000);
    table_spec.instance = instance;
    const auto record = pool->create_table(table_spec);
    ASSERT_TRUE(record.ok()) << record.status().to_string();
    const uint64_t buckets = record.value().bucket_count * layout::kBucketBytes;
    for (uint64_t i = 0; i < buckets; ++i)
      ASSERT_EQ(*pool->at(record.value().bucket_offset + i), std::byte{0}) << "round " << round;
    std::memset(pool->at(record.value().bucket_offset), 0xEE, buckets);
    ASSERT_TRUE(pool->slots(record.value().id).allocate(refs, &wait).ok());
    EXPECT_TRUE(std::is_sorted(refs.begin(), refs.end()));
    for (const SlotRef ref : refs) ASSERT_TRUE(pool->slots(record.value().id).is_slot(ref));
    media::Flusher flusher(pool->medium());
    for (uint32_t partition = 0; partition < 2; ++partition)
      ASSERT_TRUE(pool->write_progress({instance, partition, round, 1, 1, 1, {}, 0}, flusher).ok());
    ASSERT_TRUE(pool->set_alias("model", instance).ok());
    if (round == 1) continue;
    const uint32_t old_table = pool->tables().front().id;
    ASSERT_TRUE(pool->drop_instance(instance - 1).ok());
    EXPECT_EQ(pool->all_progress().size(), 2u);
    if (round == 2) bytes = pool->medium().size();
    if (round % 3 == 0) {
      memory.reopen(&pool);
    } else {
      pool->free_table(old_table);
    }
    EXPECT_GT(pool->free_bytes(), 0u);
    ASSERT_EQ(pool->medium().size(), bytes) << "round " << round << " took fresh space";
  }
  EXPECT_TRUE(memory.read<uint64_t>(layout::kMap.progress() + 4 * 128) == 0)
      << "two instances never needed more than four pairs";
  std::vector<std::string> problems;
  pool->verify_metadata(&problems);
  EXPECT_TRUE(problems.empty()) << problems.front();
}

}  // namespace petps::pool
