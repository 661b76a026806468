// Quantised rows: bytes, error bounds, and rows that cannot be represented. levels_test.cc compares
// the wide loops with the scalar loops; tests/python/codec compares the search with the paper's.
#include "codec/quantise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "codec/codec.h"
#include "codec/values.h"
#include "rows.h"

namespace petps::codec {
namespace {

using testing::Kind;

constexpr Method kMethods[] = {Method::kSymmetric, Method::kAsymmetric, Method::kAdaptive,
                               Method::kKmeans};
constexpr uint32_t kBits[] = {2, 3, 4, 8};

std::vector<std::byte> quantise_all(const Quantisation& wanted, const std::vector<float>& rows,
                                    uint32_t dim) {
  const size_t n = rows.size() / dim;
  std::vector<std::byte> out(n * quantised_row_bytes(wanted, dim) + 1, std::byte{0xa5});
  EXPECT_EQ(n, quantise(wanted, rows.data(), n, dim, out.data()));
  EXPECT_EQ(std::byte{0xa5}, out.back()) << "wrote past the end";
  out.pop_back();
  return out;
}

std::vector<float> dequantise_all(const Quantisation& written, const std::vector<std::byte>& rows,
                                  uint32_t dim) {
  const size_t n = rows.size() / quantised_row_bytes(written, dim);
  std::vector<float> out(n * dim + 1, -7.0f);
  dequantise(written, rows.data(), n, dim, out.data());
  EXPECT_EQ(-7.0f, out.back()) << "wrote past the end";
  out.pop_back();
  return out;
}

std::string hex_of(const Quantisation& wanted, const std::vector<float>& row) {
  std::string text;
  constexpr char kDigits[] = "0123456789abcdef";
  for (const std::byte byte : quantise_all(wanted, row, row.size())) {
    text += kDigits[std::to_integer<int>(byte) >> 4];
    text += kDigits[std::to_integer<int>(byte) & 15];
  }
  return text;
}

TEST(QuantiseGolden, MethodsKeepTheirNumbers) {
  EXPECT_EQ(0, static_cast<int>(Method::kSymmetric));
  EXPECT_EQ(1, static_cast<int>(Method::kAsymmetric));
  EXPECT_EQ(2, static_cast<int>(Method::kAdaptive));
  EXPECT_EQ(3, static_cast<int>(Method::kKmeans));
}

// A change here would change the rows of all existing checkpoints.
TEST(QuantiseGolden, RowsKeepTheirBytes) {
  // Scale 1, zero 0: the codes follow the first eight bytes.
  EXPECT_EQ(
      "0000803f00000000"
      "10f2",
      hex_of({Method::kAsymmetric, 4}, {0, 1, 2, 15}));
  EXPECT_EQ(
      "0000803f00000000"
      "10f208",
      hex_of({Method::kAsymmetric, 4}, {0, 1, 2, 15, 8}));
  EXPECT_EQ(
      "0000803f00000000"
      "88c6fa"
      "01",  // 0 1 2 3 4 5 6 7 | 1: three bits each, lowest first
      hex_of({Method::kAsymmetric, 3}, {0, 1, 2, 3, 4, 5, 6, 7, 1}));
  EXPECT_EQ(
      "0000803f00000000"
      "e4"
      "03",
      hex_of({Method::kAsymmetric, 2}, {0, 1, 2, 3, 3}));
  EXPECT_EQ(
      "0000803f00000000"
      "00ff07",
      hex_of({Method::kAsymmetric, 8}, {0, 255, 7}));
  EXPECT_EQ(
      "0000803f0000f0c0"
      "0f",
      hex_of({Method::kSymmetric, 4}, {7.5f, -7.5f}))
      << "zero -7.5";
  EXPECT_EQ(
      "0000803f0000f0c0"
      "af",
      hex_of({Method::kSymmetric, 4}, {7.5f, 2.25f}))
      << "zero -7.5";
}

TEST(QuantiseGolden, TiesRoundToEven) {
  const std::vector<float> row = {0, 0.5f, 1.5f, 2.5f, 3.5f, 15};
  const Quantisation wanted{Method::kAsymmetric, 4};
  EXPECT_EQ((std::vector<float>{0, 0, 2, 2, 4, 15}),
            dequantise_all(wanted, quantise_all(wanted, row, 6), 6));
}

TEST(Quantise, AsymmetricWithEightBitsIsDtypeInt8) {
  std::mt19937_64 random(testing::seed());
  for (uint32_t dim = 1; dim < 70; ++dim) {
    std::vector<float> rows(5 * dim);
    for (size_t r = 0; r < 5; ++r)
      testing::fill_row(Kind::kNormal, random, rows.data() + r * dim, dim);
    std::vector<std::byte> stored(5 * row_bytes(Dtype::kInt8, dim));
    encode(Dtype::kInt8, rows.data(), 5, dim, stored.data());
    ASSERT_EQ(stored, quantise_all({Method::kAsymmetric, 8}, rows, dim));
  }
}

TEST(Quantise, ValuesOnTheGridAreExactForEveryDim) {
  std::mt19937_64 random(testing::seed());
  for (const uint32_t bits : kBits) {
    for (uint32_t dim = 2; dim <= 1100; dim += dim < 40 ? 1 : 53) {  // crosses the pieces of 512
      std::vector<float> row(dim);
      for (float& value : row) value = static_cast<float>(random() % (1u << bits));
      row[0] = 0;
      row[dim - 1] = static_cast<float>((1u << bits) - 1);
      const Quantisation wanted{Method::kAsymmetric, bits};
      ASSERT_EQ(row, dequantise_all(wanted, quantise_all(wanted, row, dim), dim))
          << bits << " bits, dim " << dim << " seed " << testing::seed();
    }
  }
}

double l2(const float* row, const float* other, uint32_t dim) {
  double sum = 0;
  for (uint32_t i = 0; i < dim; ++i)
    sum += (static_cast<double>(row[i]) - other[i]) * (static_cast<double>(row[i]) - other[i]);
  return std::sqrt(sum);
}

TEST(Quantise, ErrorIsBelowHalfAStepAndAdaptiveIsNoWorse) {
  std::mt19937_64 random(testing::seed());
  for (int round = 0; round < 3000; ++round) {
    const uint32_t dim = 1 + static_cast<uint32_t>(random() % 70);
    const uint32_t bits = kBits[random() % 4];
    const Kind kind =
        std::vector{Kind::kNormal, Kind::kTiny, Kind::kConstant, Kind::kTies}[random() % 4];
    std::vector<float> row(dim);
    testing::fill_row(kind, random, row.data(), dim);
    double magnitude = 0;
    for (const float value : row) magnitude = std::max(magnitude, std::abs(double{value}));
    double plain = 0;
    for (const Method method : {Method::kSymmetric, Method::kAsymmetric}) {
      if (method == Method::kSymmetric && 2 * magnitude > std::numeric_limits<float>::max())
        continue;
      const Quantisation wanted{method, bits};
      const auto stored = quantise_all(wanted, row, dim);
      const auto decoded = dequantise_all(wanted, stored, dim);
      const double limit =
          load<float>(stored.data()) / 2 + 4 * 0x1p-24 * 2 * magnitude + 256 * 0x1p-149;
      for (uint32_t i = 0; i < dim; ++i) {
        ASSERT_LE(std::abs(static_cast<double>(decoded[i]) - row[i]), limit)
            << bits << " bits dim " << dim << " seed " << testing::seed();
      }
      plain = l2(row.data(), decoded.data(), dim);
    }
    const Quantisation adaptive{Method::kAdaptive, bits, 1 + static_cast<uint32_t>(random() % 60),
                                static_cast<double>(random() % 11) / 10};
    const auto decoded = dequantise_all(adaptive, quantise_all(adaptive, row, dim), dim);
    ASSERT_LE(l2(row.data(), decoded.data(), dim), plain * 1.00001 + magnitude * 1e-5)
        << bits << " bits dim " << dim << " seed " << testing::seed();
  }
}

TEST(Quantise, ConstantRowsAreExact) {
  for (const float value : {0.0f, -0.0f, 1.5f, -3e38f, 1e-45f, std::numeric_limits<float>::max()}) {
    for (const uint32_t bits : kBits) {
      for (const Method method : {Method::kAsymmetric, Method::kAdaptive, Method::kKmeans}) {
        const std::vector<float> row(37, value);
        const Quantisation wanted{method, bits};
        ASSERT_EQ(row, dequantise_all(wanted, quantise_all(wanted, row, 37), 37)) << value;
      }
    }
  }
}

TEST(Quantise, ReturnsTheFirstRowThatCannotBeRepresented) {
  std::mt19937_64 random(testing::seed());
  for (const Method method : kMethods) {
    for (const uint32_t bits : kBits) {
      for (int round = 0; round < 50; ++round) {
        const uint32_t dim = 1 + static_cast<uint32_t>(random() % 40);
        const size_t n = 1 + random() % 100;
        std::vector<float> rows(n * dim, 0.25f);
        for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(random() % 100);
        const size_t bad = random() % n;
        testing::fill_row(Kind::kNotFinite, random, rows.data() + bad * dim, dim);
        rows[n * dim - 1] = std::numeric_limits<float>::infinity();  // a later one has no effect
        const Quantisation wanted{method, bits};
        std::vector<std::byte> out(n * quantised_row_bytes(wanted, dim));
        ASSERT_EQ(bad, quantise(wanted, rows.data(), n, dim, out.data()))
            << "method " << static_cast<int>(method) << " seed " << testing::seed();
      }
    }
  }
  constexpr float kMax = std::numeric_limits<float>::max();
  const float wide[] = {1, 2, -kMax, kMax};
  std::byte out[256];
  for (const Method method : {Method::kSymmetric, Method::kAsymmetric, Method::kAdaptive}) {
    EXPECT_EQ(1u, quantise({method, 4}, wide, 2, 2, out)) << "a range beyond float32";
  }
}

TEST(Quantise, ARowHasTheSameBytesAtAnyPosition) {
  std::mt19937_64 random(testing::seed());
  for (const Method method : kMethods) {
    for (const uint32_t bits : kBits) {
      const uint32_t dim = 1 + static_cast<uint32_t>(random() % 40);
      std::vector<float> rows(37 * dim);
      for (size_t r = 0; r < 37; ++r) {
        const Kind kind = r % 5 == 0 ? Kind::kConstant : r % 7 == 0 ? Kind::kTiny : Kind::kNormal;
        testing::fill_row(kind, random, rows.data() + r * dim, dim);
      }
      const Quantisation wanted{method, bits};
      if (method == Method::kSymmetric) {
        for (float& value : rows) value = std::clamp(value, -1e30f, 1e30f);
      }
      const auto together = quantise_all(wanted, rows, dim);
      const size_t bytes = quantised_row_bytes(wanted, dim);
      for (size_t r = 0; r < 37; ++r) {
        const std::vector<float> row(rows.begin() + r * dim, rows.begin() + (r + 1) * dim);
        const auto alone = quantise_all(wanted, row, dim);
        ASSERT_EQ(0, std::memcmp(together.data() + r * bytes, alone.data(), bytes)) << r;
      }
    }
  }
}

TEST(Quantise, AnyBytesDecode) {
  std::mt19937_64 random(testing::seed());
  for (int round = 0; round < 500; ++round) {
    const Quantisation written{kMethods[random() % 4], kBits[random() % 4]};
    const uint32_t dim = 1 + static_cast<uint32_t>(random() % 600);
    std::vector<std::byte> stored(3 * quantised_row_bytes(written, dim));
    for (std::byte& byte : stored) byte = static_cast<std::byte>(random());
    dequantise_all(written, stored, dim);
  }
  std::vector<std::byte> stored(quantised_row_bytes({Method::kAdaptive, 4}, 5));
  store(stored.data(), std::numeric_limits<float>::infinity());
  for (const float value : dequantise_all({Method::kAdaptive, 4}, stored, 5))
    EXPECT_TRUE(std::isnan(value));
}

TEST(Quantise, KmeansStartsFromElementsAndEndsAtMeans) {
  std::mt19937_64 random(testing::seed());
  for (int round = 0; round < 300; ++round) {
    const uint32_t dim = 1 + static_cast<uint32_t>(random() % 80);
    std::vector<float> row(dim);
    testing::fill_row(Kind::kNormal, random, row.data(), dim);
    const Quantisation wanted{Method::kKmeans, 2, 25, 1.0, random()};
    const auto stored = quantise_all(wanted, row, dim);
    const auto decoded = dequantise_all(wanted, stored, dim);
    float codebook[4];
    std::memcpy(codebook, stored.data(), sizeof codebook);
    for (uint32_t i = 0; i < dim; ++i) {
      for (uint32_t entry = 0; entry < std::min(dim, 4u); ++entry) {
        ASSERT_LE(std::abs(row[i] - decoded[i]), std::abs(row[i] - codebook[entry]))
            << "seed " << testing::seed();
      }
    }
    if (dim <= 4) {
      ASSERT_EQ(row, decoded) << "each value is its own mean";
    }
  }
}

TEST(Quantise, InvalidSettingsAreRefused) {
  EXPECT_TRUE(check({Method::kAdaptive, 3, 1, 0.0}).ok());
  for (const uint32_t bits : {0u, 1u, 5u, 7u, 16u}) {
    EXPECT_NE(std::string::npos,
              check({Method::kAsymmetric, bits}).message().find("is none of 2, 3, 4 and 8"));
  }
  EXPECT_EQ("bins 0 is outside 1..1024", check({Method::kAdaptive, 4, 0}).message());
  EXPECT_EQ("bins 1025 is outside 1..1024", check({Method::kAdaptive, 4, 1025}).message());
  EXPECT_NE(std::string::npos, check({Method::kAdaptive, 4, 9, 1.5}).message().find("ratio 1.5"));
  EXPECT_FALSE(check({Method::kAdaptive, 4, 9, std::nan("")}).ok());
  EXPECT_NE(std::string::npos, parse_method("best").status().message().find("method 'best'"));
  EXPECT_EQ(Method::kKmeans, parse_method("kmeans").value());
}

}  // namespace
}  // namespace petps::codec
