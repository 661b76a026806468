#include "codec/codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/values.h"
#include "rows.h"

namespace petps::codec {
namespace {

using testing::Kind;

constexpr Dtype kAll[] = {Dtype::kF32, Dtype::kF16, Dtype::kBf16, Dtype::kInt8};

TEST(Dtype, ParsesItsOwnNamesOnly) {
  for (const Dtype dtype : kAll) {
    const auto parsed = parse_dtype(dtype_name(dtype));
    ASSERT_TRUE(parsed.ok());
    EXPECT_EQ(dtype, parsed.value());
    EXPECT_TRUE(is_dtype(static_cast<uint8_t>(dtype)));
  }
  EXPECT_FALSE(is_dtype(4));
  EXPECT_EQ("unknown", dtype_name(static_cast<Dtype>(200)));
  const base::Status unknown = parse_dtype("float32").status();
  EXPECT_EQ(base::Code::kInvalidArgument, unknown.code());
  EXPECT_EQ("dtype 'float32' is unknown: use f32, f16, bf16 or int8", unknown.message());
}

TEST(Dtype, RowBytes) {
  EXPECT_EQ(512u, row_bytes(Dtype::kF32, 128));
  EXPECT_EQ(256u, row_bytes(Dtype::kF16, 128));
  EXPECT_EQ(256u, row_bytes(Dtype::kBf16, 128));
  EXPECT_EQ(136u, row_bytes(Dtype::kInt8, 128));
}

TEST(Codec, WithoutRowsNoMemoryIsUsed) {
  for (const Dtype dtype : kAll) {
    encode(dtype, nullptr, 0, 8, nullptr);
    decode(dtype, nullptr, 0, 8, nullptr);
  }
  EXPECT_EQ(0u, first_not_finite(nullptr, 0, 8));
}

TEST(Codec, F32IsBitExactForEveryPattern) {
  std::mt19937_64 random(testing::seed());
  std::vector<float> rows(64 * 33);
  for (float& value : rows) value = testing::any_bits(random);
  std::vector<std::byte> stored(rows.size() * 4 + 3);
  encode(Dtype::kF32, rows.data(), 64, 33, stored.data() + 3);
  std::vector<float> decoded(rows.size());
  decode(Dtype::kF32, stored.data() + 3, 64, 33, decoded.data());
  EXPECT_EQ(0, std::memcmp(rows.data(), decoded.data(), rows.size() * 4));
}

TEST(Codec, EncodingDecodedRowsGivesTheSameBytes) {
  std::mt19937_64 random(testing::seed());
  for (const Dtype dtype : {Dtype::kF16, Dtype::kBf16}) {
    std::vector<float> rows(100 * 65);
    for (int i = 0; i < 100; ++i) testing::fill_row(Kind::kWide, random, rows.data() + i * 65, 65);
    std::vector<std::byte> stored(rows.size() * 2);
    std::vector<std::byte> again(rows.size() * 2);
    encode(dtype, rows.data(), 100, 65, stored.data());
    decode(dtype, stored.data(), 100, 65, rows.data());
    encode(dtype, rows.data(), 100, 65, again.data());
    EXPECT_EQ(stored, again) << dtype_name(dtype);
  }
}

TEST(Codec, Int8ErrorIsBounded) {
  std::mt19937_64 random(testing::seed());
  for (const Kind kind :
       {Kind::kNormal, Kind::kWide, Kind::kTiny, Kind::kConstant, Kind::kExtreme, Kind::kTies}) {
    for (int round = 0; round < 400; ++round) {
      const uint32_t dim = 1 + static_cast<uint32_t>(random() % 300);
      std::vector<float> row(dim);
      testing::fill_row(kind, random, row.data(), dim);
      std::vector<std::byte> stored(row_bytes(Dtype::kInt8, dim));
      encode(Dtype::kInt8, row.data(), 1, dim, stored.data());
      std::vector<float> decoded(dim);
      decode(Dtype::kInt8, stored.data(), 1, dim, decoded.data());
      const auto [low, high] = std::minmax_element(row.begin(), row.end());
      if (!is_finite_value(*high - *low)) {
        ASSERT_EQ(0u, first_not_finite_stored(Dtype::kInt8, stored.data(), 1, dim));
        continue;
      }
      const double largest =
          std::max(std::abs(static_cast<double>(*low)), std::abs(static_cast<double>(*high)));
      const double scale = load<float>(stored.data());
      const double bound = scale / 2 + 4 * std::ldexp(largest, -24) + std::ldexp(128.0, -149);
      for (uint32_t i = 0; i < dim; ++i) {
        ASSERT_LE(std::abs(static_cast<double>(decoded[i]) - row[i]), bound)
            << "kind " << static_cast<int>(kind) << " value " << row[i] << " seed "
            << testing::seed();
      }
      EXPECT_EQ(*low, decoded[static_cast<size_t>(low - row.begin())]) << "the minimum is exact";
    }
  }
}

TEST(Codec, Int8RoundsHalvesToEven) {
  const float row[] = {0.0f, 0.5f, 1.5f, 2.5f, 253.5f, 254.5f, 255.0f};
  std::byte stored[8 + 7];
  encode(Dtype::kInt8, row, 1, 7, stored);
  EXPECT_EQ(1.0f, load<float>(stored));
  const int expected[] = {0, 0, 2, 2, 254, 254, 255};
  for (int i = 0; i < 7; ++i) EXPECT_EQ(expected[i], std::to_integer<int>(stored[8 + i])) << row[i];
}

TEST(Codec, Int8ConstantRowsAreExact) {
  for (const float value : {0.0f, -0.0f, 1.25f, -3e38f, 3.4028235e38f, 1e-45f}) {
    const std::vector<float> row(37, value);
    std::vector<std::byte> stored(row_bytes(Dtype::kInt8, 37));
    encode(Dtype::kInt8, row.data(), 1, 37, stored.data());
    EXPECT_EQ(0.0f, load<float>(stored.data()));
    std::vector<float> decoded(37);
    decode(Dtype::kInt8, stored.data(), 1, 37, decoded.data());
    EXPECT_EQ(row, decoded);
  }
}

TEST(Codec, Int8RowsThatAreNotFiniteDecodeToNan) {
  std::mt19937_64 random(testing::seed());
  for (uint32_t dim = 1; dim < 70; ++dim) {
    std::vector<float> rows(2 * dim);
    testing::fill_row(Kind::kNotFinite, random, rows.data(), dim);
    testing::fill_row(Kind::kConstant, random, rows.data() + dim, dim);
    std::vector<std::byte> stored(2 * row_bytes(Dtype::kInt8, dim));
    encode(Dtype::kInt8, rows.data(), 2, dim, stored.data());
    std::vector<float> decoded(2 * dim);
    decode(Dtype::kInt8, stored.data(), 2, dim, decoded.data());
    for (uint32_t i = 0; i < dim; ++i) {
      EXPECT_TRUE(std::isnan(decoded[i]));
      EXPECT_EQ(rows[dim + i], decoded[dim + i]) << "the next row is decoded correctly";
    }
  }
}

TEST(Codec, FirstNotFiniteReturnsTheRow) {
  std::vector<float> rows(10 * 19, 0.5f);
  EXPECT_EQ(10u, first_not_finite(rows.data(), 10, 19));
  rows[9 * 19 + 18] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(9u, first_not_finite(rows.data(), 10, 19));
  rows[3 * 19] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(3u, first_not_finite(rows.data(), 10, 19));
}

TEST(Codec, FirstNotFiniteStoredAgreesWithTheDecodedRows) {
  std::mt19937_64 random(testing::seed());
  for (const Dtype dtype : kAll) {
    for (int round = 0; round < 3000; ++round) {
      const uint32_t dim = 1 + static_cast<uint32_t>(random() % 40);
      std::vector<float> rows(4 * dim);
      for (size_t i = 0; i < 4; ++i) {
        const Kind kind =
            round % 3 == 0 ? Kind::kNormal : testing::kKinds[random() % std::size(testing::kKinds)];
        testing::fill_row(kind, random, rows.data() + i * dim, dim);
      }
      std::vector<std::byte> stored(4 * row_bytes(dtype, dim));
      encode(dtype, rows.data(), 4, dim, stored.data());
      std::vector<float> decoded(4 * dim);
      decode(dtype, stored.data(), 4, dim, decoded.data());
      ASSERT_EQ(first_not_finite(decoded.data(), 4, dim),
                first_not_finite_stored(dtype, stored.data(), 4, dim))
          << dtype_name(dtype) << " seed " << testing::seed();
    }
  }
}

}  // namespace
}  // namespace petps::codec
