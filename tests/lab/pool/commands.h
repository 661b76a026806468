// The commands of lab_pool. Each prints what it saw and returns the program's exit status: 0 when
// what it saw is allowed.
#pragma once

#include <cstdint>
#include <string>

#include "steps.h"

namespace petps::lab {

// Performs the next step for each line "step" of stdin and answers "done NAME" or "failed NAME:
// ERROR". For a line "write-back SEED" it writes random pages of the file back, as a kernel does
// that runs short of memory. Ends with stdin, without closing the pool.
int perform_steps(const table::TablesOptions& options, uint64_t seed, Regime regime);

// After a cut: opens the pool, of whose steps the first `acknowledged` were acknowledged and the
// next one may have begun. Answers "right", "noticed: ERROR" or "wrong: REASON".
int check_steps(const table::TablesOptions& options, uint64_t seed, Regime regime,
                size_t acknowledged);

// A pool of one or two tables with keys 0, 1, ..., each row saying by which round it was written.

// Creates it with `rows` rows of round 1 in each table and closes it.
int make_rounds(const table::TablesOptions& options, uint64_t tables, uint64_t rows);
// Opens it, writes all rows of rounds first..last, closes it. Prints each error.
int write_rounds(const table::TablesOptions& options, uint64_t rows, uint64_t first, uint64_t last);
// Opens it, adds rows until that is refused, checks those that were not, closes it.
int grow_rounds(const table::TablesOptions& options, uint64_t rows);
// For each line of stdin, with the last acknowledged round of each of two tables: opens it, checks
// it, and lets two threads write a table each until a write is refused.
int write_until_refused(const table::TablesOptions& options, uint64_t rows);
// Opens it read-only. Every table has its `rows` first rows, of its round or of one of the next two, which were refused.
int check_rounds(const table::TablesOptions& options, uint64_t rows,
                 const std::vector<uint64_t>& rounds);

}  // namespace petps::lab
