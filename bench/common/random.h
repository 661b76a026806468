// Random numbers of the benches, drawn before the clock starts. They depend on the seed alone.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace petps::bench {

// splitmix64: a bijection, so mix(0), mix(1), ... are distinct keys that look random.
inline uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

__extension__ typedef unsigned __int128 Wide;

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() { return mix(state_++); }
  // Uniform in [0, bound).
  uint64_t below(uint64_t bound) {
    return static_cast<uint64_t>((static_cast<Wide>(next()) * bound) >> 64);
  }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

// Draws ranks 0 .. n-1 with P(rank) ~ 1 / (rank + 1)^exponent. The method is rejection-inversion
// (Hormann and Derflinger 1996), which is exact and needs no table of n numbers.
class Zipf {
 public:
  Zipf(uint64_t n, double exponent)
      : exponent_(exponent),
        first_(integral(1.5) - 1),
        last_(integral(static_cast<double>(n) + 0.5)),
        shortcut_(2 - inverse(integral(2.5) - std::pow(2, -exponent))) {}

  uint64_t next(Random& random) const {
    for (;;) {
      const double u = last_ + random.unit() * (first_ - last_);
      const double x = inverse(u);
      const double k = std::floor(x + 0.5);
      if (k - x <= shortcut_ || u >= integral(k + 0.5) - std::pow(k, -exponent_)) {
        return static_cast<uint64_t>(k) - 1;
      }
    }
  }

 private:
  double integral(double x) const { return (std::pow(x, 1 - exponent_) - 1) / (1 - exponent_); }
  double inverse(double y) const { return std::pow(1 + y * (1 - exponent_), 1 / (1 - exponent_)); }

  double exponent_;
  double first_;
  double last_;
  double shortcut_;
};

enum class Access { kUniform, kZipf };

// Return `count` row numbers below `rows`.
inline std::vector<uint32_t> row_stream(Access access, uint64_t rows, uint64_t count,
                                        uint64_t seed) {
  Random random(seed);
  const Zipf zipf(rows, 0.99);
  std::vector<uint32_t> stream(count);
  for (uint32_t& row : stream) {
    row =
        static_cast<uint32_t>(access == Access::kUniform ? random.below(rows) : zipf.next(random));
  }
  return stream;
}

inline const char* access_name(Access access) {
  return access == Access::kUniform ? "uniform" : "zipf099";
}

}  // namespace petps::bench
