// Runs a mutant in a child process: a failed check or a hang of its is a kill as well.
#pragma once

#include <functional>
#include <string>

namespace petps::crash {

// Of the processor and in all: far above the 4 s that all states of the longest scenario take, so that
// a slow mutant that lives does not count as killed.
inline constexpr unsigned kBusySeconds = 60;
inline constexpr unsigned kHangSeconds = 120;

// Return what `run` returns, or by which signal the child died. Empty: the mutant survives.
std::string run_in_child(const std::function<std::string()>& run);

}  // namespace petps::crash
