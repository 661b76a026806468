// Room unique: finds the distinct ids of many tables in one pass (DECK 4.1).
//
// Owns:        jagged_unique: a bit for each id of a range if the ids are close together, else
//              partitioned hashing and a radix sort of the distinct ids; inverse and counts. The
//              blocks of memory for many ids.
// Never does:  know tables by name, rows or trackers; change its input.
// Called by:   bindings (petps.train.tracker), route.
// Invariants:  The result has each id of a table once, ascending (kAscending) or in an order that
//              depends only on the ids. Memory beside the result is at most one more copy of the
//              largest table (two with inverse or counts), the set of one of its parts (1 to 2 MiB
//              for a table of 40 M ids) or its bits (up to 6 MiB), and the cached blocks (pages.h).
// Threads:     pure functions; any thread may give back a block.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "trainer/unique/pages.h"

namespace petps::unique {

enum class Order : uint8_t {
  kAny,        // the cheapest order; the same input gives the same order
  kAscending,  // as unsigned numbers
};

// The results that a caller wants beside the ids, and the order of the ids.
struct Wanted {
  Order order = Order::kAny;
  bool inverse = false;
  bool counts = false;
};

// The distinct ids of all tables. Table t has ids[offsets[t]] up to ids[offsets[t + 1] - 1].
struct Distinct {
  Block<uint64_t> ids;      // the ids of table 0, then of table 1, ..
  Block<uint64_t> offsets;  // uint64[tables + 1], into ids
  // For each value i of table t, the place of its id among the ids of the table:
  // values[i] = ids[offsets[t] + inverse[i]].
  Block<uint32_t> inverse;
  Block<uint64_t> counts;  // for each id, how often it is in its table's values
};

// The place of an id within its table has 32 bits.
inline constexpr uint64_t kTableIdsMax = (uint64_t{1} << 32) - 1;

// Find the distinct ids of each table. values: uint64[n], where table t has values[offsets[t]] up
// to values[offsets[t + 1] - 1]. offsets: uint64[tables + 1], starts at 0, never decreases, ends
// at n.
// Errors: INVALID_ARGUMENT names the offset that breaks this, or the table with too many ids.
base::Result<Distinct> jagged_unique(std::span<const uint64_t> values,
                                     std::span<const uint64_t> offsets, const Wanted& wanted);
// Do the same for tables that are not contiguous in memory. Distinct::inverse has one element for
// each value, table after table.
base::Result<Distinct> jagged_unique(std::span<const std::span<const uint64_t>> tables,
                                     const Wanted& wanted);

}  // namespace petps::unique
