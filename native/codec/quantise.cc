#include "codec/quantise.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "codec/kernels.h"
#include "codec/kmeans.h"
#include "codec/values.h"

namespace petps::codec {
namespace {

// By number of the Method.
constexpr std::string_view kNames[] = {"symmetric", "asymmetric", "adaptive", "kmeans"};
constexpr uint32_t kPiece = 512;  // codes that are packed at once
// int8 rows that are checked at once, while they are in the cache.
constexpr size_t kCheckedRows = 64;

float levels_of(const Quantisation& wanted) { return static_cast<float>((1u << wanted.bits) - 1); }

size_t code_bytes(uint32_t bits, size_t dim) { return (dim * bits + 7) / 8; }

// Return the bytes before the codes: grid or codebook.
size_t front_bytes(const Quantisation& wanted) {
  return wanted.method == Method::kKmeans ? sizeof(float) << wanted.bits : kGridBytes;
}

// The last group of a row may hold fewer than eight codes; the bits of the missing codes are 0.
void pack(const std::byte* codes, uint32_t count, uint32_t bits, std::byte* out) {
  for (uint32_t i = 0; i < count; i += 8) {
    uint64_t eight = 0;
    std::memcpy(&eight, codes + i, std::min(count - i, 8u));
    const uint64_t packed = pack_eight(eight, bits);
    std::memcpy(out + i / 8 * bits, &packed, code_bytes(bits, std::min(count - i, 8u)));
  }
}

void unpack(const std::byte* packed, uint32_t count, uint32_t bits, std::byte* codes) {
  for (uint32_t i = 0; i < count; i += 8) {
    uint64_t eight = 0;
    std::memcpy(&eight, packed + i / 8 * bits, code_bytes(bits, std::min(count - i, 8u)));
    eight = unpack_eight(eight, bits);
    std::memcpy(codes + i, &eight, 8);
  }
}

void write_row(const Grid& grid, const Quantisation& wanted, const float* row, uint32_t dim,
               std::byte* out) {
  if (!write_grid(grid, code_bytes(wanted.bits, dim), out)) return;
  const Kernels& kernels = best_kernels();
  const float levels = levels_of(wanted);
  out += kGridBytes;
  if (wanted.bits == 8) return kernels.codes_of(row, dim, grid, levels, out);
  std::byte codes[kPiece];
  for (uint32_t i = 0; i < dim; i += kPiece) {
    const uint32_t count = std::min(dim - i, kPiece);
    kernels.codes_of(row + i, count, grid, levels, codes);
    pack(codes, count, wanted.bits, out + code_bytes(wanted.bits, i));
  }
}

// Asymmetric with 8 bits is dtype int8: the same loop and the same bytes.
size_t quantise_int8(const float* rows, size_t n, uint32_t dim, std::byte* out) {
  const size_t bytes = row_bytes(Dtype::kInt8, dim);
  for (size_t i = 0; i < n; i += kCheckedRows) {
    const size_t count = std::min(n - i, kCheckedRows);
    best_kernels().encode_int8(rows + i * dim, count, dim, out + i * bytes);
    for (size_t r = i; r < i + count; ++r) {
      if (!load_grid(out + r * bytes).representable) return r;
    }
  }
  return n;
}

size_t quantise_without_search(const Quantisation& wanted, const float* rows, size_t n,
                               uint32_t dim, std::byte* out) {
  const size_t bytes = quantised_row_bytes(wanted, dim);
  for (size_t i = 0; i < n; ++i) {
    float low;
    float high;
    const bool finite = best_kernels().range_of(rows + i * dim, dim, &low, &high);
    if (wanted.method == Method::kSymmetric) {
      high = std::max(std::abs(low), std::abs(high));
      low = -high;
    }
    const Grid grid = grid_over(finite, low, high - low, levels_of(wanted));
    if (!grid.representable) return i;
    write_row(grid, wanted, rows + i * dim, dim, out + i * bytes);
  }
  return n;
}

// A block of kSearchRows rows that are searched together, because one row alone would cost several
// times as much.
class AdaptiveRows {
 public:
  AdaptiveRows(const Quantisation& wanted, uint32_t dim)
      : wanted_(wanted), dim_(dim), lanes_(kSearchRows * dim) {
    const double steps = std::ceil(wanted.ratio * wanted.bins);
    search_ = {levels_of(wanted), std::min(static_cast<uint32_t>(steps), wanted.bins - 1)};
  }

  // Quantise count <= kSearchRows rows, as quantise() does.
  size_t quantise(const float* rows, size_t count, std::byte* out) {
    const size_t representable = take(rows, count);
    best_kernels().search(lanes_.data(), dim_, search_, &ranges_);
    const size_t bytes = quantised_row_bytes(wanted_, dim_);
    for (size_t r = 0; r < representable; ++r) {
      const float zero = ranges_.minimum[r] + ranges_.step[r] * ranges_.low[r];
      const float width = ranges_.range[r] - ranges_.step[r] * ranges_.moved[r];
      const Grid grid = searched_[r] ? grid_over(true, zero, width, search_.levels) : whole_[r];
      write_row(grid, wanted_, rows + r * dim_, dim_, out + r * bytes);
    }
    return representable;
  }

 private:
  // Put rows into the lanes until one cannot be represented. Return its index, or count.
  size_t take(const float* rows, size_t count) {
    size_t r = 0;
    for (; r < count; ++r) {
      const float* row = rows + r * dim_;
      float high;
      const bool finite = best_kernels().range_of(row, dim_, &ranges_.minimum[r], &high);
      ranges_.range[r] = high - ranges_.minimum[r];
      ranges_.step[r] = ranges_.range[r] / static_cast<float>(wanted_.bins);
      whole_[r] = grid_over(finite, ranges_.minimum[r], ranges_.range[r], search_.levels);
      if (!whole_[r].representable) break;
      searched_[r] = ranges_.step[r] >= search_.levels * std::numeric_limits<float>::min();
      if (searched_[r]) {
        for (uint32_t i = 0; i < dim_; ++i) lanes_[i * kSearchRows + r] = row[i];
      } else {
        leave_empty(r);
      }
    }
    for (size_t empty = r; empty < kSearchRows; ++empty) leave_empty(empty);
    return r;
  }

