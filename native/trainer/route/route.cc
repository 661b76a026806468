#include "trainer/route/route.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "trainer/unique/unique.h"
#include "wire/wire.h"

namespace petps::route {

namespace {

base::Status invalid(std::string message) {
  return base::Status(base::Code::kInvalidArgument, std::move(message));
}

base::Status check(const Shape& shape) {
  bool fits = shape.world > 0 && shape.micros > 0 && shape.tables() > 0 && shape.block_of[0] == 0;
  for (size_t t = 1; fits && t < shape.tables(); ++t) {
    fits = shape.block_of[t] == shape.block_of[t - 1] ||
           shape.block_of[t] == shape.block_of[t - 1] + 1;
  }
  if (fits) return {};
  return invalid(
      "world, micro-batches and tables must be at least 1, and block_of must begin with 0 "
      "and rise by at most 1");
}

// The position at which each (rank, part) begins, in the order (micro-batch, block, rank, table).
struct Starts {
  std::vector<uint64_t> at;  // [world][micros * tables]
  // [micros * tables]: where the (micro-batch, block) of each part begins.
  std::vector<uint64_t> of_block;
};

Starts starts_by_block(std::span<const uint64_t> counts, const Shape& shape) {
  const size_t tables = shape.tables();
  const size_t parts = shape.micros * tables;
  Starts starts{std::vector<uint64_t>(shape.world * parts), std::vector<uint64_t>(parts)};
  uint64_t next = 0;
  for (size_t micro = 0; micro < shape.micros; ++micro) {
    for (size_t first = 0, last = 0; first < tables; first = last) {
      while (last < tables && shape.block_of[last] == shape.block_of[first]) ++last;
      const uint64_t begin = next;
      for (size_t rank = 0; rank < shape.world; ++rank) {
        for (size_t table = first; table < last; ++table) {
          const size_t part = micro * tables + table;
          starts.at[rank * parts + part] = next;
          starts.of_block[part] = begin;
          next += counts[rank * parts + part];
        }
      }
    }
  }
  return starts;
}

}  // namespace

base::Result<Requested> ask(std::span<const std::span<const uint64_t>> values, const Shape& shape,
                            uint32_t partitions, bool seen) {
  PETPS_RETURN_IF_ERROR(check(shape));
  const size_t parts = shape.micros * shape.tables();
  if (values.size() != parts || partitions < shape.world) {
    return invalid("expected " + std::to_string(parts) + " parts of keys and at least " +
                   std::to_string(shape.world) + " partitions, got " +
                   std::to_string(values.size()) + " parts and " + std::to_string(partitions) +
                   " partitions");
  }
  size_t ids = 0;
  for (const std::span<const uint64_t> part : values) ids += part.size();
  if (ids > kBatchIdsMax) {
    return invalid("the batch has " + std::to_string(ids) + " ids; at most " +
                   std::to_string(kBatchIdsMax) + ": train smaller batches");
  }
  base::Result<unique::Distinct> distinct =
      unique::jagged_unique(values, {unique::Order::kAscending, true, seen});
  if (!distinct.ok()) return distinct.status();
  unique::Distinct unique_ids = std::move(distinct).value();
  const size_t n = unique_ids.ids.size();
  Block<uint32_t> owner(n);
  Requested out;
  out.counts.assign(shape.world * parts, 0);
  for (size_t part = 0; part < parts; ++part) {
    for (uint64_t i = unique_ids.offsets[part]; i < unique_ids.offsets[part + 1]; ++i) {
      const uint64_t partition = wire::partition_of(unique_ids.ids[i], partitions);
      owner[i] = static_cast<uint32_t>(partition * shape.world / partitions);
      ++out.counts[owner[i] * parts + part];
    }
  }
  std::vector<uint64_t> sent(shape.world * parts);
  std::exclusive_scan(out.counts.begin(), out.counts.end(), sent.begin(), uint64_t{0});
  Starts received = starts_by_block(out.counts, shape);
  out.keys.resize(n);
  out.seen.resize(seen ? n : 0);
  Block<uint32_t> place(n);
  for (size_t part = 0; part < parts; ++part) {
    for (uint64_t i = unique_ids.offsets[part]; i < unique_ids.offsets[part + 1]; ++i) {
      const size_t cell = owner[i] * parts + part;
      const uint64_t to = sent[cell]++;
      out.keys[to] = unique_ids.ids[i];
      if (seen) out.seen[to] = unique_ids.counts[i];
      place[i] = static_cast<uint32_t>(received.at[cell]++ - received.of_block[part]);
    }
  }
  uint32_t* next = unique_ids.inverse.data();
  for (size_t part = 0; part < parts; ++part) {
    const uint32_t* const of_part = place.data() + unique_ids.offsets[part];
    for (uint32_t* const end = next + values[part].size(); next < end; ++next)
      *next = of_part[*next];
  }
  out.position = std::move(unique_ids.inverse);
  return out;
}

base::Result<Owned> merge(std::span<const uint64_t> keys, std::span<const uint64_t> seen,
                          std::span<const uint64_t> counts, const Shape& shape) {
  PETPS_RETURN_IF_ERROR(check(shape));
  const size_t tables = shape.tables();
  const size_t parts = shape.micros * tables;
  uint64_t total = 0;
  bool fits = counts.size() == shape.world * parts && (seen.empty() || seen.size() == keys.size());
  for (const uint64_t count : counts) {
    fits = fits && count <= keys.size() - total;
    if (fits) total += count;
  }
  if (!fits || total != keys.size()) {
    return invalid("the counts of the parts do not sum to the " + std::to_string(keys.size()) +
                   " keys, or seen has another number of elements");
  }
  // by_table: where the keys of each cell (rank, micro-batch, table) begin when the cells are
  // ordered by table.
  std::vector<uint64_t> ends(tables + 1, 0);
  for (size_t cell = 0; cell < counts.size(); ++cell) ends[cell % tables + 1] += counts[cell];
  std::inclusive_scan(ends.begin(), ends.end(), ends.begin());
  std::vector<uint64_t> by_table(counts.size());
  std::vector<uint64_t> next(ends.begin(), ends.end() - 1);
  Block<uint64_t> values(keys.size());
  uint64_t at = 0;
  for (size_t cell = 0; cell < counts.size(); ++cell) {
    by_table[cell] = next[cell % tables];
    next[cell % tables] += counts[cell];
    std::copy_n(keys.begin() + static_cast<ptrdiff_t>(at), counts[cell],
                values.begin() + static_cast<ptrdiff_t>(by_table[cell]));
    at += counts[cell];
  }
  base::Result<unique::Distinct> distinct =
      unique::jagged_unique(values, ends, {unique::Order::kAscending, true, false});
  if (!distinct.ok()) return distinct.status();
  unique::Distinct unique_ids = std::move(distinct).value();
  Owned out;
  out.position.resize(keys.size());
  out.seen.resize(seen.empty() ? 0 : unique_ids.ids.size());
  std::fill(out.seen.begin(), out.seen.end(), 0);
  const Starts starts = starts_by_block(counts, shape);
  at = 0;
  for (size_t cell = 0; cell < counts.size(); ++cell) {
    const size_t table = cell % tables;
    size_t first = table;
    while (first > 0 && shape.block_of[first - 1] == shape.block_of[table]) --first;
    const uint64_t begin =
        unique_ids.offsets[table] - unique_ids.offsets[first];  // within its block
    const uint32_t* const place = unique_ids.inverse.data() + by_table[cell];
    int64_t* const to = out.position.data() + starts.at[cell];
    for (uint64_t i = 0; i < counts[cell]; ++i) {
      to[i] = static_cast<int64_t>(begin + place[i]);
      if (!seen.empty()) out.seen[unique_ids.offsets[table] + place[i]] += seen[at + i];
    }
    at += counts[cell];
  }
  out.keys = std::move(unique_ids.ids);
  out.offsets = std::move(unique_ids.offsets);
  return out;
}

}  // namespace petps::route
