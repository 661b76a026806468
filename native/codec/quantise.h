// Quantised rows of a checkpoint (Check-N-Run 5.2; FORMAT.md): each row with a grid or codebook of
// its own, codes packed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/status.h"

namespace petps::codec {

enum class Method : uint8_t {  // never renumber
  kSymmetric = 0,              // from -m to m, m the largest magnitude
  kAsymmetric = 1,             // from the least value to the largest
  kAdaptive = 2,               // that range, narrowed by a greedy search
  kKmeans = 3,                 // a codebook instead of a grid: the reference to compare with
};

inline constexpr uint32_t kBinsMax =
    1024;  // beyond 100 nothing is gained, and time is linear in them
inline constexpr uint32_t kKmeansIterations = 15;  // Check-N-Run's

struct Quantisation {
  Method method = Method::kAsymmetric;
  uint32_t bits = 8;   // 8, 4, 3 or 2
  uint32_t bins = 25;  // adaptive: a step of the search is range / bins; 1..kBinsMax
  double ratio = 1.0;  // adaptive: the share of the range that the search walks over; 0..1
  uint64_t seed = 0;   // kmeans: which elements of a row it starts from
};

base::Result<Method> parse_method(
    std::string_view name);  // "symmetric", "asymmetric", "adaptive", "kmeans"
// Whether every number is within its limits; the message names the one that is not.
base::Status check(const Quantisation& wanted);

// Bytes of one row. ASSUMPTIONS of all below: check() passed, dim > 0.
size_t quantised_row_bytes(const Quantisation& wanted, uint32_t dim);
// rows: float32[n, dim] -> out: n * quantised_row_bytes. Returns the index of the first row that
// cannot be represented (a NaN, an infinity, or a range beyond float32), or n. `out` is whole only
// then.
size_t quantise(const Quantisation& wanted, const float* rows, size_t n, uint32_t dim,
                std::byte* out);
// rows: n quantised rows, unaligned -> out: float32[n, dim]. Any bytes decode to something.
void dequantise(const Quantisation& written, const std::byte* rows, size_t n, uint32_t dim,
                float* out);

}  // namespace petps::codec
