// Each wide path gives the bits of the scalar path, and the scalar path those of the compiler's
// conversions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "codec/codec.h"
#include "codec/kernels.h"
#include "codec/values.h"
#include "rows.h"

namespace petps::codec {
namespace {

using testing::Kind;

constexpr std::byte kUntouched{0xa5};

class WideLevel : public ::testing::TestWithParam<Level> {
 protected:
  void SetUp() override {
    if (!is_supported(GetParam()))
      GTEST_SKIP() << "this processor has no " << level_name(GetParam());
  }
  const Kernels& wide() const { return kernels_of(GetParam()); }
};

void expect_encode_equal(const Kernels& wide, const Kernels& plain, Dtype dtype, const float* rows,
                         size_t n, uint32_t dim, size_t shift) {
  const size_t bytes = n * row_bytes(dtype, dim);
  std::vector<std::byte> expected(bytes + 64, kUntouched);
  std::vector<std::byte> actual(bytes + 64, kUntouched);
  const auto run = [&](const Kernels& kernels, std::byte* out) {
    if (dtype == Dtype::kF16) kernels.encode_f16(rows, n * dim, out);
    if (dtype == Dtype::kBf16) kernels.encode_bf16(rows, n * dim, out);
    if (dtype == Dtype::kInt8) kernels.encode_int8(rows, n, dim, out);
  };
  run(plain, expected.data() + shift);
  run(wide, actual.data() + shift);
  ASSERT_EQ(0, std::memcmp(expected.data(), actual.data(), expected.size()))
      << dtype_name(dtype) << " n " << n << " dim " << dim << " seed " << testing::seed();
  ASSERT_EQ(kUntouched, actual[shift + bytes]) << "wrote past the end";
}

void expect_decode_equal(const Kernels& wide, const Kernels& plain, Dtype dtype,
                         const std::byte* rows, size_t n, uint32_t dim, size_t shift) {
  const size_t values = n * dim;
  std::vector<float> expected(values + 32, -7.0f);
  std::vector<float> actual(values + 32, -7.0f);
  const auto run = [&](const Kernels& kernels, float* out) {
    if (dtype == Dtype::kF16) kernels.decode_f16(rows, values, out);
    if (dtype == Dtype::kBf16) kernels.decode_bf16(rows, values, out);
    if (dtype == Dtype::kInt8) kernels.decode_int8(rows, n, dim, out);
  };
  run(plain, expected.data() + shift);
  run(wide, actual.data() + shift);
  ASSERT_EQ(0, std::memcmp(expected.data(), actual.data(), expected.size() * sizeof(float)))
      << dtype_name(dtype) << " n " << n << " dim " << dim << " seed " << testing::seed();
}

void compare_all(const Kernels& wide, Kind kind, size_t n, uint32_t dim, size_t shift,
                 std::mt19937_64& random) {
  std::vector<float> rows(n * dim + shift);
  for (size_t i = 0; i < n; ++i)
    testing::fill_row(kind, random, rows.data() + shift + i * dim, dim);
  for (const Dtype dtype : {Dtype::kF16, Dtype::kBf16, Dtype::kInt8}) {
    expect_encode_equal(wide, kScalarKernels, dtype, rows.data() + shift, n, dim, shift);
    std::vector<std::byte> stored(n * row_bytes(dtype, dim) + shift);
    encode(dtype, rows.data() + shift, n, dim, stored.data() + shift);
    expect_decode_equal(wide, kScalarKernels, dtype, stored.data() + shift, n, dim, shift);
    for (std::byte& byte : stored)
      byte = static_cast<std::byte>(random());  // bytes that no encoder wrote
    expect_decode_equal(wide, kScalarKernels, dtype, stored.data() + shift, n, dim, shift);
  }
  ASSERT_EQ(kScalarKernels.first_not_finite(rows.data() + shift, n * dim),
            wide.first_not_finite(rows.data() + shift, n * dim));
}

TEST_P(WideLevel, EqualsScalarForEveryDim) {
  std::mt19937_64 random(testing::seed());
  for (const Kind kind : testing::kKinds) {
    for (uint32_t dim = 1; dim <= 130; ++dim) {
      compare_all(wide(), kind, 3, dim, random() % 8, random);
      if (HasFatalFailure()) return;
    }
    compare_all(wide(), kind, 2, 4096, 1, random);
    if (HasFatalFailure()) return;
  }
}

TEST_P(WideLevel, EqualsScalarForEveryHalf) {
  std::vector<std::byte> halves(2 << 16);
  for (uint32_t i = 0; i < 1u << 16; ++i) store(halves.data() + 2 * i, static_cast<uint16_t>(i));
  expect_decode_equal(wide(), kScalarKernels, Dtype::kF16, halves.data(), 1, 1u << 16, 0);
  expect_decode_equal(wide(), kScalarKernels, Dtype::kBf16, halves.data(), 1, 1u << 16, 0);
}

TEST_P(WideLevel, EqualsScalarAroundEveryHalf) {
  // The two floats beside each half and beside each middle between two halves: they cover every
  // rounding decision.
  std::vector<float> floats;
  for (uint32_t i = 0; i < 1u << 16; ++i) {
    const uint32_t at_half = std::bit_cast<uint32_t>(f16_value(static_cast<uint16_t>(i)));
    for (const uint32_t middle : {at_half, at_half + 0x1000u, (i << 16) + 0x8000u, i << 16}) {
      for (const uint32_t bits : {middle - 1, middle, middle + 1})
        floats.push_back(std::bit_cast<float>(bits));
    }
  }
  const auto count = static_cast<uint32_t>(floats.size());
  expect_encode_equal(wide(), kScalarKernels, Dtype::kF16, floats.data(), 1, count, 0);
  expect_encode_equal(wide(), kScalarKernels, Dtype::kBf16, floats.data(), 1, count, 0);
}

TEST_P(WideLevel, FindsTheFirstNotFiniteWhereverItIs) {
  for (uint32_t count = 1; count <= 130; ++count) {
    std::vector<float> values(count, 1.0f);
    ASSERT_EQ(count, wide().first_not_finite(values.data(), count));
    for (uint32_t at = 0; at < count; ++at) {
      values[at] = at % 2 == 0 ? std::numeric_limits<float>::infinity()
                               : std::numeric_limits<float>::quiet_NaN();
      values[count - 1] = std::numeric_limits<float>::quiet_NaN();  // a later one does not matter
      ASSERT_EQ(at, wide().first_not_finite(values.data(), count));
      values[at] = values[count - 1] = 1.0f;
    }
  }
}

// The functions that quantise.cc is built from: range, codes, values, search.
TEST_P(WideLevel, QuantisesLikeScalar) {
  std::mt19937_64 random(testing::seed());
  const Kernels& plain = kScalarKernels;
  for (int round = 0; round < 4000; ++round) {
    const uint32_t dim = 1 + static_cast<uint32_t>(random() % 130);
    const float levels = static_cast<float>((1u << (1 + random() % 8)) - 1);
    std::vector<float> row(dim);
    testing::fill_row(testing::kKinds[random() % std::size(testing::kKinds)], random, row.data(),
                      dim);
    float low[2];
    float high[2];
    const bool finite = plain.range_of(row.data(), dim, &low[0], &high[0]);
    ASSERT_EQ(finite, wide().range_of(row.data(), dim, &low[1], &high[1]));
    if (!finite) continue;
    ASSERT_EQ(low[0], low[1]) << "seed " << testing::seed();
    ASSERT_EQ(high[0], high[1]);
    const Grid grid = grid_over(true, low[0], (high[0] - low[0]) / (1 + random() % 3), levels);
    if (!grid.representable || grid.scale == 0.0f) continue;
    std::vector<std::byte> expected(dim + 16, kUntouched);
    std::vector<std::byte> actual(dim + 16, kUntouched);
    plain.codes_of(row.data(), dim, grid, levels, expected.data());
    wide().codes_of(row.data(), dim, grid, levels, actual.data());
    ASSERT_EQ(expected, actual) << "dim " << dim << " seed " << testing::seed();
    std::vector<float> values(dim + 16, -7.0f);
    std::vector<float> others(dim + 16, -7.0f);
    plain.values_of(actual.data(), dim, grid, values.data());
    wide().values_of(actual.data(), dim, grid, others.data());
    ASSERT_EQ(0, std::memcmp(values.data(), others.data(), values.size() * sizeof(float)));
  }
}

TEST_P(WideLevel, SearchesLikeScalar) {
  std::mt19937_64 random(testing::seed());
  for (int round = 0; round < 400; ++round) {
    const uint32_t dim = 1 + static_cast<uint32_t>(random() % 130);
    const uint32_t bins = 1 + static_cast<uint32_t>(random() % 60);
    const Search wanted{static_cast<float>((1u << (2 + random() % 3)) - 1),
                        static_cast<uint32_t>(random() % bins)};
    std::vector<float> lanes(dim * kSearchRows);
    SearchRows expected{};
    for (size_t r = 0; r < kSearchRows; ++r) {
      std::vector<float> row(dim + 1);  // one more, so that no range is 0
      testing::fill_row(r % 3 == 0 ? Kind::kTies : Kind::kNormal, random, row.data(), dim);
      for (uint32_t i = 0; i < dim; ++i) lanes[i * kSearchRows + r] = row[i];
      float high;
      kScalarKernels.range_of(row.data(), dim + 1, &expected.minimum[r], &high);
      expected.range[r] = high - expected.minimum[r] + 1e-20f;
      expected.step[r] = expected.range[r] / static_cast<float>(bins);
    }
    SearchRows actual = expected;
    kScalarKernels.search(lanes.data(), dim, wanted, &expected);
    wide().search(lanes.data(), dim, wanted, &actual);
    ASSERT_EQ(0, std::memcmp(&expected, &actual, sizeof actual))
        << "dim " << dim << " bins " << bins << " seed " << testing::seed();
  }
}

// If both ends are equally good, the upper one moves (FORMAT.md).
TEST_P(WideLevel, ATieOfTheSearchMovesTheUpperEnd) {
  const std::vector<float> row = {0, 8, 8, 8,
                                  8, 8, 16};  // 16 bins and 15 levels: all sums are exact
  std::vector<float> lanes;
  for (const float value : row) lanes.insert(lanes.end(), kSearchRows, value);
  for (const Kernels* kernels : {&kScalarKernels, &wide()}) {
    SearchRows rows{};
    std::fill_n(rows.range, kSearchRows, 16.0f);
    std::fill_n(rows.step, kSearchRows, 1.0f);
    kernels->search(lanes.data(), static_cast<uint32_t>(row.size()), {15.0f, 1}, &rows);
    for (size_t r = 0; r < kSearchRows; ++r) {
      ASSERT_EQ(1.0f, rows.moved[r]);
      ASSERT_EQ(0.0f, rows.low[r]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, WideLevel, ::testing::Values(Level::kAvx2, Level::kAvx512),
                         [](const auto& level) { return std::string(level_name(level.param)); });

#if defined(__aarch64__)
#define PETPS_COMPILERS_HALF __fp16  // older compilers for it lack _Float16
#elif defined(__FLT16_MANT_DIG__)
#define PETPS_COMPILERS_HALF _Float16
#endif
#ifdef PETPS_COMPILERS_HALF
TEST(ScalarValues, F16EqualsTheCompilersConversion) {
  using Half = PETPS_COMPILERS_HALF;
  for (uint32_t i = 0; i < 1u << 16; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    Half half;
    std::memcpy(&half, &bits, sizeof(half));
    const auto theirs = static_cast<float>(half);
    ASSERT_EQ(std::bit_cast<uint32_t>(theirs), std::bit_cast<uint32_t>(f16_value(bits))) << i;
  }
  std::mt19937_64 random(testing::seed());
  for (int i = 0; i < 2'000'000; ++i) {
    const float value = testing::any_bits(random);
    const auto half = static_cast<Half>(value);
    uint16_t bits;
    std::memcpy(&bits, &half, sizeof(bits));
    ASSERT_EQ(bits, f16_of(value)) << std::bit_cast<uint32_t>(value) << " seed " << testing::seed();
  }
}
#endif

TEST(ScalarValues, Bf16IsTheNearestEven) {
  std::mt19937_64 random(testing::seed());
  for (int i = 0; i < 500'000; ++i) {
    const float value = testing::finite_bits(random);
    const uint16_t nearest = bf16_of(value);
    const double error = std::abs(static_cast<double>(bf16_value(nearest)) - value);
    if (!is_finite_value(bf16_value(nearest))) continue;  // above the largest value
    for (const int step : {-1, 1}) {
      const float other = bf16_value(static_cast<uint16_t>(nearest + step));
      if (!is_finite_value(other)) continue;
      const double other_error = std::abs(static_cast<double>(other) - value);
      ASSERT_LE(error, other_error) << value;
      if (error == other_error) {
        ASSERT_EQ(0, nearest & 1) << value;
      }
    }
  }
}

}  // namespace
}  // namespace petps::codec
