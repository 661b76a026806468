// A table filled with rows whose content follows from key and turn, on the medium that is asked for.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "table/table.h"

namespace petps::bench {

struct TableShape {
  std::string medium = "dram";  // dram, file (a new file in `folder`, removed at the end)
  std::string durability = "process";
  std::string folder = "build/bench";
  uint64_t rows = 0;
  uint64_t capacity = 0;  // 0: rows, so that the index is at its load of 0.8
  uint32_t dim = 128;     // f32
};

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
  static uint64_t key(uint64_t row);
  static void fill(uint64_t key, uint64_t turn, std::byte* row, uint32_t row_bytes);
  static bool whole(uint64_t key, const std::byte* row, uint32_t row_bytes);
  // Applies rows [from, to) anew with content of `turn`.
  void apply(uint64_t from, uint64_t to, uint64_t turn);

 private:
  TableShape shape_;
  std::string path_;
  std::unique_ptr<table::Tables> tables_;
  table::Table* table_ = nullptr;
};

// Ends the program with a message; a bench has nobody to hand a Status to.
[[noreturn]] void fail(const std::string& why);
void check_ok(const base::Status& status);
template <typename T>
T value_of(base::Result<T> result) {
  check_ok(result.status());
  return std::move(result).value();
}

}  // namespace petps::bench
