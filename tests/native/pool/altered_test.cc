// Superblocks that someone altered and sealed again: a checksum does not tell who wrote it.
#include <cstring>
#include <functional>

#include "memory_pool.h"
#include "pool/slots.h"

namespace petps::pool {
namespace {

using base::Code;
using testing_support::contains;
using testing_support::Memory;

// Change both copies of the superblock, and compute their checksums again.
void alter(Memory& memory, const std::function<void(layout::Superblock&, layout::TableEntry&,
                                                    layout::InstanceEntry&)>& change) {
  for (const int copy : {0, 1}) {
    const uint64_t at = layout::kMap.superblock(copy);
    auto header = memory.read<layout::Superblock>(at);
    const uint64_t table_at = at + sizeof header;
    const uint64_t instance_at = table_at + header.table_count * sizeof(layout::TableEntry);
    auto table = memory.read<layout::TableEntry>(table_at);
    auto instance = memory.read<layout::InstanceEntry>(instance_at);
    change(header, table, instance);
    memory.write(instance_at, instance);
    memory.write(table_at, table);
    header.checksum = 0;
    const uint64_t parts[2] = {
        base::checksum64(&header, sizeof header),
        base::checksum64(memory.base() + table_at, header.length - sizeof header)};
    header.checksum = base::checksum64(parts, sizeof parts);
    memory.write(at, header);
  }
}

struct Altered {
  const char* what;
  const char* expected;
  std::function<void(layout::Superblock&, layout::TableEntry&, layout::InstanceEntry&)> change;
};

TEST(Altered, ASealedSuperblockWithImpossibleRecordsIsRefused) {
  using Header = layout::Superblock;
  using Table = layout::TableEntry;
  using Instance = layout::InstanceEntry;
  const std::vector<Altered> cases = {
      {"row bytes", "a row of 0 bytes", [](Header&, Table& t, Instance&) { t.row_bytes = 0; }},
      {"long rows", "is impossible", [](Header&, Table& t, Instance&) { t.row_bytes = 1 << 30; }},
      {"dim", "dim 0 is outside", [](Header&, Table& t, Instance&) { t.dim = 0; }},
      {"capacity", "capacity must be", [](Header&, Table& t, Instance&) { t.capacity = 0; }},
      {"much", "capacity must be", [](Header&, Table& t, Instance&) { t.capacity = ~uint64_t{0}; }},
      {"table name", "may hold only", [](Header&, Table& t, Instance&) { t.name[0] = '/'; }},
      {"table id", "another one's id", [](Header&, Table& t, Instance&) { t.id = 0; }},
      {"high id", "another one's id", [](Header& h, Table& t, Instance&) { t.id = h.next_table; }},
      {"owner", "belongs to no instance", [](Header&, Table& t, Instance&) { t.instance = 9; }},
      {"buckets", "impossible", [](Header&, Table& t, Instance&) { t.bucket_count = 0; }},
      {"feed", "impossible", [](Header&, Table& t, Instance&) { t.feed = 2; }},
      {"partitions", "0 partitions", [](Header&, Table&, Instance& i) { i.partitions = 0; }},
      {"many", "9999 partitions", [](Header&, Table&, Instance& i) { i.partitions = 9999; }},
      {"instance id", "another one's id", [](Header&, Table&, Instance& i) { i.id = 0; }},
  };
  for (const Altered& altered : cases) {
    Memory memory;
    memory.format_with_table();
    alter(memory, [](Header&, Table&, Instance&) {});
    ASSERT_TRUE(memory.attach().ok()) << "the pool opens without a change";
    alter(memory, altered.change);
    const auto pool = memory.attach();
    ASSERT_EQ(pool.status().code(), Code::kDataLoss) << altered.what;
    EXPECT_TRUE(contains(pool.status(), altered.expected)) << pool.status().to_string();
    EXPECT_TRUE(contains(pool.status(), "restore it from a base")) << pool.status().to_string();
  }
}

// The header of what is no slot is empty, whatever the ref.
TEST(Altered, ARefThatIsNoSlotHasAnEmptyHeader) {
  Memory memory;
  auto pool = memory.format();
  const TableRecord record = pool->create_table(testing_support::spec("t", 100)).value();
  const Slots& slots = pool->slots(record.id);
  for (const uint64_t ref : {uint64_t{1}, record.bucket_offset, record.bucket_offset + 1,
                             pool->medium().size(), uint64_t{1} << 62, ~uint64_t{0}}) {
    const SlotHeader header = *slots.header(ref);
    EXPECT_EQ(header.key + header.stamp + header.crc, 0u) << ref;
  }
}

}  // namespace
}  // namespace petps::pool
