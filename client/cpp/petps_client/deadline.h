// When a call has to be done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ctime>

namespace petps::client {

// A moment of base::monotonic_ns, and how long the caller gave in all (for messages).
struct Deadline {
  uint64_t at_ns = 0;
  uint64_t given_ms = 0;
  static Deadline in_ms(uint64_t ms);
  Deadline share(size_t parts) const;  // the first of so many equal parts of what is left
  bool passed() const;
  uint64_t left_ns() const;
};

// For ppoll.
inline timespec timespec_of(uint64_t ns) {
  return {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
}

}  // namespace petps::client
