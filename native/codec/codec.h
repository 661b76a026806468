// Room codec: rows between float32 and their stored bytes.
//
// Owns:        dtypes and their stored layout (FORMAT.md), encode, decode, row_bytes, finite checks; the quantised rows of
//              checkpoints (quantise.h).
// Never does:  allocate for the caller; know tables or keys.
// Called by:   client (widens what it pulled), bindings (load, push, export, checkpoints).
// Invariants:  decode(encode(x)) is bit-exact for f32; one layout per Dtype for ever; every SIMD path gives the scalar path's bits.
// Threads:     pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/status.h"

namespace petps::codec {

enum class Dtype : uint8_t {  // never renumber: stored in pools, sent on the wire
  kF32 = 0,                   // dim x float32
  kF16 = 1,                   // dim x IEEE half
  kBf16 = 2,                  // dim x bfloat16, round to nearest even
  kInt8 =
      3,  // float32 scale, float32 zero, dim x uint8: value = zero + scale * code (row-wise asymmetric)
};

base::Result<Dtype> parse_dtype(std::string_view name);  // "f32", "f16", "bf16", "int8"
std::string_view dtype_name(Dtype dtype);
bool is_dtype(uint8_t number);

// Bytes of one stored row.
size_t row_bytes(Dtype dtype, uint32_t dim);

// rows: float32[n, dim] -> out: n * row_bytes(dtype, dim).
void encode(Dtype dtype, const float* rows, size_t n, uint32_t dim, std::byte* out);
// rows: n stored rows -> out: float32[n, dim]. `rows` may be unaligned.
void decode(Dtype dtype, const std::byte* rows, size_t n, uint32_t dim, float* out);
// Index of the first row with a NaN or infinity, or n.
size_t first_not_finite(const float* rows, size_t n, uint32_t dim);
// Index of the first stored row that decodes to a NaN or infinity, or n: also finite rows that `dtype` cannot represent.
// rows of f32 are 4-byte aligned, others may be unaligned.
size_t first_not_finite_stored(Dtype dtype, const std::byte* rows, size_t n, uint32_t dim);

}  // namespace petps::codec
