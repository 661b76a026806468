// A thread's time slices on a busy processor, and its priority.
#pragma once

#include <cstdint>

namespace petps::base {

// Shorter than the usual time slices, which are 0.7 ms or more, so that a thread waking up does
// not wait; longer than most of the work that a thread wakes up for.
inline constexpr uint64_t kShortSliceNs = 300'000;

// Longer than the usual time slices, which are 2.8 ms or less, so that any thread waking up takes
// the processor; and not longer than that needs, because the others may have to wait for its end.
inline constexpr uint64_t kLongSliceNs = 4'000'000;

// Set the time slice of the calling thread, and of the threads that it starts from now on, to
// `ns` nanoseconds; 0 restores the kernel's default. Since Linux 6.12 a waking thread whose slice
// is shorter than the running thread's takes the processor at once. Otherwise it waits for the
// end of the running slice, for milliseconds, whatever the niceness of the two. The thread's
// share of a busy processor does not change, and no privilege is needed. Does nothing if the
// kernel does not support this or the thread is not SCHED_OTHER.
void set_time_slice(uint64_t ns);

// For threads whose work can wait: pulls come first, and a busy machine does not starve them.
inline constexpr int kLowNiceness = 10;

// Let the calling thread give way to others: its share of a busy processor is that of `niceness`
// (of 19) or less, and any thread that wakes up takes the processor from it at once. Threads that
// it starts inherit both. The kernel derives the priority of its disk reads from the niceness too.
// What fails leaves the thread as it is.
void lower_priority(int niceness = kLowNiceness);

}  // namespace petps::base
