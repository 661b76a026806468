#include <immintrin.h>

#include "codec/kernels.h"
#include "codec/values.h"

#define PETPS_AVX2 __attribute__((target("avx2,f16c")))

namespace petps::codec {
namespace {

constexpr size_t kWide = 8;  // floats in a register

PETPS_AVX2 void encode_f16(const float* values, size_t count, std::byte* out) {
  size_t i = 0;
  for (; i + kWide <= count; i += kWide) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i), halves);
  }
  for (; i < count; ++i) store(out + 2 * i, f16_of(values[i]));
}

PETPS_AVX2 void decode_f16(const std::byte* values, size_t count, float* out) {
  size_t i = 0;
  for (; i + kWide <= count; i += kWide) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values + 2 * i));
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
  }
  for (; i < count; ++i) out[i] = f16_value(load<uint16_t>(values + 2 * i));
}

PETPS_AVX2 void encode_bf16(const float* values, size_t count, std::byte* out) {
  const __m256i magnitude_mask = _mm256_set1_epi32(0x7fffffff);
  const __m256i exponent_mask = _mm256_set1_epi32(static_cast<int>(kExponentMask));
  size_t i = 0;
  for (; i + kWide <= count; i += kWide) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i));
    const __m256i high = _mm256_srli_epi32(bits, 16);
    const __m256i nan = _mm256_cmpgt_epi32(_mm256_and_si256(bits, magnitude_mask), exponent_mask);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    const __m256i words = _mm256_blendv_epi8(rounded, quiet, nan);
    const __m128i halves =
        _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i), halves);
  }
  for (; i < count; ++i) store(out + 2 * i, bf16_of(values[i]));
}

PETPS_AVX2 void decode_bf16(const std::byte* values, size_t count, float* out) {
  size_t i = 0;
  for (; i + kWide <= count; i += kWide) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values + 2 * i));
    const __m256i words = _mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), words);
  }
  for (; i < count; ++i) out[i] = bf16_value(load<uint16_t>(values + 2 * i));
}

PETPS_AVX2 inline __m128 fold(__m256 wide, __m128 (*op)(__m128, __m128)) {
  __m128 four = op(_mm256_castps256_ps128(wide), _mm256_extractf128_ps(wide, 1));
  four = op(four, _mm_movehl_ps(four, four));
  return op(four, _mm_movehdup_ps(four));
}

PETPS_AVX2 inline __m256i not_finite(__m256 values) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(kExponentMask));
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(values), mask), mask);
}

// Minimum and maximum of a row; false if a value is not finite.
PETPS_AVX2 inline bool row_range(const float* row, uint32_t dim, float* minimum, float* maximum) {
  uint32_t i = 0;
  float low = row[0];
  float high = row[0];
  bool finite = true;
  if (dim >= kWide) {
    __m256 lows = _mm256_loadu_ps(row);
    __m256 highs = lows;
    __m256i odd = _mm256_setzero_si256();
    for (; i + kWide <= dim; i += kWide) {
      const __m256 values = _mm256_loadu_ps(row + i);
      odd = _mm256_or_si256(odd, not_finite(values));
      lows = _mm256_min_ps(lows, values);
      highs = _mm256_max_ps(highs, values);
    }
    finite = _mm256_testz_si256(odd, odd) != 0;
    low = _mm_cvtss_f32(fold(lows, [](__m128 a, __m128 b) { return _mm_min_ps(a, b); }));
    high = _mm_cvtss_f32(fold(highs, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); }));
  }
  for (; i < dim; ++i) {
    finite = finite && is_finite_value(row[i]);
    low = row[i] < low ? row[i] : low;
    high = row[i] > high ? row[i] : high;
  }
  *minimum = low;
  *maximum = high;
  return finite;
}

PETPS_AVX2 inline void write_codes(const float* row, uint32_t dim, const Int8Header& header,
                                   std::byte* codes) {
  const __m256 zero = _mm256_set1_ps(header.zero);
  const __m256 scale = _mm256_set1_ps(header.scale);
  uint32_t i = 0;
  for (; i + kWide <= dim; i += kWide) {
    __m256 quotient = _mm256_div_ps(_mm256_sub_ps(_mm256_loadu_ps(row + i), zero), scale);
    quotient = _mm256_min_ps(_mm256_max_ps(quotient, _mm256_setzero_ps()), _mm256_set1_ps(255.0f));
    const __m256i words = _mm256_cvtps_epi32(quotient);
    const __m128i shorts =
        _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + i), _mm_packus_epi16(shorts, shorts));
  }
  for (; i < dim; ++i) store(codes + i, int8_code(header, row[i]));
}

PETPS_AVX2 void encode_int8(const float* rows, size_t n, uint32_t dim, std::byte* out) {
  for (; n > 0; --n, rows += dim, out += kInt8HeaderBytes + dim) {
    float minimum;
    float maximum;
    const bool finite = row_range(rows, dim, &minimum, &maximum);
    const Int8Header header = int8_header(finite, minimum, maximum);
    if (write_int8_header(header, dim, out)) write_codes(rows, dim, header, out + kInt8HeaderBytes);
  }
}

PETPS_AVX2 void decode_int8(const std::byte* rows, size_t n, uint32_t dim, float* out) {
  for (; n > 0; --n, rows += kInt8HeaderBytes + dim, out += dim) {
    const auto scale = load<float>(rows);
    const auto zero = load<float>(rows + 4);
    if (!is_finite_value(scale) || !is_finite_value(zero)) {
      decode_int8_not_finite(dim, out);
      continue;
    }
    const std::byte* codes = rows + kInt8HeaderBytes;
    const __m256 scales = _mm256_set1_ps(scale);
    const __m256 zeros = _mm256_set1_ps(zero);
    uint32_t i = 0;
    for (; i + kWide <= dim; i += kWide) {
      const __m256i words =
          _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
      _mm256_storeu_ps(out + i,
                       _mm256_add_ps(zeros, _mm256_mul_ps(scales, _mm256_cvtepi32_ps(words))));
    }
    for (; i < dim; ++i) out[i] = zero + scale * static_cast<float>(load<uint8_t>(codes + i));
  }
}

PETPS_AVX2 size_t first_not_finite(const float* values, size_t count) {
  size_t i = 0;
  for (; i + 4 * kWide <= count; i += 4 * kWide) {  // four loads a branch
    const __m256i first = not_finite(_mm256_loadu_ps(values + i));
    const __m256i second = not_finite(_mm256_loadu_ps(values + i + kWide));
    const __m256i third = not_finite(_mm256_loadu_ps(values + i + 2 * kWide));
    const __m256i fourth = not_finite(_mm256_loadu_ps(values + i + 3 * kWide));
    const __m256i any =
        _mm256_or_si256(_mm256_or_si256(first, second), _mm256_or_si256(third, fourth));
    if (_mm256_testz_si256(any, any) == 0) break;
  }
  for (; i < count; ++i) {
    if (!is_finite_value(values[i])) return i;
  }
  return count;
}

}  // namespace

const Kernels kAvx2Kernels = {encode_f16,  decode_f16,  encode_bf16,     decode_bf16,
                              encode_int8, decode_int8, first_not_finite};

}  // namespace petps::codec
