// Two clocks, both in nanoseconds.
#pragma once

#include <cstdint>
#include <ctime>

namespace petps::base {

// Nanoseconds since an arbitrary start; never goes back. For deadlines and durations.
inline uint64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

// Nanoseconds since 1970 (UTC); may jump either way. For people and for messages only.
inline uint64_t wall_ns() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace petps::base
