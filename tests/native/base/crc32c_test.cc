#include "base/crc32c.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "base/cpu.h"

namespace petps::base {
namespace {

// The slow, simple model: one bit at a time.
uint32_t crc32c_by_bits(uint32_t crc, const uint8_t* data, size_t size) {
  crc = ~crc;
  for (size_t i = 0; i < size; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0);
  }
  return ~crc;
}

std::vector<uint8_t> random_bytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

TEST(Crc32c, StandardVectors) {  // RFC 3720, B.4
  EXPECT_EQ(crc32c("", 0), 0u);
  EXPECT_EQ(crc32c("123456789", 9), 0xE3069283u);
  std::vector<uint8_t> bytes(32, 0x00);
  EXPECT_EQ(crc32c(bytes.data(), bytes.size()), 0x8A9136AAu);
  bytes.assign(32, 0xFF);
  EXPECT_EQ(crc32c(bytes.data(), bytes.size()), 0x62A8AB43u);
  for (size_t i = 0; i < 32; ++i) bytes[i] = static_cast<uint8_t>(i);
  EXPECT_EQ(crc32c(bytes.data(), bytes.size()), 0x46DD794Eu);
}

using Path = uint32_t (*)(uint32_t, const void*, size_t);

void expect_equals_model(Path path) {
  const std::vector<uint8_t> bytes = random_bytes(2600, 1);
  for (size_t size = 0; size <= 2100; ++size) {
    const size_t offset = size % 67;  // every alignment within a cache line, and more
    ASSERT_EQ(path(0, bytes.data() + offset, size), crc32c_by_bits(0, bytes.data() + offset, size))
        << "size " << size;
    ASSERT_EQ(path(0xDEADBEEFu, bytes.data() + offset, size),
              crc32c_by_bits(0xDEADBEEFu, bytes.data() + offset, size))
        << "size " << size;
  }
  const std::vector<uint8_t> row = random_bytes(16384, 2);  // dim 4096 f32, the widest row
  EXPECT_EQ(path(0, row.data(), row.size()), crc32c_by_bits(0, row.data(), row.size()));
}

TEST(Crc32c, ChosenPathEqualsModel) { expect_equals_model(crc32c_extend); }

TEST(Crc32c, InstructionEqualsModel) { expect_equals_model(crc32c_paths::instruction); }

#ifdef __x86_64__

TEST(Crc32c, PclmulEqualsModel) {
  if (!cpu_features().pclmul) GTEST_SKIP() << "this processor has no pclmul";
  expect_equals_model(crc32c_paths::pclmul);
}

TEST(Crc32c, VpclmulqdqEqualsModel) {
  if (!cpu_features().vpclmulqdq) GTEST_SKIP() << "this processor has no vpclmulqdq";
  expect_equals_model(crc32c_paths::vpclmulqdq);
}

#endif

TEST(Crc32c, ExtendIsConcatenation) {
  const std::vector<uint8_t> bytes = random_bytes(700, 3);
  const uint32_t whole = crc32c(bytes.data(), bytes.size());
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    const uint32_t front = crc32c(bytes.data(), cut);
    ASSERT_EQ(crc32c_extend(front, bytes.data() + cut, bytes.size() - cut), whole);
  }
}

TEST(Crc32c, EverySingleBitCounts) {
  std::vector<uint8_t> row = random_bytes(512, 4);
  const uint32_t whole = crc32c(row.data(), row.size());
  for (size_t bit = 0; bit < row.size() * 8; ++bit) {
    row[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    ASSERT_NE(crc32c(row.data(), row.size()), whole) << "bit " << bit;
    row[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
  }
}

}  // namespace
}  // namespace petps::base
