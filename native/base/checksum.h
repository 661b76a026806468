// Checksums of metadata: superblocks, progress records, journals, frames. Rows use crc32c.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/hash.h"

namespace petps::base {

// Return XXH3-64 of `size` bytes with seed 0. Never change: pools and frames store its values.
inline uint64_t checksum64(const void* data, size_t size) { return XXH3_64bits(data, size); }

// Return the low 32 bits of checksum64.
inline uint32_t checksum32(const void* data, size_t size) {
  return static_cast<uint32_t>(checksum64(data, size));
}

}  // namespace petps::base
