// Quantised rows of a checkpoint (Check-N-Run 5.2; FORMAT.md): each row has its own grid or
// codebook, and packed codes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/status.h"

namespace petps::codec {

enum class Method : uint8_t {  // never renumber
  kSymmetric = 0,              // from -m to m, m the largest magnitude
  kAsymmetric = 1,             // from the smallest value to the largest
  kAdaptive = 2,               // the asymmetric range, narrowed by a greedy search
  kKmeans = 3,                 // a codebook instead of a grid: the reference to compare with
};

inline constexpr uint32_t kBinsMax = 1024;  // more than 100 gain nothing, and the time is linear
inline constexpr uint32_t kKmeansIterations = 15;  // as in Check-N-Run

struct Quantisation {
  Method method = Method::kAsymmetric;
  uint32_t bits = 8;   // 8, 4, 3 or 2
  uint32_t bins = 25;  // adaptive: a step of the search is range / bins; 1..kBinsMax
  double ratio = 1.0;  // adaptive: the share of the range that the search covers; 0..1
  uint64_t seed = 0;   // kmeans: selects the elements of a row that it starts from
};

// Return the method called "symmetric", "asymmetric", "adaptive" or "kmeans".
base::Result<Method> parse_method(std::string_view name);
// Check that each number is within its limits. Errors: kInvalidArgument, which names the number.
base::Status check(const Quantisation& wanted);

// Return the bytes of one row. ASSUMPTIONS here and below: check() passed; dim > 0.
size_t quantised_row_bytes(const Quantisation& wanted, uint32_t dim);
// Quantise rows: float32[n, dim] -> out: n * quantised_row_bytes. Return the index of the first row
// that cannot be represented (a NaN, an infinity, or a range beyond float32), or n. `out` is
// complete only if the result is n.
size_t quantise(const Quantisation& wanted, const float* rows, size_t n, uint32_t dim,
                std::byte* out);
// Decode rows: n quantised rows, which may be unaligned -> out: float32[n, dim]. Any bytes decode
// to some values.
void dequantise(const Quantisation& written, const std::byte* rows, size_t n, uint32_t dim,
                float* out);

}  // namespace petps::codec
