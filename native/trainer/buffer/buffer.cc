#include "trainer/buffer/buffer.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace petps::buffer {

namespace {

constexpr size_t kAhead = 16;  // distance in rows of the prefetch

base::Status invalid(std::string message) {
  return base::Status(base::Code::kInvalidArgument, std::move(message));
}

base::Status check(const char* what, Positions at, size_t n) {
  // One pass without a branch: a negative position becomes a large unsigned number.
  uint64_t greatest = 0;
  for (const int64_t each : at) greatest = std::max(greatest, static_cast<uint64_t>(each));
  if (at.empty() || greatest < n) return {};
  const auto wrong = std::find_if(at.begin(), at.end(),
                                  [n](int64_t each) { return static_cast<uint64_t>(each) >= n; });
  return invalid(std::string(what) + "[" + std::to_string(wrong - at.begin()) + "] is " +
                 std::to_string(*wrong) + ", but there are " + std::to_string(n) + " rows");
}

base::Status need(bool holds, const char* message) {
  return holds ? base::Status() : invalid(message);
}

void ask_for(const float* row, size_t width) {
  for (size_t at = 0; at < width; at += 16) __builtin_prefetch(row + at);
}

}  // namespace

base::Status gather(Block<const float> rows, Positions at, Block<float> out) {
  PETPS_RETURN_IF_ERROR(need(out.n == at.size() && out.width <= rows.width,
                             "gather: one row a position, no wider than those they come from"));
  PETPS_RETURN_IF_ERROR(check("at", at, rows.n));
  for (size_t i = 0; i < at.size(); ++i) {
    if (i + kAhead < at.size()) ask_for(rows.row(at[i + kAhead]), out.width);
    std::memcpy(out.row(i), rows.row(at[i]), out.width * sizeof(float));
  }
  return {};
}

base::Status add(Block<float> into, Positions at, Block<const float> rows) {
  PETPS_RETURN_IF_ERROR(need(rows.n == at.size() && rows.width == into.width,
                             "add: one row a position, as wide as those they are added to"));
  PETPS_RETURN_IF_ERROR(check("at", at, into.n));
  for (size_t i = 0; i < at.size(); ++i) {
    if (i + kAhead < at.size()) ask_for(into.row(at[i + kAhead]), into.width);
    float* const to = into.row(at[i]);
    const float* const of = rows.row(i);
    for (size_t value = 0; value < into.width; ++value) to[value] += of[value];
  }
  return {};
}

base::Status copy(Block<float> into, Positions to, Block<const float> rows, Positions from) {
  PETPS_RETURN_IF_ERROR(need(to.size() == from.size() && rows.width == into.width,
                             "copy: as many rows to as from, of one width"));
  PETPS_RETURN_IF_ERROR(check("to", to, into.n));
  PETPS_RETURN_IF_ERROR(check("from", from, rows.n));
  for (size_t i = 0; i < to.size(); ++i) {
    if (i + kAhead < to.size()) {
      ask_for(rows.row(from[i + kAhead]), rows.width);
      ask_for(into.row(to[i + kAhead]), into.width);
    }
    std::memcpy(into.row(to[i]), rows.row(from[i]), into.width * sizeof(float));
  }
  return {};
}

std::pair<std::vector<int64_t>, std::vector<int64_t>> common(std::span<const uint64_t> left,
                                                             std::span<const uint64_t> right) {
  // Which list advances is as unpredictable as the keys, so compute it without a branch. Every step
  // writes its pair, and only a match keeps it.
  const size_t most = std::min(left.size(), right.size());
  std::pair<std::vector<int64_t>, std::vector<int64_t>> found{std::vector<int64_t>(most + 1),
                                                              std::vector<int64_t>(most + 1)};
  size_t l = 0;
  size_t r = 0;
  size_t n = 0;
  while (l < left.size() && r < right.size()) {
    const uint64_t a = left[l];
    const uint64_t b = right[r];
    found.first[n] = static_cast<int64_t>(l);
    found.second[n] = static_cast<int64_t>(r);
    n += a == b ? 1 : 0;
    l += a <= b ? 1 : 0;
    r += b <= a ? 1 : 0;
  }
  found.first.resize(n);
  found.second.resize(n);
  return found;
}

}  // namespace petps::buffer
