// Tests of GatherList against a slow model, a vector of the same bytes. They do not cover the
// speed of prefetching (bench/micro does).
#include "gather/gather.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "tests/seed.h"

namespace petps::gather {
namespace {

std::vector<std::byte> bytes_of(const GatherList& list) {
  std::vector<std::byte> out(list.bytes());
  list.copy_to(out.data());
  return out;
}

std::vector<std::byte> bytes_by_iovecs(const GatherList& list, size_t most,
                                       std::mt19937_64& random) {
  std::vector<std::byte> out;
  std::vector<iovec> iovecs(most);
  Position at;
  while (!list.at_end(at)) {
    const size_t n = list.fill_iovecs(at, iovecs);
    if (n == 0) break;
    size_t total = 0;
    for (size_t i = 0; i < n; ++i) total += iovecs[i].iov_len;
    const size_t taken = 1 + random() % total;  // a partial write
    size_t left = taken;
    for (size_t i = 0; i < n && left > 0; ++i) {
      const size_t part = std::min(left, iovecs[i].iov_len);
      const auto* from = static_cast<const std::byte*>(iovecs[i].iov_base);
      out.insert(out.end(), from, from + part);
      left -= part;
    }
    at = list.advance(at, taken);
  }
  return out;
}

TEST(Gather, MergesNeighbours) {
  const std::vector<std::byte> memory(64);
  GatherList list;
  list.header(8);
  list.add(memory.data(), 16);
  list.add(memory.data() + 16, 16);
  list.add(memory.data() + 40, 8);
  EXPECT_EQ(list.pieces(), 2u);
  EXPECT_EQ(list.bytes(), 48u);
}

TEST(Gather, EmptyListHasNothingToSend) {
  GatherList list;
  EXPECT_TRUE(list.empty());
  std::array<iovec, 2> iovecs;
  EXPECT_EQ(list.fill_iovecs({}, iovecs), 0u);
  EXPECT_TRUE(list.at_end(list.advance({}, 0)));
}

TEST(Gather, ClearKeepsTheMemory) {
  const std::vector<std::byte> memory(1 << 16);
  GatherList list;
  const std::byte* header = nullptr;
  for (int round = 0; round < 3; ++round) {
    list.clear();
    const std::span<std::byte> head = list.header(round == 0 ? 4096 : 64);
    if (round == 0) header = head.data();
    EXPECT_EQ(head.data(), header);
    for (size_t i = 0; i < 500; ++i) list.add(memory.data() + i * 128, 64);
    EXPECT_EQ(list.pieces(), 500u);
    EXPECT_EQ(list.bytes(), head.size() + 500 * 64);
  }
}

TEST(Gather, AppendedBytesComeBetweenHeaderAndPieces) {
  std::vector<std::byte> memory(1000);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i);
  GatherList list;
  for (int round = 0; round < 2; ++round) {
    list.clear();
    const std::span<std::byte> head = list.header(16, 300);
    std::fill(head.begin(), head.end(), std::byte{0xAB});
    for (size_t i = 0; i < 3; ++i) list.append(memory.data() + i * 100, 100);
    list.add(memory.data() + 300, 50);
    std::vector<std::byte> expected(366, std::byte{0xAB});
    std::memcpy(expected.data() + 16, memory.data(), 350);
    EXPECT_EQ(bytes_of(list), expected);
    EXPECT_EQ(list.header_bytes().size(), 316u);
  }
}

TEST(Gather, EqualsTheModel) {
  const uint64_t seed = tests::seed();
  std::mt19937_64 random(seed);
  std::vector<std::byte> memory(1 << 16);
  for (std::byte& b : memory) b = static_cast<std::byte>(random());
  GatherList list;
  for (int round = 0; round < 300; ++round) {
    list.clear();
    std::vector<std::byte> model(random() % 200);
    for (std::byte& b : model) b = static_cast<std::byte>(random());
    list.assign(model);
    const size_t pieces = random() % 40;
    const std::byte* next = memory.data();
    for (size_t i = 0; i < pieces; ++i) {
      const size_t n = random() % 3000;
      const bool neighbour = random() % 3 == 0 && next + n <= memory.data() + memory.size();
      const std::byte* at = neighbour ? next : memory.data() + random() % (memory.size() - n);
      list.add(at, n);
      model.insert(model.end(), at, at + n);
      next = at + n;
    }
    ASSERT_EQ(list.bytes(), model.size());
    ASSERT_EQ(bytes_of(list), model);
    ASSERT_EQ(bytes_by_iovecs(list, 1 + random() % 8, random), model);
    // Copy the rest from a random position.
    const size_t skip = model.empty() ? 0 : random() % model.size();
    std::vector<std::byte> rest(model.size() - skip);
    list.copy_from(list.advance({}, skip), rest.data());
    ASSERT_TRUE(std::equal(rest.begin(), rest.end(), model.begin() + static_cast<ptrdiff_t>(skip)));
  }
}

}  // namespace
}  // namespace petps::gather
