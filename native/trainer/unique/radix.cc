#include "trainer/unique/radix.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

namespace petps::unique {
namespace {

constexpr size_t kDigits = 8;  // bytes of an id
constexpr size_t kRadix = 256;

using Counts = std::array<std::array<uint32_t, kRadix>, kDigits>;

size_t digit_of(uint64_t id, size_t digit) { return (id >> (8 * digit)) & (kRadix - 1); }

}  // namespace

void radix_sort(std::span<uint64_t> ids, uint64_t* ids_room, uint32_t* order,
                uint32_t* order_room) {
  Counts counts{};
  for (const uint64_t id : ids) {
    for (size_t digit = 0; digit < kDigits; ++digit) counts[digit][digit_of(id, digit)] += 1;
  }
  const size_t n = ids.size();
  uint64_t* from = ids.data();
  uint64_t* to = ids_room;
  for (size_t digit = 0; digit < kDigits; ++digit) {
    auto& next = counts[digit];
    if (n == 0 || next[digit_of(ids[0], digit)] == n) continue;  // the digit of all ids is equal
    uint32_t sum = 0;
    for (uint32_t& count : next) sum += std::exchange(count, sum);
    for (size_t i = 0; i < n; ++i) {
      const size_t place = next[digit_of(from[i], digit)]++;
      to[place] = from[i];
      if (order != nullptr) order_room[place] = order[i];
    }
    std::swap(from, to);
    std::swap(order, order_room);
  }
  if (from == ids.data()) return;
  std::copy(from, from + n, to);
  if (order != nullptr) std::copy(order, order + n, order_room);
}

}  // namespace petps::unique
