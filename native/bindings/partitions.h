// Lists of partitions from Python.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "wire/wire.h"

namespace petps::bindings {

// Return the list as a set. Raise INVALID_ARGUMENT for a number that no partition can have.
inline wire::PartitionSet partition_set(const std::vector<uint32_t>& partitions) {
  wire::PartitionSet set{};
  for (const uint32_t partition : partitions) {
    if (partition >= wire::kMaxPartitions)
      invalid("partition " + std::to_string(partition) + " is none of 0 to " +
              std::to_string(wire::kMaxPartitions - 1));
    set[partition / 64] |= uint64_t{1} << (partition % 64);
  }
  return set;
}

}  // namespace petps::bindings
