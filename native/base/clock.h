// Two clocks, both in nanoseconds.
#pragma once

#include <cstdint>
#include <ctime>

namespace petps::base {

// Return nanoseconds since an arbitrary start. Never goes back; use it for deadlines and durations.
inline uint64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

// Return nanoseconds since 1970 (UTC). May jump either way; use it for people and messages only.
inline uint64_t wall_ns() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace petps::base
