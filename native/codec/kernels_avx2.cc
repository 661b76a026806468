#ifdef __x86_64__
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

PETPS_AVX2 inline bool range_of(const float* row, uint32_t dim, float* minimum, float* maximum) {
  uint32_t i = 0;
  float low = row[0];
  float high = row[0];
  bool finite = true;
  if (dim >= kWide) {
    __m256 lows = _mm256_loadu_ps(row);
    __m256 highs = lows;
    __m256i bad = _mm256_setzero_si256();
    for (; i + kWide <= dim; i += kWide) {
      const __m256 values = _mm256_loadu_ps(row + i);
      bad = _mm256_or_si256(bad, not_finite(values));
      lows = _mm256_min_ps(lows, values);
      highs = _mm256_max_ps(highs, values);
    }
    finite = _mm256_testz_si256(bad, bad) != 0;
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

PETPS_AVX2 inline void codes_of(const float* values, uint32_t count, const Grid& grid, float levels,
                                std::byte* codes) {
  const __m256 zero = _mm256_set1_ps(grid.zero);
  const __m256 scale = _mm256_set1_ps(grid.scale);
  const __m256 highest = _mm256_set1_ps(levels);
  uint32_t i = 0;
  for (; i + kWide <= count; i += kWide) {
    __m256 quotient = _mm256_div_ps(_mm256_sub_ps(_mm256_loadu_ps(values + i), zero), scale);
    quotient = _mm256_min_ps(_mm256_max_ps(quotient, _mm256_setzero_ps()), highest);
    const __m256i words = _mm256_cvtps_epi32(quotient);
    const __m128i shorts =
        _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(codes + i), _mm_packus_epi16(shorts, shorts));
  }
  for (; i < count; ++i) store(codes + i, code_of(grid, levels, values[i]));
}

PETPS_AVX2 inline void values_of(const std::byte* codes, uint32_t count, const Grid& grid,
                                 float* out) {
  const __m256 scale = _mm256_set1_ps(grid.scale);
  const __m256 zero = _mm256_set1_ps(grid.zero);
  uint32_t i = 0;
  for (; i + kWide <= count; i += kWide) {
    const __m256i words =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
    _mm256_storeu_ps(out + i, _mm256_add_ps(zero, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(words))));
  }
  for (; i < count; ++i)
    out[i] = grid.zero + grid.scale * static_cast<float>(load<uint8_t>(codes + i));
}

PETPS_AVX2 void encode_int8(const float* rows, size_t n, uint32_t dim, std::byte* out) {
  for (; n > 0; --n, rows += dim, out += kGridBytes + dim) {
    float minimum;
    float maximum;
    const bool finite = range_of(rows, dim, &minimum, &maximum);
    const Grid grid = int8_grid(finite, minimum, maximum);
    if (write_grid(grid, dim, out)) codes_of(rows, dim, grid, 255.0f, out + kGridBytes);
  }
}

PETPS_AVX2 void decode_int8(const std::byte* rows, size_t n, uint32_t dim, float* out) {
  for (; n > 0; --n, rows += kGridBytes + dim, out += dim) {
    const Grid grid = load_grid(rows);
    if (!grid.representable) {
      fill_not_finite(dim, out);
      continue;
    }
    values_of(rows + kGridBytes, dim, grid, out);
  }
}

// Add to `sum` the squared distance, in codes, of eight values to their nearest codes.
PETPS_AVX2 inline __m256 add_distance(__m256 sum, __m256 values, __m256 zero, __m256 inverse,
                                      __m256 levels) {
  const __m256 at = _mm256_mul_ps(_mm256_sub_ps(values, zero), inverse);
  __m256 code = _mm256_min_ps(_mm256_max_ps(at, _mm256_setzero_ps()), levels);
  code = _mm256_round_ps(code, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 distance = _mm256_sub_ps(at, code);
  return _mm256_add_ps(sum, _mm256_mul_ps(distance, distance));
}

PETPS_AVX2 void search_eight(const float* lanes, uint32_t dim, const Search& wanted,
                             SearchRows* rows, size_t first) {
  const __m256 levels = _mm256_set1_ps(wanted.levels);
  const __m256 one = _mm256_set1_ps(1.0f);
  const __m256 minimum = _mm256_loadu_ps(rows->minimum + first);
  const __m256 range = _mm256_loadu_ps(rows->range + first);
  const __m256 step = _mm256_loadu_ps(rows->step + first);
  __m256 low = _mm256_setzero_ps();
  __m256 best_low = low;
  __m256 best_moved = low;
  __m256 best = _mm256_setzero_ps();
  const __m256 whole = _mm256_div_ps(one, _mm256_div_ps(range, levels));
  for (uint32_t i = 0; i < dim; ++i) {
    const __m256 values = _mm256_loadu_ps(lanes + i * kSearchRows + first);
    best = add_distance(best, values, minimum, whole, levels);
  }
  for (uint32_t moved = 1; moved <= wanted.steps; ++moved) {
    const __m256 count = _mm256_set1_ps(static_cast<float>(moved));
    const __m256 width = _mm256_sub_ps(range, _mm256_mul_ps(step, count));
    const __m256 inverse = _mm256_div_ps(one, _mm256_div_ps(width, levels));
    const __m256 raised_low = _mm256_add_ps(low, one);
    const __m256 raised_zero = _mm256_add_ps(minimum, _mm256_mul_ps(step, raised_low));
    const __m256 kept_zero = _mm256_add_ps(minimum, _mm256_mul_ps(step, low));
    __m256 raised = _mm256_setzero_ps();
    __m256 lowered = _mm256_setzero_ps();
    for (uint32_t i = 0; i < dim; ++i) {
      const __m256 values = _mm256_loadu_ps(lanes + i * kSearchRows + first);
      raised = add_distance(raised, values, raised_zero, inverse, levels);
      lowered = add_distance(lowered, values, kept_zero, inverse, levels);
    }
    const __m256 raise = _mm256_cmp_ps(raised, lowered, _CMP_LT_OQ);
    low = _mm256_blendv_ps(low, raised_low, raise);
    const __m256 share = _mm256_div_ps(width, range);
    const __m256 error =
        _mm256_mul_ps(_mm256_blendv_ps(lowered, raised, raise), _mm256_mul_ps(share, share));
    const __m256 better = _mm256_cmp_ps(error, best, _CMP_LT_OQ);
    best = _mm256_blendv_ps(best, error, better);
    best_low = _mm256_blendv_ps(best_low, low, better);
    best_moved = _mm256_blendv_ps(best_moved, count, better);
  }
  _mm256_storeu_ps(rows->low + first, best_low);
  _mm256_storeu_ps(rows->moved + first, best_moved);
}

PETPS_AVX2 void search(const float* lanes, uint32_t dim, const Search& wanted, SearchRows* rows) {
  for (size_t first = 0; first < kSearchRows; first += kWide) {
    search_eight(lanes, dim, wanted, rows, first);
  }
}

PETPS_AVX2 size_t first_not_finite(const float* values, size_t count) {
  size_t i = 0;
  for (; i + 4 * kWide <= count; i += 4 * kWide) {  // four loads per branch
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
                              encode_int8, decode_int8, range_of,        codes_of,
                              values_of,   search,      first_not_finite};

}  // namespace petps::codec

#endif
