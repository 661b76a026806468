// Room codec: rows between float32 and their stored bytes.
//
// Owns:        dtypes and their stored layout (FORMAT.md), encode, decode, row_bytes, checks for
//              finite values; the quantised rows of checkpoints (quantise.h).
// Never does:  allocate for the caller; know tables or keys.
// Called by:   client (widens the rows of a pull), bindings (load, push, export, checkpoints).
// Invariants:  decode(encode(x)) is bit-exact for f32; the layout of a Dtype never changes; every
//              SIMD path gives the scalar path's bits.
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
  // float32 scale, float32 zero, dim x uint8: value = zero + scale * code (row-wise asymmetric)
  kInt8 = 3,
};

base::Result<Dtype> parse_dtype(std::string_view name);  // "f32", "f16", "bf16", "int8"
std::string_view dtype_name(Dtype dtype);
bool is_dtype(uint8_t number);

// Return the bytes of one stored row.
size_t row_bytes(Dtype dtype, uint32_t dim);

// Encode rows: float32[n, dim] -> out: n * row_bytes(dtype, dim).
void encode(Dtype dtype, const float* rows, size_t n, uint32_t dim, std::byte* out);
// Decode rows: n stored rows -> out: float32[n, dim]. `rows` may be unaligned.
void decode(Dtype dtype, const std::byte* rows, size_t n, uint32_t dim, float* out);
// Return the index of the first row with a NaN or infinity, or n.
size_t first_not_finite(const float* rows, size_t n, uint32_t dim);
// Return the index of the first stored row that may decode to a NaN or infinity, or n. This also
// finds finite rows that `dtype` could not represent. An int8 row counts if its highest code
// would decode to one. Rows of f32 must be 4-byte aligned; others may be unaligned.
size_t first_not_finite_stored(Dtype dtype, const std::byte* rows, size_t n, uint32_t dim);

}  // namespace petps::codec
