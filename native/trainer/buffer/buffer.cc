#include "trainer/buffer/buffer.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/prefetch.h"

namespace petps::buffer {

namespace {

constexpr size_t kAhead = 16;  // distance in rows of the prefetch

base::Status invalid(std::string message) {
  return base::Status(base::Code::kInvalidArgument, std::move(message));
}

base::Status check(const char* name, Positions positions, size_t n) {
  // One pass without a branch: a negative position becomes a large unsigned number.
  uint64_t greatest = 0;
  for (const int64_t position : positions)
    greatest = std::max(greatest, static_cast<uint64_t>(position));
  if (positions.empty() || greatest < n) return {};
  const auto wrong = std::find_if(positions.begin(), positions.end(), [n](int64_t position) {
    return static_cast<uint64_t>(position) >= n;
  });
  return invalid(std::string(name) + "[" + std::to_string(wrong - positions.begin()) + "] is " +
                 std::to_string(*wrong) + ", but there are " + std::to_string(n) + " rows");
}

base::Status require(bool holds, const char* message) {
  return holds ? base::Status() : invalid(message);
}

void prefetch(const float* row, size_t width) { base::prefetch(row, width * sizeof(float)); }

}  // namespace

base::Status gather(Block<const float> rows, Positions at, Block<float> out) {
  PETPS_RETURN_IF_ERROR(
      require(out.n == at.size() && out.width <= rows.width,
              "gather: out must have one row for each position, not wider than rows"));
  PETPS_RETURN_IF_ERROR(check("at", at, rows.n));
  for (size_t i = 0; i < at.size(); ++i) {
    if (i + kAhead < at.size()) prefetch(rows.row(at[i + kAhead]), out.width);
    std::memcpy(out.row(i), rows.row(at[i]), out.width * sizeof(float));
  }
  return {};
}

base::Status add(Block<float> into, Positions at, Block<const float> rows) {
  PETPS_RETURN_IF_ERROR(require(rows.n == at.size() && rows.width == into.width,
                                "add: rows must have one row for each position, as wide as into"));
  PETPS_RETURN_IF_ERROR(check("at", at, into.n));
  for (size_t i = 0; i < at.size(); ++i) {
    if (i + kAhead < at.size()) prefetch(into.row(at[i + kAhead]), into.width);
    float* const sum = into.row(at[i]);
    const float* const row = rows.row(i);
    for (size_t value = 0; value < into.width; ++value) sum[value] += row[value];
  }
  return {};
}

base::Status copy(Block<float> into, Positions to, Block<const float> rows, Positions from) {
  PETPS_RETURN_IF_ERROR(
      require(to.size() == from.size() && rows.width == into.width,
              "copy: to and from must have equal lengths, and rows and into equal widths"));
  PETPS_RETURN_IF_ERROR(check("to", to, into.n));
  PETPS_RETURN_IF_ERROR(check("from", from, rows.n));
  for (size_t i = 0; i < to.size(); ++i) {
    if (i + kAhead < to.size()) {
      prefetch(rows.row(from[i + kAhead]), rows.width);
      prefetch(into.row(to[i + kAhead]), into.width);
    }
    std::memcpy(into.row(to[i]), rows.row(from[i]), into.width * sizeof(float));
  }
  return {};
}

std::pair<std::vector<int64_t>, std::vector<int64_t>> common(std::span<const uint64_t> left,
                                                             std::span<const uint64_t> right) {
  // A branch on which list advances would be mispredicted often, so each step writes its pair, and
  // only a match keeps it.
  const size_t most = std::min(left.size(), right.size());
  std::pair<std::vector<int64_t>, std::vector<int64_t>> positions{std::vector<int64_t>(most + 1),
                                                                  std::vector<int64_t>(most + 1)};
  size_t l = 0;
  size_t r = 0;
  size_t n = 0;
  while (l < left.size() && r < right.size()) {
    const uint64_t a = left[l];
    const uint64_t b = right[r];
    positions.first[n] = static_cast<int64_t>(l);
    positions.second[n] = static_cast<int64_t>(r);
    n += a == b ? 1 : 0;
    l += a <= b ? 1 : 0;
    r += b <= a ? 1 : 0;
  }
  positions.first.resize(n);
  positions.second.resize(n);
  return positions;
}

}  // namespace petps::buffer
