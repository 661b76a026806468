// The bytes of native/codec/FORMAT.md. A change here would change the rows of all existing pools.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "codec/codec.h"

namespace petps::codec {
namespace {

constexpr float kRow[] = {0.0f, -0.0f, 1.0f, -2.5f, 0.1f, 65504.0f, 1e-7f, 3.0e38f};

std::string hex_of(Dtype dtype, const float* row, uint32_t dim) {
  std::vector<std::byte> stored(row_bytes(dtype, dim));
  encode(dtype, row, 1, dim, stored.data());
  std::string text;
  constexpr char kDigits[] = "0123456789abcdef";
  for (const std::byte byte : stored) {
    text += kDigits[std::to_integer<int>(byte) >> 4];
    text += kDigits[std::to_integer<int>(byte) & 15];
  }
  return text;
}

TEST(Golden, DtypesKeepTheirNumbers) {
  EXPECT_EQ(0, static_cast<int>(Dtype::kF32));
  EXPECT_EQ(1, static_cast<int>(Dtype::kF16));
  EXPECT_EQ(2, static_cast<int>(Dtype::kBf16));
  EXPECT_EQ(3, static_cast<int>(Dtype::kInt8));
}

TEST(Golden, FloatsKeepTheirBytes) {
  EXPECT_EQ("00000000000000800000803f000020c0cdcccc3d00e07f4795bfd633e6b1617f",
            hex_of(Dtype::kF32, kRow, 8));
  EXPECT_EQ("00000080003c00c1662eff7b0200007c", hex_of(Dtype::kF16, kRow, 8));
  EXPECT_EQ("00000080803f20c0cd3d8047d733627f", hex_of(Dtype::kBf16, kRow, 8));
}

TEST(Golden, Int8KeepsItsBytes) {
  const float row[] = {-1.0f, 0.0f, 0.25f, 1.55f};  // scale 0.01
  EXPECT_EQ("0ad7233c000080bf00647dff", hex_of(Dtype::kInt8, row, 4));
  const float tie[] = {0.0f, 127.5f, 255.0f};
  EXPECT_EQ("0000803f000000000080ff", hex_of(Dtype::kInt8, tie, 3));
  const float constant[] = {-2.5f, -2.5f};
  EXPECT_EQ("00000000000020c00000", hex_of(Dtype::kInt8, constant, 2));
  const float odd[] = {1.0f, std::numeric_limits<float>::infinity()};
  EXPECT_EQ("000000000000c07f0000", hex_of(Dtype::kInt8, odd, 2));
  const float widest[] = {
      0.0f, std::numeric_limits<float>::max()};  // scale * 255 must not become infinite
  EXPECT_EQ("8080807b0000000000ff", hex_of(Dtype::kInt8, widest, 2));
  const float too_wide[] = {-std::numeric_limits<float>::max(), std::numeric_limits<float>::max()};
  EXPECT_EQ("000000000000c07f0000", hex_of(Dtype::kInt8, too_wide, 2));
}

}  // namespace
}  // namespace petps::codec
