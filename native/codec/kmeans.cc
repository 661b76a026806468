#include "codec/kmeans.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "base/hash.h"
#include "codec/quantise.h"
#include "codec/values.h"

namespace petps::codec {
namespace {

// Start the codebook with the values at `count` distinct places of the row. The seed and the row's
// bytes determine the places, so a row has the same encoding at any position.
void start_codebook(const float* row, uint32_t dim, uint32_t count, uint64_t seed,
                    float* codebook) {
  std::mt19937_64 random(XXH3_64bits_withSeed(row, dim * sizeof(float), seed));
  std::vector<uint32_t> places(dim);
  std::iota(places.begin(), places.end(), 0u);
  for (uint32_t i = 0; i < count; ++i) {
    std::swap(places[i], places[i + random() % (dim - i)]);
    codebook[i] = row[places[i]];
  }
}

// Return the first of the nearest entries.
uint32_t nearest(const float* codebook, uint32_t count, float value) {
  uint32_t best = 0;
  float least = std::abs(value - codebook[0]);
  for (uint32_t i = 1; i < count; ++i) {
    const float distance = std::abs(value - codebook[i]);
    if (distance < least) {
      least = distance;
      best = i;
    }
  }
  return best;
}

}  // namespace

void kmeans(const float* row, uint32_t dim, uint32_t entries, uint64_t seed, float* codebook,
            std::byte* codes) {
  const uint32_t count = std::min(entries, dim);
  std::fill(codebook, codebook + entries, 0.0f);
  start_codebook(row, dim, count, seed, codebook);
  for (uint32_t iteration = 0; iteration < kKmeansIterations; ++iteration) {
    double sums[256] = {};
    uint32_t members[256] = {};
    for (uint32_t i = 0; i < dim; ++i) {
      const uint32_t code = nearest(codebook, count, row[i]);
      sums[code] += static_cast<double>(row[i]);
      members[code] += 1;
    }
    for (uint32_t i = 0; i < count; ++i) {
      if (members[i] > 0) codebook[i] = static_cast<float>(sums[i] / members[i]);
    }
  }
  for (uint32_t i = 0; i < dim; ++i) {
    store(codes + i, static_cast<uint8_t>(nearest(codebook, count, row[i])));
  }
}

}  // namespace petps::codec
