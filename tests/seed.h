// The seed of a test program: PETPS_SEED, or else a random number. It is printed, so that a failure
// can be repeated.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace petps::tests {

// Return the seed. The first call prints it; every call returns the same value.
inline uint64_t seed() {
  static const uint64_t value = [] {
    const char* given = std::getenv("PETPS_SEED");
    const uint64_t chosen =
        given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    std::printf("PETPS_SEED=%llu\n", static_cast<unsigned long long>(chosen));
    return chosen;
  }();
  return value;
}

}  // namespace petps::tests
