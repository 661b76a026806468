// Runs a mutant in a child process: its failed check or hang counts as a kill too.
#pragma once

#include <functional>
#include <string>

namespace petps::crash {

// Limits of CPU time and of wall time. Both are far above the 4 s that all states of the longest
// scenario take, so that a slow mutant that survives does not count as killed.
inline constexpr unsigned kBusySeconds = 60;
inline constexpr unsigned kHangSeconds = 120;

// Return what `run` returns, or the signal that killed the child. Empty: the mutant survives.
std::string run_in_child(const std::function<std::string()>& run);

}  // namespace petps::crash
