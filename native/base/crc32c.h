// CRC-32C (Castagnoli): the checksum of a row in its slot header, and of delta chunks.
//
// Three code paths, chosen once at run time: 512-bit carry-less multiply, 128-bit carry-less
// multiply, and the crc32 instruction, which the baseline (x86-64-v2) always has. Costs per
// 512-byte row are in bench/micro/crc32c.cc. Debian 12 packages no C++ CRC-32C library.
#pragma once

#include <cstddef>
#include <cstdint>

namespace petps::base {

// CRC-32C of `size` bytes, as in RFC 3720 (of "123456789": 0xE3069283; of nothing: 0).
// Never change: slot headers in pools hold it.
uint32_t crc32c(const void* data, size_t size);

// The CRC-32C of a's bytes followed by these, where `crc` is crc32c of a.
uint32_t crc32c_extend(uint32_t crc, const void* data, size_t size);

// Each code path by itself, for tests and benches; the caller asks cpu_features() first.
// Copies past the cache and returns the CRC-32C: each byte is loaded once. `to` is line-aligned, size
// a multiple of 64 and at least 256. Null where the processor lacks the registers for it.
using StreamWithCrc32c = uint32_t (*)(std::byte* to, const std::byte* from, size_t size);
StreamWithCrc32c stream_with_crc32c();

namespace crc32c_paths {
uint32_t instruction(uint32_t crc, const void* data, size_t size);
uint32_t pclmul(uint32_t crc, const void* data, size_t size);      // needs pclmul
uint32_t vpclmulqdq(uint32_t crc, const void* data, size_t size);  // needs vpclmulqdq
}  // namespace crc32c_paths

}  // namespace petps::base
