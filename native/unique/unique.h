// Room unique: the distinct ids of many tables in one pass (DECK 4.1).
//
// Owns:        jagged_unique: bits for ids that lie close together, else partitioned hashing and
//              radix sort of what is left; inverse and counts. Blocks of memory for many ids.
// Never does:  know tables by name, rows or trackers; change its input.
// Called by:   bindings (petps.tracker), route.
// Invariants:  each table's part of the answer holds its ids once each, in ascending order if asked,
//              else in an order that depends on the ids alone; beside the answer, memory is bounded
//              by one more copy of the largest table (two with inverse or counts) and the set of
//              one of its parts (1 to 2 MiB for a table of 40 M ids) or its bits (up to 6 MiB), and
//              by what the process keeps of earlier calls' blocks (pages.h).
// Threads:     pure functions; blocks may be given back by any thread.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "unique/pages.h"

namespace petps::unique {

enum class Order : uint8_t {
  kAny,        // what costs least; the same for the same ids in the same order
  kAscending,  // as unsigned numbers
};

struct Wanted {
  Order order = Order::kAny;
  bool inverse = false;
  bool counts = false;
};

// offsets: table t has values[offsets[t]] up to values[offsets[t + 1] - 1].
struct Distinct {
  Block<uint64_t> ids;      // of table 0, then of table 1, ..
  Block<uint64_t> offsets;  // uint64[tables + 1], into ids
  // Per value, the place of its id among its table's: values[i] = ids[offsets[t] + inverse[i]].
  Block<uint32_t> inverse;
  Block<uint64_t> counts;  // per id, how often it stands in its table's values
};

// Numbers of ids are counted in 32 bits within a table.
inline constexpr uint64_t kTableIdsMax = (uint64_t{1} << 32) - 1;

// values: uint64[n]; offsets: uint64[tables + 1], from 0, never falling, up to n.
// INVALID_ARGUMENT names the offset that breaks this, or the table with too many ids.
base::Result<Distinct> jagged_unique(std::span<const uint64_t> values,
                                     std::span<const uint64_t> offsets, const Wanted& wanted);
// The same of tables that do not stand behind each other; `values` above is all of them in order.
base::Result<Distinct> jagged_unique(std::span<const std::span<const uint64_t>> tables,
                                     const Wanted& wanted);

}  // namespace petps::unique
