// Runs a mutant in a child process: its failed check or hang counts as a kill too.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace petps::crash {

// Limits of CPU time and of wall time. Both are far above the 4 s that all states of the longest
// scenario take. The second one does not count as a kill, because a busy machine reaches it too.
inline constexpr unsigned kBusySeconds = 60;
inline constexpr unsigned kHangSeconds = 120;
// Limit of the rounds in loops that wait for a lock. Without a mutation, no scenario waits: its
// threads run one after the other. A full index retries 1,000 times for a key (index::kFullPasses).
inline constexpr uint64_t kYieldsMax = 200'000;

// Return what `run` returns, or the signal that killed the child, or that it waits for a lock
// forever. Empty: the mutant survives.
std::string run_in_child(const std::function<std::string()>& run);

}  // namespace petps::crash
