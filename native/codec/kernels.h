// The loops behind codec.h, one set per instruction set. Included by codec's own files, its tests and its benchmarks only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace petps::codec {

enum class Level : uint8_t {
  kScalar,
  kAvx2,
  kAvx512
};  // kAvx2 includes F16C; kAvx512 is both and F, BW, VL

const char* level_name(Level level);
bool is_supported(Level level);  // by this processor and its operating system

// ASSUMPTIONS: pointers of bytes may be unaligned, pointers of floats are 4-byte aligned; ranges do not overlap.
// ERRORS: none; every bit pattern has a defined outcome (FORMAT.md), the same at every Level.
struct Kernels {
  void (*encode_f16)(const float* values, size_t count, std::byte* out);
  void (*decode_f16)(const std::byte* values, size_t count, float* out);
  void (*encode_bf16)(const float* values, size_t count, std::byte* out);
  void (*decode_bf16)(const std::byte* values, size_t count, float* out);
  void (*encode_int8)(const float* rows, size_t n, uint32_t dim, std::byte* out);
  void (*decode_int8)(const std::byte* rows, size_t n, uint32_t dim, float* out);
  size_t (*first_not_finite)(const float* values, size_t count);  // index of the value, or count
};

// ASSUMPTIONS: is_supported(level).
const Kernels& kernels_of(Level level);
// What codec.h runs: those of the highest supported level. Chosen once.
const Kernels& best_kernels();

extern const Kernels kScalarKernels;
extern const Kernels kAvx2Kernels;
// `kernels` with the loops replaced that 512 bits make faster.
Kernels with_avx512(Kernels kernels);

}  // namespace petps::codec
