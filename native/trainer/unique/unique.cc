#include "trainer/unique/unique.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>
#include <vector>

#include "trainer/unique/id_range.h"
#include "trainer/unique/id_set.h"
#include "trainer/unique/radix.h"

namespace petps::unique {
namespace {

// A table with more ids is divided by hash into parts of about half this size, so that the set of a
// part stays in the second-level cache. There are at most 2^10 parts: with more, writing the parts
// would miss the TLB at every id.
constexpr size_t kPartIdsMax = 16384;
constexpr uint32_t kPartBitsMax = 10;

constexpr size_t kPieceIds = 512;  // ids between two checks whether the set must grow

uint32_t part_bits(size_t ids) {
  const auto parts = std::bit_ceil(ids / (kPartIdsMax / 2));
  return std::min(static_cast<uint32_t>(std::countr_zero(parts)), kPartBitsMax);
}

// One call of jagged_unique.
class Pass {
 public:
  // all, largest: number of ids of all tables, and of the largest table.
  Pass(size_t all, size_t largest, const Wanted& wanted)
      : wanted_(wanted), places_(wanted.inverse || wanted.counts) {
    const bool ascending = wanted.order == Order::kAscending;
    if (ascending || largest > kPartIdsMax) {
      buffer_.resize(largest);
      if (places_) positions_.resize(largest);
      if (places_ && ascending) moved_.resize(largest);
    }
    distinct_.ids.reserve(all + 1);  // cheap: a page that is never written costs nothing
    distinct_.offsets.push_back(0);
    if (wanted.inverse) distinct_.inverse.resize(all);
  }

  // Process the values of the next table.
  void table(std::span<const uint64_t> values) {
    begin_ = distinct_.ids.size();
    if (range_.hold(values)) {
      add_range(values);
    } else {
      if (values.size() <= kPartIdsMax) {
        add_part(values.data(), nullptr, values.size());
      } else {
        add_by_parts(values);
      }
      if (wanted_.order == Order::kAscending) sort(values.size());
    }
    distinct_.offsets.push_back(distinct_.ids.size());
    first_ += values.size();
  }

  Distinct take() { return std::move(distinct_); }

 private:
  void add_range(std::span<const uint64_t> values) {
    distinct_.ids.resize(begin_ + values.size());
    const size_t count = range_.list(distinct_.ids.data() + begin_);
    distinct_.ids.resize(begin_ + count);
    if (!places_) return;
    if (wanted_.counts) distinct_.counts.resize(begin_ + count, 0);
    for (size_t i = 0; i < values.size(); ++i) {
      const uint32_t place = range_.place_of(values[i]);
      if (wanted_.inverse) distinct_.inverse[first_ + i] = place;
      if (wanted_.counts) distinct_.counts[begin_ + place] += 1;
    }
  }

  void add_by_parts(std::span<const uint64_t> values) {
    const uint32_t shift = 64 - part_bits(values.size());
    std::vector<size_t> ends((size_t{1} << (64 - shift)) + 1, 0);
    for (const uint64_t id : values) ends[(hash_of(id) >> shift) + 1] += 1;
    for (size_t part = 1; part < ends.size(); ++part) ends[part] += ends[part - 1];
    // In this loop, ends[part] is the position of the part's next id.
    for (size_t i = 0; i < values.size(); ++i) {
      const size_t to = ends[hash_of(values[i]) >> shift]++;
      buffer_[to] = values[i];
      if (places_) positions_[to] = static_cast<uint32_t>(i);
    }
    size_t from = 0;
    for (size_t part = 0; part + 1 < ends.size(); from = ends[part++]) {
      add_part(buffer_.data() + from, places_ ? positions_.data() + from : nullptr,
               ends[part] - from);
    }
  }

  void add_part(const uint64_t* ids, const uint32_t* positions, size_t n) {
    if (places_) {
      add<true>(ids, positions, n);
    } else {
      add<false>(ids, positions, n);
    }
  }

