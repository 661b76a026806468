// The loops behind codec.h, one set for each instruction set. Only codec, tests and benchmarks
// include this.
#pragma once

#include <cstddef>
#include <cstdint>

namespace petps::codec {

struct Grid;  // values.h

// kAvx2 includes F16C. kAvx512 is kAvx2 with F, BW and VL.
enum class Level : uint8_t { kScalar, kAvx2, kAvx512 };

const char* level_name(Level level);
// Return whether this processor and its operating system support the level.
bool is_supported(Level level);

// Rows whose range is searched at the same time, one per lane.
inline constexpr size_t kSearchRows = 16;

// How Check-N-Run 5.2 narrows a range (FORMAT.md): `steps` times, by one step at the better end.
struct Search {
  float levels = 15.0f;  // the highest code
  uint32_t steps = 0;
};

// Input: minimum, range = maximum - minimum > 0, and step = range / bins of the row in each lane.
// Output: the best range, which is `moved` steps narrower, `low` of them at the lower end.
struct SearchRows {
  float minimum[kSearchRows];
  float range[kSearchRows];
  float step[kSearchRows];
  float low[kSearchRows];
  float moved[kSearchRows];
};

// ASSUMPTIONS: pointers to bytes may be unaligned, pointers to floats are 4-byte aligned; memory
// ranges do not overlap.
// ERRORS: none; every bit pattern has a defined result (FORMAT.md), the same at every Level.
struct Kernels {
  void (*encode_f16)(const float* values, size_t count, std::byte* out);
  void (*decode_f16)(const std::byte* values, size_t count, float* out);
  void (*encode_bf16)(const float* values, size_t count, std::byte* out);
  void (*decode_bf16)(const std::byte* values, size_t count, float* out);
  void (*encode_int8)(const float* rows, size_t n, uint32_t dim, std::byte* out);
  void (*decode_int8)(const std::byte* rows, size_t n, uint32_t dim, float* out);
  // Find minimum and maximum of a row. Return false if a value is not finite; both are then
  // undefined.
  bool (*range_of)(const float* row, uint32_t dim, float* minimum, float* maximum);
  // Write one code per byte. ASSUMPTIONS: grid.scale > 0; levels <= 255.
  void (*codes_of)(const float* values, uint32_t count, const Grid& grid, float levels,
                   std::byte* codes);
  void (*values_of)(const std::byte* codes, uint32_t count, const Grid& grid, float* out);
  // lanes: float32[dim, kSearchRows], one row per column.
  void (*search)(const float* lanes, uint32_t dim, const Search& wanted, SearchRows* rows);
  size_t (*first_not_finite)(const float* values, size_t count);  // index of the value, or count
};

// ASSUMPTIONS: is_supported(level).
const Kernels& kernels_of(Level level);
// Return the kernels that codec.h runs: those of the highest supported level, chosen once.
const Kernels& best_kernels();

extern const Kernels kScalarKernels;
extern const Kernels kAvx2Kernels;
// Return `kernels` with AVX-512 versions of the loops that 512 bits make faster.
Kernels with_avx512(Kernels kernels);

}  // namespace petps::codec
