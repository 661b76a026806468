// CRC-32C (Castagnoli): the checksum of a row in its slot header, and of delta chunks.
//
// Three code paths, one chosen at run time: 512-bit carry-less multiply, 128-bit carry-less
// multiply, and the crc32 instruction, which the baselines (x86-64-v2, armv8-a+crc) always have. On
// aarch64 there is only the last. bench/micro/crc32c.cc has the costs per 512-byte row. Debian 12
// packages no C++ library for CRC-32C.
#pragma once

#include <cstddef>
#include <cstdint>

namespace petps::base {

// Return the CRC-32C of `size` bytes, as in RFC 3720 (of "123456789": 0xE3069283; of no bytes:
// 0). Never change: slot headers in pools store its values.
uint32_t crc32c(const void* data, size_t size);

// Return the CRC-32C of some earlier bytes followed by these `size` bytes. `crc` is the CRC-32C
// of the earlier bytes.
uint32_t crc32c_extend(uint32_t crc, const void* data, size_t size);

// Copy `size` bytes past the cache and return their CRC-32C, loading each byte once. `to` must be
// line-aligned, `size` a multiple of 64 and at least 256.
using StreamWithCrc32c = uint32_t (*)(std::byte* to, const std::byte* from, size_t size);
// Return the function above, or null if the processor lacks the registers for it.
StreamWithCrc32c stream_with_crc32c();

// The code paths one by one, for tests and benches. The caller must check cpu_features() first.
namespace crc32c_paths {
uint32_t instruction(uint32_t crc, const void* data, size_t size);
#ifdef __x86_64__
uint32_t pclmul(uint32_t crc, const void* data, size_t size);      // needs pclmul
uint32_t vpclmulqdq(uint32_t crc, const void* data, size_t size);  // needs vpclmulqdq
#endif
}  // namespace crc32c_paths

}  // namespace petps::base
