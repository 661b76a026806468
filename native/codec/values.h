// The definition of each format, for one value or one row header. The scalar kernels are loops over
// these functions, and the wide kernels use them for the ends of rows, so each rule has one
// definition.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace petps::codec {

inline constexpr size_t kGridBytes = 8;  // float32 scale, float32 zero
inline constexpr uint32_t kExponentMask = 0x7f800000u;
inline constexpr uint32_t kQuietNan = 0x7fc00000u;

template <typename T>
inline T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <typename T>
inline void store(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof(T));
}

inline bool is_finite_value(float value) {
  return (std::bit_cast<uint32_t>(value) & kExponentMask) != kExponentMask;
}

// Round to nearest even. Too large a value becomes infinity. A NaN stays a NaN (quiet, upper
// payload bits kept).
inline uint16_t f16_of(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > kExponentMask)
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65536 and above
  if (magnitude < 0x33000000u) return sign;  // below half the smallest half
  uint32_t significand;
  uint32_t shift;
  uint32_t base;
  if (magnitude >= 0x38800000u) {  // a normal half
    significand = magnitude & 0x7fffffu;
    shift = 13;
    base = ((magnitude >> 23) - 112) << 10;
  } else {  // a subnormal half: the hidden bit becomes part of the significand
    significand = (magnitude & 0x7fffffu) | 0x800000u;
    shift = 126 - (magnitude >> 23);
    base = 0;
  }
  const uint32_t kept = significand >> shift;
  const uint32_t rest = significand & ((1u << shift) - 1);
  const uint32_t half = 1u << (shift - 1);
  const uint32_t up = rest > half || (rest == half && (kept & 1u) != 0) ? 1u : 0u;
  // A carry moves into the exponent, which is correct.
  return static_cast<uint16_t>(sign | (base + kept + up));
}

inline float f16_value(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  uint32_t significand = half & 0x3ffu;
  if (exponent == 0x1f) {
    const uint32_t quiet = significand != 0 ? 0x400000u : 0u;
    return std::bit_cast<float>(sign | kExponentMask | quiet | (significand << 13));
  }
  if (exponent != 0)
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (significand << 13));
  if (significand == 0) return std::bit_cast<float>(sign);
  const int shift = std::countl_zero(significand) - 21;  // moves the leading bit to bit 10
  significand = (significand << shift) & 0x3ffu;
  return std::bit_cast<float>(sign | static_cast<uint32_t>(113 - shift) << 23 |
                              (significand << 13));
}

// Round to nearest even. A NaN stays a NaN (quiet, upper payload bits kept).
inline uint16_t bf16_of(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > kExponentMask) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float bf16_value(uint16_t half) {
  return std::bit_cast<float>(static_cast<uint32_t>(half) << 16);
}

// The values of a row's codes, evenly spaced: value = zero + scale * code, code 0 .. levels.
struct Grid {
  bool representable = false;  // false: a value is not finite, or the width is not
  float scale = 0.0f;          // 0: every code is 0
  float zero = 0.0f;
};

// Return the grid from `zero` up to zero + width. ASSUMPTIONS: the sign of a zero is not
// significant; width >= 0 or not finite.
inline Grid grid_over(bool finite, float zero, float width, float levels) {
  zero += 0.0f;  // -0 becomes +0, because the sign of a minimum depends on the order of comparison
  if (!finite || !is_finite_value(width)) return {};
  float scale = width / levels;
  // The product may round up at the end of float's range; one or two steps correct it.
  while (!is_finite_value(zero + scale * levels)) {
    scale = std::nextafter(scale, 0.0f);
  }
  return {true, scale, zero};
}

inline Grid int8_grid(bool finite, float minimum, float maximum) {
  return grid_over(finite, minimum, maximum - minimum, 255.0f);
}

inline uint8_t code_of(const Grid& grid, float levels, float value) {
  float quotient = (value - grid.zero) / grid.scale;
  quotient = quotient > 0.0f ? quotient : 0.0f;
  quotient = quotient < levels ? quotient : levels;
  return static_cast<uint8_t>(std::lrintf(quotient));
}

// Write scale and zero. Return true if the caller must write the codes. Otherwise write all codes
// as 0 and return false: the row is constant or not representable. A row that is not representable
// gets a NaN as zero, so every value decodes to NaN and never to a plausible number.
inline bool write_grid(const Grid& grid, size_t code_bytes, std::byte* out) {
  store(out, grid.scale);
  store(out + 4, grid.representable ? grid.zero : std::bit_cast<float>(kQuietNan));
  if (grid.scale > 0.0f) return true;
  std::memset(out + kGridBytes, 0, code_bytes);
  return false;
}

// Return the grid of a stored row; it is not representable if scale or zero is not finite.
inline Grid load_grid(const std::byte* row) {
  const auto scale = load<float>(row);
  const auto zero = load<float>(row + 4);
  return {is_finite_value(scale) && is_finite_value(zero), scale, zero};
}

// Decode a stored row whose scale or zero is not finite. All levels use this function, because the
// sum of two NaNs depends on the order of the operands.
inline void fill_not_finite(uint32_t dim, float* out) {
  for (uint32_t i = 0; i < dim; ++i) out[i] = std::bit_cast<float>(kQuietNan);
}

// Codes below 8 bits form a stream of bits, lowest bit first: code i takes the bits from i * bits
// up. Eight codes fill exactly `bits` bytes, so these functions pack and unpack eight at a time,
// pairwise.
inline uint64_t pack_eight(uint64_t codes, uint32_t bits) {
  codes = (codes & 0x00ff00ff00ff00ffu) | ((codes >> 8) & 0x00ff00ff00ff00ffu) << bits;
  codes = (codes & 0x0000ffff0000ffffu) | ((codes >> 16) & 0x0000ffff0000ffffu) << (2 * bits);
  return (codes & 0xffffffffu) | (codes >> 32) << (4 * bits);
}

inline uint64_t unpack_eight(uint64_t packed, uint32_t bits) {
  const auto low = [](uint32_t count) { return (uint64_t{1} << count) - 1; };
  uint64_t codes = (packed & low(4 * bits)) | ((packed >> (4 * bits)) & low(4 * bits)) << 32;
  const uint64_t pairs = low(2 * bits) * 0x0000000100000001u;
  codes = (codes & pairs) | ((codes >> (2 * bits)) & pairs) << 16;
  const uint64_t ones = low(bits) * 0x0001000100010001u;
  return (codes & ones) | ((codes >> bits) & ones) << 8;
}

}  // namespace petps::codec
