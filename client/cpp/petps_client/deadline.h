// The moment by which a call must return.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ctime>

namespace petps::client {

// A moment of base::monotonic_ns. `given_ms` is the caller's whole time, for error messages.
struct Deadline {
  uint64_t at_ns = 0;
  uint64_t given_ms = 0;
  static Deadline in_ms(uint64_t ms);
  Deadline share(size_t parts) const;   // the first of `parts` equal parts of the time left
  Deadline limited(uint64_t ns) const;  // at most `ns` from now
  bool passed() const;
  uint64_t left_ns() const;
};

// Convert to the argument of ppoll.
inline timespec timespec_of(uint64_t ns) {
  return {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
}

}  // namespace petps::client
