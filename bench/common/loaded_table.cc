#include "bench/common/loaded_table.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "bench/common/random.h"

namespace petps::bench {

namespace {
constexpr uint64_t kBatch = 32768;
}

void clean_pages(const std::string& folder) {
  const int file = open(folder.c_str(), O_RDONLY);
  if (file < 0 || syncfs(file) != 0) fail("cannot sync " + folder);
  close(file);
}

void fail(const std::string& why) {
  std::fprintf(stderr, "bench: %s\n", why.c_str());
  std::exit(1);
}

void check_ok(const base::Status& status) {
  if (!status.ok()) fail(status.to_string());
}

TableShape read_shape(Arguments& arguments) {
  TableShape shape;
  shape.rows = arguments.number("rows", 2'000'000);
  shape.dim = arguments.small_number("dim", shape.dim);
  shape.medium = arguments.text("medium", "file");
  shape.folder = arguments.text("folder", shape.folder);
  shape.durability = arguments.text("durability", shape.durability);
  return shape;
}

uint64_t LoadedTable::key(uint64_t row) { return mix(row + 1); }

void LoadedTable::fill(uint64_t key, uint64_t turn, std::byte* row, uint32_t row_bytes) {
  const uint64_t step = mix(key ^ turn) | 1;
  uint64_t word = key;
  for (uint32_t at = 0; at < row_bytes; at += 8, word += step) std::memcpy(row + at, &word, 8);
}

bool LoadedTable::whole(uint64_t key, const std::byte* row, uint32_t row_bytes) {
  uint64_t first, second, word;
  std::memcpy(&first, row, 8);
  std::memcpy(&second, row + 8, 8);
  if (first != key) return false;
  for (uint32_t at = 0; at < row_bytes; at += 8) {
    std::memcpy(&word, row + at, 8);
    if (word != first + (second - first) * (at / 8)) return false;
  }
  return true;
}

LoadedTable::LoadedTable(const TableShape& shape) : shape_(shape) {
  table::TablesOptions options;
  if (shape.medium == "file") {
    path_ = shape.folder + "/bench-" + std::to_string(getpid()) + ".pool";
    options.pool.media.path = path_;
  } else if (shape.medium != "dram") {
    fail("medium '" + shape.medium + "' is neither dram nor file");
  }
  options.pool.media.durability =
      shape.durability == "power" ? media::Durability::kPower : media::Durability::kProcess;
  tables_ = value_of(table::Tables::create(options));
  const auto instance = value_of(tables_->pool().create_instance("bench", "bench@1", 1));
  if (row_bytes() % 8 != 0) fail("dim " + std::to_string(shape.dim) + " is odd: give an even one");
  pool::TableSpec spec;
  spec.name = "rows";
  spec.instance = instance.id;
  spec.dim = shape.dim;
  spec.row_bytes = row_bytes();
  spec.capacity = std::max(shape.capacity, shape.rows);
  table_ = value_of(tables_->create_table(spec)).get();
  apply(0, shape.rows, 0);
}

LoadedTable::~LoadedTable() {
  tables_.reset();
  if (!path_.empty()) unlink(path_.c_str());
}

void LoadedTable::apply(uint64_t from, uint64_t to, uint64_t turn) {
  std::vector<uint64_t> keys;
  std::vector<std::byte> rows(kBatch * row_bytes());
  for (uint64_t begin = from; begin < to; begin += kBatch) {
    const uint64_t n = std::min(kBatch, to - begin);
    keys.resize(n);
    for (uint64_t i = 0; i < n; ++i) {
      keys[i] = key(begin + i);
      fill(keys[i], turn, rows.data() + i * row_bytes(), row_bytes());
    }
    const auto report = value_of(table_->apply({keys, rows.data(), {}, 0}));
    if (report.refused != 0) fail("the table refused keys of its own capacity");
  }
}

}  // namespace petps::bench
