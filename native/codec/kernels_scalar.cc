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

bool range_of(const float* row, uint32_t dim, float* minimum, float* maximum) {
  float low = row[0];
  float high = row[0];
  bool finite = true;
  for (uint32_t i = 0; i < dim; ++i) {
    finite = finite && is_finite_value(row[i]);
    low = row[i] < low ? row[i] : low;
    high = row[i] > high ? row[i] : high;
  }
  *minimum = low;
  *maximum = high;
  return finite;
}

void codes_of(const float* values, uint32_t count, const Grid& grid, float levels,
              std::byte* codes) {
  for (uint32_t i = 0; i < count; ++i) store(codes + i, code_of(grid, levels, values[i]));
}

void values_of(const std::byte* codes, uint32_t count, const Grid& grid, float* out) {
  for (uint32_t i = 0; i < count; ++i) {
    out[i] = grid.zero + grid.scale * static_cast<float>(load<uint8_t>(codes + i));
  }
}

void encode_int8(const float* rows, size_t n, uint32_t dim, std::byte* out) {
  for (; n > 0; --n, rows += dim, out += kGridBytes + dim) {
    float minimum;
    float maximum;
    const bool finite = range_of(rows, dim, &minimum, &maximum);
    const Grid grid = int8_grid(finite, minimum, maximum);
    if (write_grid(grid, dim, out)) codes_of(rows, dim, grid, 255.0f, out + kGridBytes);
  }
}

void decode_int8(const std::byte* rows, size_t n, uint32_t dim, float* out) {
  for (; n > 0; --n, rows += kGridBytes + dim, out += dim) {
    const Grid grid = load_grid(rows);
    if (!grid.representable) {
      fill_not_finite(dim, out);
      continue;
    }
    values_of(rows + kGridBytes, dim, grid, out);
  }
}

// Return the sum of squared distances, in codes, of one lane's values to their nearest codes.
inline float distance_of(const float* lanes, uint32_t dim, float zero, float inverse,
                         float levels) {
  float sum = 0.0f;
  for (uint32_t i = 0; i < dim; ++i) {
    const float at = (lanes[i * kSearchRows] - zero) * inverse;
    float code = at > 0.0f ? at : 0.0f;
    code = std::rintf(code < levels ? code : levels);
    const float distance = at - code;
    sum += distance * distance;
  }
  return sum;
}

void search(const float* lanes, uint32_t dim, const Search& wanted, SearchRows* rows) {
  for (size_t r = 0; r < kSearchRows; ++r) {
    const float minimum = rows->minimum[r];
    const float range = rows->range[r];
    const float step = rows->step[r];
    float low = 0.0f;
    float best_low = 0.0f;
    float best_moved = 0.0f;
    float best =
        distance_of(lanes + r, dim, minimum, 1.0f / (range / wanted.levels), wanted.levels);
    for (uint32_t moved = 1; moved <= wanted.steps; ++moved) {
      const float width = range - step * static_cast<float>(moved);
      const float inverse = 1.0f / (width / wanted.levels);
      const float raised =
          distance_of(lanes + r, dim, minimum + step * (low + 1.0f), inverse, wanted.levels);
      const float lowered =
          distance_of(lanes + r, dim, minimum + step * low, inverse, wanted.levels);
      if (raised < lowered) low += 1.0f;
      const float share = width / range;
      const float error = (raised < lowered ? raised : lowered) * (share * share);
      if (error < best) {
        best = error;
        best_low = low;
        best_moved = static_cast<float>(moved);
      }
    }
    rows->low[r] = best_low;
    rows->moved[r] = best_moved;
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
                                encode_int8, decode_int8, range_of,        codes_of,
                                values_of,   search,      first_not_finite};

}  // namespace petps::codec
