// One-dimensional k-means of a row's values, the reference for the grids (FORMAT.md).
#pragma once

#include <cstddef>
#include <cstdint>

namespace petps::codec {

// Quantise row: float32[dim] -> codebook: float32[entries], codes: uint8[dim]. ASSUMPTIONS:
// finite values; entries <= 256.
void kmeans(const float* row, uint32_t dim, uint32_t entries, uint64_t seed, float* codebook,
            std::byte* codes);

}  // namespace petps::codec
