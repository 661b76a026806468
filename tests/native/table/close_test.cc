// A close while a reader still holds rows: no slot is lost, and no unclean pool is marked clean.
#include <gtest/gtest.h>

#include "model.h"
#include "rig.h"
#include "tests/native/media/temporary_folder.h"

namespace petps::table {
namespace {

using base::Code;
using testing::Change;

class Close : public ::testing::Test {
 protected:
  Close() {
    options_.pool.media.path = folder_.path("close.pool");
    options_.pool.media.durability = media::Durability::kProcess;
    options_.pool.media.reserve_bytes = uint64_t{1} << 30;
    options_.pool.unit_bytes = pool::kTestUnitBytes;
    options_.background = false;
    tables_ = Tables::create(options_).value();
    EXPECT_TRUE(tables_->pool().create_instance("model", "model@1", 1).ok());
    table_ = tables_->create_table(testing::spec("rows", 1000)).value();
    write(1);
  }
  void write(uint64_t value) {
    std::vector<Change> changes;
    for (uint64_t key = 0; key < kRows; ++key) changes.push_back({key, value, false});
    EXPECT_TRUE(testing::apply(*table_, changes).ok());
  }
  // Count the slots that are neither free, nor in use, nor retired.
  uint64_t lost_slots() {
    const TableStatus status = tables_->tables().front()->status();
    return status.slots - status.free_slots - status.rows - status.retired_slots;
  }
  void reopen() {
    table_.reset();
    tables_.reset();
    auto opened = Tables::open(options_);
    ASSERT_TRUE(opened.ok()) << opened.status().to_string();
    tables_ = std::move(opened).value();
    tables_->walk();
  }

  static constexpr uint64_t kRows = 500;
  petps::testing_support::TemporaryFolder folder_;
  TablesOptions options_;
  std::unique_ptr<Tables> tables_;
  TablePointer table_;
};

TEST_F(Close, WithoutReadersLeavesACleanPool) {
  write(2);
  ASSERT_TRUE(tables_->close().ok());
  reopen();
  EXPECT_TRUE(tables_->pool().was_clean());
  EXPECT_EQ(lost_slots(), 0u);
}

TEST_F(Close, FailsAndLeavesAnUncleanPoolIfAPinHoldsRows) {
  epoch::Reader* const reader = tables_->epochs().lease();
  epoch::Pin pin = reader->pin();
  write(2);
  ASSERT_GT(table_->status().retired_slots, 0u);
  const base::Status closed = tables_->close();
  EXPECT_EQ(closed.code(), Code::kFailedPrecondition) << closed.to_string();
  EXPECT_NE(closed.message().find("a read in progress holds rows that were replaced"),
            std::string_view::npos)
      << closed.to_string();
  pin.drop();
  tables_->epochs().release(reader);
  reopen();
  EXPECT_FALSE(tables_->pool().was_clean());
  EXPECT_EQ(lost_slots(), 0u);
  testing::expect_clean(*tables_);
  EXPECT_EQ(tables_->verify().unreachable_slots, 0u);
  ASSERT_TRUE(tables_->close().ok());
}

// The rows that a pin holds may belong to a dropped table; its extents stay its own until the
// next open.
TEST_F(Close, FailsIfAPinHoldsRowsOfADroppedTable) {
  const uint32_t other = tables_->pool().create_instance("model", "model@2", 1).value().id;
  ASSERT_TRUE(tables_->switch_alias("model", other).ok());
  epoch::Reader* const reader = tables_->epochs().lease();
  epoch::Pin pin = reader->pin();
  write(2);
  ASSERT_TRUE(tables_->drop_instance(1).ok());
  EXPECT_EQ(tables_->close().code(), Code::kFailedPrecondition);
  pin.drop();
  tables_->epochs().release(reader);
  reopen();
  EXPECT_TRUE(tables_->tables().empty());
  EXPECT_GT(tables_->pool().free_bytes(), 0u);
  ASSERT_TRUE(tables_->close().ok());
}

}  // namespace
}  // namespace petps::table
