#include "codec/codec.h"

#include <cstring>
#include <string>

#include "codec/kernels.h"
#include "codec/values.h"

namespace petps::codec {
namespace {

constexpr std::string_view kNames[] = {"f32", "f16", "bf16", "int8"};  // by Dtype number

// Return whether any of `count` 16-bit values is a NaN or an infinity: all exponent bits are set.
bool has_not_finite_half(const std::byte* values, size_t count, uint16_t exponent_mask) {
  bool has_one = false;
  for (size_t i = 0; i < count; ++i)
    has_one |= (load<uint16_t>(values + 2 * i) & exponent_mask) == exponent_mask;
  return has_one;
}

bool may_decode_to_not_finite(Dtype dtype, const std::byte* row, uint32_t dim) {
  switch (dtype) {
    case Dtype::kF32:
      return false;  // the caller uses first_not_finite
    case Dtype::kF16:
      return has_not_finite_half(row, dim, 0x7c00u);
    case Dtype::kBf16:
      return has_not_finite_half(row, dim, 0x7f80u);
    case Dtype::kInt8:
      const auto scale = load<float>(row);
      const auto zero = load<float>(row + 4);
      return !is_finite_value(scale * 255.0f) || !is_finite_value(zero + scale * 255.0f) ||
             !is_finite_value(zero);
  }
  return true;
}

}  // namespace

base::Result<Dtype> parse_dtype(std::string_view name) {
  for (uint8_t i = 0; i < std::size(kNames); ++i) {
    if (kNames[i] == name) return static_cast<Dtype>(i);
  }
  return base::Status(base::Code::kInvalidArgument,
                      "dtype '" + std::string(name) + "' is unknown: use f32, f16, bf16 or int8");
}

std::string_view dtype_name(Dtype dtype) {
  const auto number = static_cast<uint8_t>(dtype);
  return is_dtype(number) ? kNames[number] : "unknown";
}

bool is_dtype(uint8_t number) { return number < std::size(kNames); }

size_t row_bytes(Dtype dtype, uint32_t dim) {
  switch (dtype) {
    case Dtype::kF32:
      return size_t{4} * dim;
    case Dtype::kF16:
    case Dtype::kBf16:
      return size_t{2} * dim;
    case Dtype::kInt8:
      return kGridBytes + dim;
  }
  return 0;
}

void encode(Dtype dtype, const float* rows, size_t n, uint32_t dim, std::byte* out) {
  if (n == 0 || dim == 0) return;
  switch (dtype) {
    case Dtype::kF32:
      std::memcpy(out, rows, n * dim * sizeof(float));
      return;
    case Dtype::kF16:
      return best_kernels().encode_f16(rows, n * dim, out);
    case Dtype::kBf16:
      return best_kernels().encode_bf16(rows, n * dim, out);
    case Dtype::kInt8:
      return best_kernels().encode_int8(rows, n, dim, out);
  }
}

void decode(Dtype dtype, const std::byte* rows, size_t n, uint32_t dim, float* out) {
  if (n == 0 || dim == 0) return;
  switch (dtype) {
    case Dtype::kF32:
      std::memcpy(out, rows, n * dim * sizeof(float));
      return;
    case Dtype::kF16:
      return best_kernels().decode_f16(rows, n * dim, out);
    case Dtype::kBf16:
      return best_kernels().decode_bf16(rows, n * dim, out);
    case Dtype::kInt8:
      return best_kernels().decode_int8(rows, n, dim, out);
  }
}

size_t first_not_finite(const float* rows, size_t n, uint32_t dim) {
  if (n == 0 || dim == 0) return n;
  const size_t value = best_kernels().first_not_finite(rows, n * dim);
  return value / dim;
}

size_t first_not_finite_stored(Dtype dtype, const std::byte* rows, size_t n, uint32_t dim) {
  if (n == 0 || dim == 0) return n;
  if (dtype == Dtype::kF32) {
    return best_kernels().first_not_finite(reinterpret_cast<const float*>(rows), n * dim) / dim;
  }
  const size_t bytes = row_bytes(dtype, dim);
  for (size_t i = 0; i < n; ++i) {
    if (may_decode_to_not_finite(dtype, rows + i * bytes, dim)) return i;
  }
  return n;
}

}  // namespace petps::codec
