// The kernel's scheduling of worker threads. Internal to server.
#pragma once

#include <cstdint>

#include "base/status.h"

namespace petps::server {

inline constexpr uint32_t kMaxRealTime = 99;  // Linux's highest priority

// Check whether a thread of this process may run at the real-time priority; 0 always may.
// Errors: kInvalidArgument (above kMaxRealTime), kFailedPrecondition (not permitted; names
// remedies).
base::Status check_real_time(uint32_t priority);

// Make the calling thread a worker. With a checked priority it runs in real time, first in, first
// out. With 0 it gets short time slices (base/time_slice.h).
void schedule_worker(uint32_t real_time);

}  // namespace petps::server
