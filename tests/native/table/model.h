// A slow, obvious model of a table, and rows that both sides can check. A row contains its key
// and its value, so a test can detect a torn or foreign row without the model.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "table/table.h"

namespace petps::table::testing {

// Write a row of `bytes` (a multiple of 8): the first 8-byte word is the value, and every other
// word mixes key, value and position.
inline void write_row(uint64_t key, uint64_t value, std::byte* row, size_t bytes) {
  for (size_t i = 0; i < bytes / 8; ++i) {
    const uint64_t word =
        i == 0 ? value : (key * 0x9E3779B97F4A7C15 ^ value * 0xC2B2AE3D27D4EB4F) + i;
    std::memcpy(row + i * 8, &word, 8);
  }
}

// Return true and the value if the row is whole and belongs to this key.
inline bool read_row(uint64_t key, const std::byte* row, size_t bytes, uint64_t* value) {
  std::memcpy(value, row, 8);
  std::vector<std::byte> expected(bytes);
  write_row(key, *value, expected.data(), bytes);
  return std::memcmp(expected.data(), row, bytes) == 0;
}

using Model = std::map<uint64_t, uint64_t>;  // key -> value

struct Change {
  uint64_t key;
  uint64_t value;
  bool erase;
};

inline base::Result<ApplyReport> apply(Table& table, const std::vector<Change>& changes,
                                       uint32_t threads = 1) {
  const size_t bytes = table.record().spec.row_bytes;
  std::vector<uint64_t> keys;
  std::vector<uint8_t> deleted;
  std::vector<std::byte> rows(changes.size() * bytes);
  for (size_t i = 0; i < changes.size(); ++i) {
    keys.push_back(changes[i].key);
    deleted.push_back(changes[i].erase ? 1 : 0);
    if (!changes[i].erase)
      write_row(changes[i].key, changes[i].value, rows.data() + i * bytes, bytes);
  }
  Batch batch;
  batch.keys = keys;
  batch.rows = rows.data();
  batch.deleted = deleted;
  batch.threads = threads;
  return table.apply(batch);
}

inline void apply(Model* model, const std::vector<Change>& changes) {
  for (const Change& change : changes) {
    if (change.erase) {
      model->erase(change.key);
    } else {
      (*model)[change.key] = change.value;
    }
  }
}

// Compare the table's answers for `keys` with the model. Return a message for the first
// difference, or an empty string.
inline std::string compare(const Table& table, const Model& model,
                           const std::vector<uint64_t>& keys) {
  std::vector<const std::byte*> rows(keys.size());
  table.lookup(keys, rows.data());
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto known = model.find(keys[i]);
    const std::string name = "key " + std::to_string(keys[i]);
    if (known == model.end()) {
      if (rows[i] != nullptr) return name + " is there and should not be";
      continue;
    }
    if (rows[i] == nullptr) return name + " is missing";
    uint64_t value;
    if (!read_row(keys[i], rows[i], table.record().spec.row_bytes, &value))
      return name + " has a torn row";
    if (value != known->second) return name + " has an old row";
  }
  return "";
}

}  // namespace petps::table::testing
