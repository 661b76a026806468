// PETPS_CHECK: an assert that every build keeps, for our own mistakes only.
//
// Bad input from outside is reported as a Status, never by a check. A failed check prints
// "file:line: check failed: condition: message" to stderr and aborts.
#pragma once

#include <string_view>

namespace petps::base {

[[noreturn]] void check_failed(const char* file, int line, const char* condition,
                               std::string_view message);

}  // namespace petps::base

#define PETPS_CHECK(condition, message)                                     \
  do {                                                                      \
    if (__builtin_expect(!(condition), 0)) {                                \
      ::petps::base::check_failed(__FILE__, __LINE__, #condition, message); \
    }                                                                       \
  } while (false)
