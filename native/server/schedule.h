// The kernel's scheduling of worker threads. Internal to server.
#pragma once

#include <cstdint>

#include "base/status.h"

namespace petps::server {

inline constexpr uint32_t kMaxRealTime = 99;  // Linux's highest priority

// Check whether a thread of this process may run at this real-time priority. 0 is always permitted.
// Errors: kInvalidArgument (above kMaxRealTime), kFailedPrecondition (not permitted; names
// remedies).
base::Status check_real_time(uint32_t priority);

// Schedule the calling thread as a worker: at a checked real-time priority (SCHED_FIFO), or for 0
// with short time slices (base/time_slice.h).
void schedule_worker(uint32_t real_time);

}  // namespace petps::server
