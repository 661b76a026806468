// Requests of Python's doors as frames of room wire.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "wire/wire.h"

namespace petps::bindings {

// What a push says of its table.
struct PushedTable {
  std::string name;
  uint32_t id = 0;
  uint32_t instance = 0;
  uint32_t dim = 0;
  uint32_t dtype = 0;
  uint32_t row_bytes = 0;
};

// `sections`: table id and keys, 8 little-endian bytes each. `trace`: a trace id and a span id, or
// empty.
wire::Frame encode_pull_call(uint32_t instance,
                             const std::vector<std::pair<uint32_t, py::bytes>>& sections,
                             uint64_t min_version, uint32_t wait_ms, const py::bytes& trace);
// Empty `rows`: delete all keys. `deleted`: empty, or a bit for each key to delete.
wire::Frame encode_push_call(const PushedTable& table, const py::bytes& keys, const py::bytes& rows,
                             const py::bytes& deleted, uint64_t stamp);
wire::Frame encode_hot_keys_call(uint32_t table, const py::bytes& keys);

}  // namespace petps::bindings