  // Append the distinct ids of a part. positions: the positions of the part's ids in the table;
  // null: 0, 1, ..
  template <bool kPlaces>
  void add(const uint64_t* ids, const uint32_t* positions, size_t n) {
    const size_t start = distinct_.ids.size();
    distinct_.ids.resize(start + n + 1);
    if (kPlaces && wanted_.counts) distinct_.counts.resize(start + n, 0);
    uint64_t* out = distinct_.ids.data() + start;
    set_.begin(n, kPlaces);
    uint32_t count = 0;
    for (size_t i = 0; i < n; i += kPieceIds) {
      const size_t stop = std::min(n, i + kPieceIds);
      set_.make_room<kPlaces>({out, count}, stop - i);
      for (size_t at = i; at < stop; ++at) {
        const uint32_t place = set_.add<kPlaces>(ids[at], out, &count);
        if constexpr (kPlaces) {
          const size_t position = positions == nullptr ? at : positions[at];
          const size_t in_table = start - begin_ + place;
          if (wanted_.inverse)
            distinct_.inverse[first_ + position] = static_cast<uint32_t>(in_table);
          if (wanted_.counts) distinct_.counts[start + place] += 1;
        }
      }
    }
    distinct_.ids.resize(start + count);
    if (kPlaces && wanted_.counts) distinct_.counts.resize(start + count);
  }

  void sort(size_t ids) {
    const std::span<uint64_t> distinct(distinct_.ids.data() + begin_,
                                       distinct_.ids.size() - begin_);
    if (!places_) return radix_sort(distinct, buffer_.data());
    uint32_t* order = positions_.data();  // order[i]: the place before the sort of the id at i
    for (size_t i = 0; i < distinct.size(); ++i) order[i] = static_cast<uint32_t>(i);
    radix_sort(distinct, buffer_.data(), order, moved_.data());
    if (wanted_.counts) {
      uint64_t* counts = distinct_.counts.data() + begin_;
      for (size_t i = 0; i < distinct.size(); ++i) buffer_[i] = counts[order[i]];
      std::copy(buffer_.data(), buffer_.data() + distinct.size(), counts);
    }
    if (wanted_.inverse) {
      for (size_t i = 0; i < distinct.size(); ++i) moved_[order[i]] = static_cast<uint32_t>(i);
      uint32_t* inverse = distinct_.inverse.data() + first_;
      for (size_t i = 0; i < ids; ++i) inverse[i] = moved_[inverse[i]];
    }
  }

  const Wanted wanted_;
  const bool places_;          // true if the result needs the places of ids
  Block<uint64_t> buffer_;     // the ids by part, then working space of the sort
  Block<uint32_t> positions_;  // the positions of those ids, then the order of the sort
  Block<uint32_t> moved_;
  IdSet set_;
  IdRange range_;
  Distinct distinct_;
  size_t first_ = 0;  // number of values of the tables before this one
  size_t begin_ = 0;  // where this table's ids begin in distinct_.ids
};

base::Status invalid(std::string message) {
  return base::Status(base::Code::kInvalidArgument, std::move(message));
}

base::Status check(uint64_t values, std::span<const uint64_t> offsets) {
  const auto entry = [&](size_t i) {
    return "offsets[" + std::to_string(i) + "] is " + std::to_string(offsets[i]);
  };
  if (offsets.empty())
    return invalid("offsets is empty: it must have tables + 1 elements, beginning with 0");
  if (offsets[0] != 0) return invalid(entry(0) + ", but the first table begins at 0");
  for (size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1]) {
      return invalid(entry(i) + ", below the " + std::to_string(offsets[i - 1]) + " before it");
    }
  }
  if (offsets.back() != values) {
    return invalid(entry(offsets.size() - 1) + ", but the last table ends with the " +
                   std::to_string(values) + " values");
  }
  return {};
}

}  // namespace

base::Result<Distinct> jagged_unique(std::span<const uint64_t> values,
                                     std::span<const uint64_t> offsets, const Wanted& wanted) {
  PETPS_RETURN_IF_ERROR(check(values.size(), offsets));
  std::vector<std::span<const uint64_t>> tables(offsets.size() - 1);
  for (size_t t = 0; t < tables.size(); ++t) {
    tables[t] = values.subspan(offsets[t], offsets[t + 1] - offsets[t]);
  }
  return jagged_unique(tables, wanted);
}

base::Result<Distinct> jagged_unique(std::span<const std::span<const uint64_t>> tables,
                                     const Wanted& wanted) {
  size_t all = 0;
  size_t largest = 0;
  for (size_t t = 0; t < tables.size(); ++t) {
    all += tables[t].size();
    largest = std::max(largest, tables[t].size());
    if (largest > kTableIdsMax) {
      return invalid("table " + std::to_string(t) + " has " + std::to_string(largest) +
                     " ids; at most " + std::to_string(kTableIdsMax) +
                     " are possible in a call: compact more often");
    }
  }
  Pass pass(all, largest, wanted);
  for (const std::span<const uint64_t> table : tables) pass.table(table);
  return pass.take();
}

}  // namespace petps::unique
