// The share of the suite that runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace petps::crash {

// Return the part of `whole` that PETPS_TEST_SCALE sets, or else PETPS_CRASH_SCALE: sanitizer runs
// are short, and `make test` runs a tenth in release. The result is at least `least`.
inline uint64_t scaled(uint64_t whole, uint64_t least) {
  const char* given = std::getenv("PETPS_TEST_SCALE");
  if (given == nullptr) given = std::getenv("PETPS_CRASH_SCALE");
  const double scale = given != nullptr ? std::atof(given) : 1.0;
  return std::max(least, static_cast<uint64_t>(static_cast<double>(whole) * scale));
}

}  // namespace petps::crash
