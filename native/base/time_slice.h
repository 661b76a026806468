// The length of a thread's time slices on a busy processor.
#pragma once

#include <cstdint>

namespace petps::base {

// Shorter than the usual time slices, which are 0.7 ms or more, so that a thread waking up does
// not wait; longer than most of the work that a thread wakes up for.
inline constexpr uint64_t kShortSliceNs = 300'000;

// Set the time slice of the calling thread, and of the threads that it starts from now on, to
// `ns` nanoseconds; 0 restores the kernel's default. Since Linux 6.12 a waking thread whose slice
// is shorter than the running thread's takes the processor at once. Otherwise it waits for the
// end of the running slice, for milliseconds, whatever the niceness of the two. The thread's
// share of a busy processor does not change, and no privilege is needed. Does nothing if the
// kernel does not support this or the thread is not SCHED_OTHER.
void set_time_slice(uint64_t ns);

}  // namespace petps::base
