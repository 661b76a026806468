// A pool over memory that outlives it, so that tests can reopen it, copy it and corrupt it.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "pool/layout.h"
#include "pool/pool.h"

namespace petps::pool::testing_support {

class Memory {
 public:
  static constexpr uint64_t kReserve = uint64_t{16} << 20;

  explicit Memory(uint64_t reserve = kReserve) : reserve_(reserve), bytes_(reserve + 4096) {}

  std::byte* base() {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    return bytes_.data() + (4096 - address % 4096) % 4096;
  }
  // Make a new pool of 64 KiB units with one instance "model@1".
  std::unique_ptr<Pool> format(uint32_t partitions = 2) {
    used = layout::kMap.metadata_bytes;
    auto pool = Pool::format(medium(), kTestUnitBytes);
    EXPECT_TRUE(pool.ok()) << pool.status().to_string();
    EXPECT_TRUE(pool.value()->create_instance("model", "model@1", partitions).ok());
    return std::move(pool).value();
  }
  // Make a new pool with one table "t", and forget the process that made it.
  void format_with_table(uint64_t capacity = 100);
  base::Result<std::unique_ptr<Pool>> attach() { return Pool::attach(medium()); }
  // Open the pool again, as another process.
  void reopen(std::unique_ptr<Pool>* pool) {
    keep(**pool);
    *pool = attach().value();
  }
  // Make the pool's present length the length of the next open.
  void keep(const Pool& pool) { used = pool.medium().size(); }
  std::unique_ptr<media::Media> medium() {
    auto medium = media::Media::borrow(base(), used, reserve_, nullptr, kind);
    medium->set_durability(durability);
    return medium;
  }

  template <typename T>
  T read(uint64_t offset) {
    T value;
    std::memcpy(&value, base() + offset, sizeof value);
    return value;
  }
  template <typename T>
  void write(uint64_t offset, const T& value) {
    std::memcpy(base() + offset, &value, sizeof value);
  }

  uint64_t used = 0;
  media::Kind kind = media::Kind::kDram;
  media::Durability durability = media::Durability::kPower;  // of a file

 private:
  uint64_t reserve_;
  std::vector<std::byte> bytes_;
};

inline TableSpec spec(const std::string& name, uint64_t capacity, uint32_t row_bytes = 64) {
  TableSpec s;
  s.name = name;
  s.instance = 1;
  s.dim = 16;
  s.row_bytes = row_bytes;
  s.capacity = capacity;
  return s;
}

inline void Memory::format_with_table(uint64_t capacity) {
  auto pool = format();
  EXPECT_TRUE(pool->create_table(spec("t", capacity)).ok());
  keep(*pool);
}

inline bool contains(const base::Status& status, const std::string& text) {
  return status.message().find(text) != std::string_view::npos;
}

}  // namespace petps::pool::testing_support
