// How much of the suite runs, and from which seed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>

namespace petps::crash {

// PETPS_SEED, or a random one; printed, so that a failure can be repeated.
inline uint64_t suite_seed() {
  static const uint64_t value = [] {
    const char* given = std::getenv("PETPS_SEED");
    const uint64_t chosen =
        given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    std::cout << "PETPS_SEED=" << chosen << std::endl;
    return chosen;
  }();
  return value;
}

// `whole` in a release run; sanitizer runs set PETPS_TEST_SCALE to take a part of it.
inline uint64_t scaled(uint64_t whole, uint64_t least) {
  const char* given = std::getenv("PETPS_TEST_SCALE");
  const double scale = given != nullptr ? std::atof(given) : 1.0;
  return std::max(least, static_cast<uint64_t>(static_cast<double>(whole) * scale));
}

}  // namespace petps::crash
