// Seeded rows for codec tests, with values that are difficult to convert.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "tests/seed.h"

namespace petps::codec::testing {

using tests::seed;

enum class Kind { kNormal, kWide, kTiny, kConstant, kExtreme, kNotFinite, kAnyBits, kTies };
inline constexpr Kind kKinds[] = {Kind::kNormal,  Kind::kWide,      Kind::kTiny,    Kind::kConstant,
                                  Kind::kExtreme, Kind::kNotFinite, Kind::kAnyBits, Kind::kTies};

inline float any_bits(std::mt19937_64& random) {
  return std::bit_cast<float>(static_cast<uint32_t>(random()));
}

inline float finite_bits(std::mt19937_64& random) {
  for (;;) {
    const float value = any_bits(random);
    if (value - value == 0.0f) return value;
  }
}

inline void fill_row(Kind kind, std::mt19937_64& random, float* row, uint32_t dim) {
  using Limits = std::numeric_limits<float>;
  constexpr float kOdd[] = {
      0.0f,     -0.0f,    Limits::denorm_min(), -Limits::denorm_min(), Limits::min(), 65504.0f,
      65519.9f, 65520.0f, 5.9604645e-8f,        2.9802322e-8f,         1.0f,          -1.0f};
  constexpr float kLimits[] = {Limits::max(), -Limits::max(), Limits::max() / 2,
                               0.0f,          1.0f,           Limits::min()};
  constexpr float kNotNumbers[] = {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN(),
                                   Limits::signaling_NaN()};
  std::normal_distribution<float> normal(0.0f, 0.05f);
  const float constant = finite_bits(random);
  for (uint32_t i = 0; i < dim; ++i) {
    switch (kind) {
      case Kind::kNormal:
        row[i] = normal(random);
        break;
      case Kind::kWide:
        row[i] = random() % 4 == 0 ? kOdd[random() % std::size(kOdd)] : finite_bits(random);
        break;
      case Kind::kTiny:
        row[i] = std::bit_cast<float>(static_cast<uint32_t>(random() & 0x800fffffu));
        break;
      case Kind::kConstant:
        row[i] = constant;
        break;
      case Kind::kExtreme:
        row[i] = kLimits[random() % std::size(kLimits)];
        break;
      case Kind::kNotFinite:
        row[i] = normal(random);
        break;
      case Kind::kAnyBits:
        row[i] = any_bits(random);
        break;
      case Kind::kTies:
        row[i] = static_cast<float>(random() % 511) * 0.5f;
        break;  // scale 1: halves lie between codes
    }
  }
  if (kind == Kind::kNotFinite)
    row[random() % dim] = kNotNumbers[random() % std::size(kNotNumbers)];
  if (kind == Kind::kTies && dim > 1) row[0] = 0.0f, row[dim - 1] = 255.0f;
}

}  // namespace petps::codec::testing
