// How the kernel schedules workers. Internal to server.
#pragma once

#include <cstdint>

#include "base/status.h"

namespace petps::server {

inline constexpr uint32_t kMaxRealTime = 99;  // Linux's highest priority

// Whether a thread of this process may run at the real-time priority; 0: always.
// Errors: kInvalidArgument (above kMaxRealTime), kFailedPrecondition (not permitted; names remedies).
base::Status check_real_time(uint32_t priority);

// The calling thread is a worker from now on. With a priority that was checked: in real time, first
// in, first out. With 0 it takes short turns (base/turns.h).
void schedule_worker(uint32_t real_time);

}  // namespace petps::server
