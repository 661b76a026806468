// How the kernel schedules workers. Internal to server.
#pragma once

#include <cstdint>

#include "base/status.h"

namespace petps::server {

inline constexpr uint32_t kMaxRealTime = 99;  // Linux's highest priority

// Longer than a pull takes, so that it is not cut short by who wakes up meanwhile; shorter than the
// turns of others, 0.7 ms and more.
inline constexpr uint64_t kWorkerSliceNs = 300'000;

// Whether a thread of this process may run at the real-time priority; 0: always.
// Errors: kInvalidArgument (above kMaxRealTime), kFailedPrecondition (not permitted; names remedies).
base::Status check_real_time(uint32_t priority);

// The calling thread is a worker from now on. With a priority that was checked: in real time, first in,
// first out. With 0 it takes turns of kWorkerSliceNs: since Linux 6.12 who wakes up with a shorter turn
// than what runs on its processor takes it at once; otherwise it waits until that turn is over, for
// milliseconds, whatever their niceness. Its share of a busy processor stays the same, and no privilege
// is needed. Does nothing where the kernel does not know it, or where the process is not SCHED_OTHER.
void schedule_worker(uint32_t real_time);

}  // namespace petps::server
