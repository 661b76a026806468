// Checksums of metadata: superblocks, progress records, journals, frames. Rows use crc32c.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/hash.h"

namespace petps::base {

// XXH3-64 of `size` bytes, seed 0. Never change: pools and frames hold it.
inline uint64_t checksum64(const void* data, size_t size) { return XXH3_64bits(data, size); }

// The low 32 bits of checksum64.
inline uint32_t checksum32(const void* data, size_t size) {
  return static_cast<uint32_t>(checksum64(data, size));
}

}  // namespace petps::base
