// A table on a chosen medium, filled with rows. The content of a row is a function of its key and
// of `turn`, which numbers the rewrites.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "bench/common/arguments.h"
#include "table/table.h"

namespace petps::bench {

struct TableShape {
  std::string medium = "dram";  // dram or file: a new file in `folder`, deleted at the end
  std::string durability = "process";
  std::string folder = "build/bench";
  uint64_t rows = 0;
  uint64_t capacity = 0;  // 0: the same as rows, so that the index is at its load of 0.8
  uint32_t dim = 128;     // f32 values
};

// Read the arguments rows (2 M), dim, medium (a file), folder and durability.
TableShape read_shape(Arguments& arguments);

class LoadedTable {
 public:
  explicit LoadedTable(const TableShape& shape);
  ~LoadedTable();
  LoadedTable(const LoadedTable&) = delete;
  LoadedTable& operator=(const LoadedTable&) = delete;

  table::Tables& tables() { return *tables_; }
  table::Table& table() { return *table_; }
  uint64_t rows() const { return shape_.rows; }
  uint32_t row_bytes() const { return shape_.dim * 4; }
  // Return the key of row number `row`; different rows have different keys.
  static uint64_t key(uint64_t row);
  // Write the content of `key` in rewrite `turn` into `row`.
  static void fill(uint64_t key, uint64_t turn, std::byte* row, uint32_t row_bytes);
  // Return whether `row` holds a row of `key` that is not torn.
  static bool whole(uint64_t key, const std::byte* row, uint32_t row_bytes);
  // Rewrite rows [from, to) with the content of `turn`.
  void apply(uint64_t from, uint64_t to, uint64_t turn);

 private:
  TableShape shape_;
  std::string path_;
  std::unique_ptr<table::Tables> tables_;
  table::Table* table_ = nullptr;
};

// Write every dirty page of the folder's file system to the disk. The first store to a clean page
// is expensive, so a measurement of updates must say which pages are dirty when it begins.
void clean_pages(const std::string& folder);

// Print a message and exit with status 1. A bench has no caller that could handle a Status.
[[noreturn]] void fail(const std::string& why);
// Fail if `status` is an error.
void check_ok(const base::Status& status);
// Return the value of `result`, or fail if it is an error.
template <typename T>
T value_of(base::Result<T> result) {
  check_ok(result.status());
  return std::move(result).value();
}

}  // namespace petps::bench
