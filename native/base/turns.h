// How long a thread's turns on a busy processor are.
#pragma once

#include <cstdint>

namespace petps::base {

// Shorter than the turns of others, 0.7 ms and more, so who wakes up is not kept waiting; longer
// than what it wakes up for mostly takes.
inline constexpr uint64_t kShortTurnNs = 300'000;

// The calling thread, and those that it starts from now on, take turns of so many ns; 0: the
// kernel's own. Since Linux 6.12 who wakes up with a shorter turn than what runs on its processor
// takes it at once; otherwise it waits until that turn is over, for milliseconds, whatever their
// niceness. Its share of a busy processor stays the same, and no privilege is needed. Does nothing
// where the kernel does not know it, or where the thread is not SCHED_OTHER.
void take_turns(uint64_t ns);

}  // namespace petps::base