  // Fill a lane that has no row with numbers that are safe in every loop.
  void leave_empty(size_t lane) {
    ranges_.minimum[lane] = 0.0f;
    ranges_.range[lane] = 1.0f;
    ranges_.step[lane] = 1.0f / static_cast<float>(wanted_.bins);
    for (uint32_t i = 0; i < dim_; ++i) lanes_[i * kSearchRows + lane] = 0.0f;
  }

  const Quantisation wanted_;
  const uint32_t dim_;
  Search search_;
  std::vector<float> lanes_;  // float32[dim, kSearchRows]
  SearchRows ranges_{};
  Grid whole_[kSearchRows];
  bool searched_[kSearchRows] = {};
};

size_t quantise_adaptively(const Quantisation& wanted, const float* rows, size_t n, uint32_t dim,
                           std::byte* out) {
  AdaptiveRows block(wanted, dim);
  const size_t bytes = quantised_row_bytes(wanted, dim);
  for (size_t i = 0; i < n; i += kSearchRows) {
    const size_t count = std::min(n - i, kSearchRows);
    const size_t done = block.quantise(rows + i * dim, count, out + i * bytes);
    if (done < count) return i + done;
  }
  return n;
}

size_t quantise_by_codebook(const Quantisation& wanted, const float* rows, size_t n, uint32_t dim,
                            std::byte* out) {
  const size_t bad = first_not_finite(rows, n, dim);
  const uint32_t entries = 1u << wanted.bits;
  std::vector<std::byte> codes(dim);
  for (size_t i = 0; i < bad; ++i) {
    float codebook[256];
    kmeans(rows + i * dim, dim, entries, wanted.seed, codebook, codes.data());
    std::memcpy(out, codebook, entries * sizeof(float));
    out += entries * sizeof(float);
    if (wanted.bits == 8) {
      std::memcpy(out, codes.data(), dim);
    } else {
      pack(codes.data(), dim, wanted.bits, out);
    }
    out += code_bytes(wanted.bits, dim);
  }
  return bad;
}

void dequantise_row(const Quantisation& written, const std::byte* row, uint32_t dim, float* out) {
  const bool by_codebook = written.method == Method::kKmeans;
  const std::byte* packed = row + front_bytes(written);
  const Grid grid = load_grid(row);
  if (!by_codebook && !grid.representable) return fill_not_finite(dim, out);
  std::byte unpacked[kPiece];
  for (uint32_t i = 0; i < dim; i += kPiece) {
    const uint32_t count = std::min(dim - i, kPiece);
    const std::byte* codes = packed + code_bytes(written.bits, i);
    if (written.bits != 8) {
      unpack(codes, count, written.bits, unpacked);
      codes = unpacked;
    }
    if (!by_codebook) {
      best_kernels().values_of(codes, count, grid, out + i);
      continue;
    }
    for (uint32_t j = 0; j < count; ++j) {
      out[i + j] = load<float>(row + sizeof(float) * load<uint8_t>(codes + j));
    }
  }
}

}  // namespace

base::Result<Method> parse_method(std::string_view name) {
  for (uint8_t i = 0; i < std::size(kNames); ++i) {
    if (kNames[i] == name) return static_cast<Method>(i);
  }
  return base::Status(base::Code::kInvalidArgument,
                      "method '" + std::string(name) +
                          "' is unknown: use symmetric, asymmetric, adaptive or kmeans");
}

base::Status check(const Quantisation& wanted) {
  const auto invalid = [](std::string message) {
    return base::Status(base::Code::kInvalidArgument, std::move(message));
  };
  if (wanted.bits != 8 && (wanted.bits < 2 || wanted.bits > 4)) {
    return invalid("bits " + std::to_string(wanted.bits) + " is none of 2, 3, 4 and 8");
  }
  if (wanted.bins == 0 || wanted.bins > kBinsMax) {
    return invalid("bins " + std::to_string(wanted.bins) + " is outside 1.." +
                   std::to_string(kBinsMax));
  }
  if (!(wanted.ratio >= 0.0 && wanted.ratio <= 1.0)) {
    return invalid("ratio " + std::to_string(wanted.ratio) + " is outside 0..1");
  }
  return {};
}

size_t quantised_row_bytes(const Quantisation& wanted, uint32_t dim) {
  return front_bytes(wanted) + code_bytes(wanted.bits, dim);
}

size_t quantise(const Quantisation& wanted, const float* rows, size_t n, uint32_t dim,
                std::byte* out) {
  switch (wanted.method) {
    case Method::kAsymmetric:
      if (wanted.bits == 8) return quantise_int8(rows, n, dim, out);
      [[fallthrough]];
    case Method::kSymmetric:
      return quantise_without_search(wanted, rows, n, dim, out);
    case Method::kAdaptive:
      return quantise_adaptively(wanted, rows, n, dim, out);
    case Method::kKmeans:
      return quantise_by_codebook(wanted, rows, n, dim, out);
  }
  return 0;
}

void dequantise(const Quantisation& written, const std::byte* rows, size_t n, uint32_t dim,
                float* out) {
  const size_t bytes = quantised_row_bytes(written, dim);
  for (size_t i = 0; i < n; ++i) dequantise_row(written, rows + i * bytes, dim, out + i * dim);
}

}  // namespace petps::codec
