#include "codec/kernels.h"
#include "codec/values.h"

namespace petps::codec {
namespace {

void encode_f16(const float* values, size_t count, std::byte* out) {
  for (size_t i = 0; i < count; ++i) store(out + 2 * i, f16_of(values[i]));
}

void decode_f16(const std::byte* values, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = f16_value(load<uint16_t>(values + 2 * i));
}

void encode_bf16(const float* values, size_t count, std::byte* out) {
  for (size_t i = 0; i < count; ++i) store(out + 2 * i, bf16_of(values[i]));
}

void decode_bf16(const std::byte* values, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = bf16_value(load<uint16_t>(values + 2 * i));
}

void encode_int8(const float* rows, size_t n, uint32_t dim, std::byte* out) {
  for (; n > 0; --n, rows += dim, out += kInt8HeaderBytes + dim) {
    float minimum = rows[0];
    float maximum = rows[0];
    bool finite = true;
    for (uint32_t i = 0; i < dim; ++i) {
      finite = finite && is_finite_value(rows[i]);
      minimum = rows[i] < minimum ? rows[i] : minimum;
      maximum = rows[i] > maximum ? rows[i] : maximum;
    }
    const Int8Header header = int8_header(finite, minimum, maximum);
    if (!write_int8_header(header, dim, out)) continue;
    for (uint32_t i = 0; i < dim; ++i) {
      store(out + kInt8HeaderBytes + i, int8_code(header, rows[i]));
    }
  }
}

void decode_int8(const std::byte* rows, size_t n, uint32_t dim, float* out) {
  for (; n > 0; --n, rows += kInt8HeaderBytes + dim, out += dim) {
    const auto scale = load<float>(rows);
    const auto zero = load<float>(rows + 4);
    if (!is_finite_value(scale) || !is_finite_value(zero)) {
      decode_int8_not_finite(dim, out);
      continue;
    }
    for (uint32_t i = 0; i < dim; ++i) {
      out[i] = zero + scale * static_cast<float>(load<uint8_t>(rows + kInt8HeaderBytes + i));
    }
  }
}

size_t first_not_finite(const float* values, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (!is_finite_value(values[i])) return i;
  }
  return count;
}

}  // namespace

const Kernels kScalarKernels = {encode_f16,  decode_f16,  encode_bf16,     decode_bf16,
                                encode_int8, decode_int8, first_not_finite};

}  // namespace petps::codec
