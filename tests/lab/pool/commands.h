// The commands of lab_pool. Each command prints its findings and returns the program's exit status.
// The status is 0 if the findings are allowed.
#pragma once

#include <cstdint>
#include <string>

#include "steps.h"

namespace petps::lab {

// Perform the next step for each line "step" of stdin; answer "done NAME" or "failed NAME: ERROR".
// For a line "write-back SEED", write random pages of the file back, as a kernel does when it runs
// short of memory, and answer "done" or "failed: ERROR". Exit at the end of stdin or after a failed
// step, without closing the pool.
int perform_steps(const table::TablesOptions& options, uint64_t seed, Regime regime);

// Open the pool after a power cut. Its first `acknowledged` steps were acknowledged, and the next
// one may have begun. Answer "right", "noticed: ERROR" or "wrong: REASON".
int check_steps(const table::TablesOptions& options, uint64_t seed, Regime regime,
                size_t acknowledged);

// The remaining commands use a pool of one or two tables with keys 0, 1, ... A row contains the
// number of the round that wrote it.

// Create the pool with `rows` rows of round 1 in each table, and close it.
int make_rounds(const table::TablesOptions& options, uint64_t tables, uint64_t rows);
// Open the pool, write all rows of rounds first..last, and close it. Stop at the first write error.
// Print each error.
int write_rounds(const table::TablesOptions& options, uint64_t rows, uint64_t first, uint64_t last);
// Open the pool, add rows until that is refused, check the rows that were accepted, and close it.
int grow_rounds(const table::TablesOptions& options, uint64_t rows);
// Each line of stdin has the last acknowledged rounds of the two tables. For each line, open the
// pool, check it, and let two threads write one table each until a write is refused.
int write_until_refused(const table::TablesOptions& options, uint64_t rows);
// Open the pool read-only. Check that every table has its first `rows` rows, each written by the
// table's round or by one of the next two, which were refused.
int check_rounds(const table::TablesOptions& options, uint64_t rows,
                 const std::vector<uint64_t>& rounds);

}  // namespace petps::lab
