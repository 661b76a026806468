// Windows in which one or more threads do the same work, and what they cost. The rounds are
// interleaved: each has a window of every number of threads.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench/common/measure.h"

namespace petps::bench {

constexpr uint32_t kThreadCounts[] = {1, 2, 4, 8, 16};
constexpr uint32_t kThreadsMax = 16;

// Do one operation of a thread, and return its rows.
using Work = std::function<uint64_t(uint32_t thread)>;

struct Windows {
  uint32_t rounds = 5;
  std::chrono::milliseconds window{500};
  pid_t server = 0;  // a process whose costs count too; 0: none
};

// Measure `name`.<threads> for each number of threads and print the lines. `prepare` returns the
// work of that number of threads. `describe` adds fields to a line.
void measure_scale(const std::string& name, const Windows& windows,
                   const std::function<Work(uint32_t threads)>& prepare,
                   const std::function<void(Line&)>& describe);

// Return the number of processors that this process may use.
uint32_t processors();

}  // namespace petps::bench
