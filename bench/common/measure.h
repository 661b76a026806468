// The timing of every comparison. One process alternates short windows of petps and of the limit,
// so that both see the same state of the machine. A window in which the thread lost its core is
// measured again. A round compares the sums over its windows; the result is the rounds' median.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <thread>
#include <vector>

namespace petps::bench {

struct Compared {
  double value = 0;      // operations per second of petps: median over the rounds
  double limit = 0;      // the same for the limit
  double ratio = 0;      // median of the rounds' ratios
  double ratio_low = 0;  // lowest and highest round
  double ratio_high = 0;
  double value_best = 0;  // best single windows: an estimate for a machine without other load
  double limit_best = 0;
  uint64_t disturbed = 0;  // measurements of a window during which the thread lost its core
};

// Threads that run the same function at the same time; the caller is one of them. They spin between
// two calls of run(), so that no window includes a wake-up.
class Crew {
 public:
  explicit Crew(uint32_t threads);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;
  void run(const std::function<void(uint32_t thread)>& part);
  // Return whether every thread kept its core (no involuntary context switch) in the last run().
  bool kept_cores() const { return lost_.load(std::memory_order_relaxed) == 0; }

 private:
  void take_part(uint32_t thread);
  std::atomic<uint64_t> started_{0};
  std::atomic<uint64_t> finished_{0};
  std::atomic<uint64_t> lost_{0};
  std::atomic<bool> ends_{false};
  const std::function<void(uint32_t)>* part_ = nullptr;
  std::vector<std::thread> others_;
};

struct Plan {
  uint32_t rounds = 5;
  uint32_t windows = 100;  // per side and round
  // A window is disturbed if its thread has a core for less than this share of the wall time.
  double calm = 0.97;
  // If not null, a window is disturbed if a thread of the crew loses its core; `calm` is not used.
  const Crew* crew = nullptr;
};

// Compare two sides. Each function runs one window and returns the number of its operations.
Compared compare(const Plan& plan, const std::function<uint64_t()>& petps,
                 const std::function<uint64_t()>& limit);
// Return the operations per second of one side alone, in the best of `windows` windows. It serves
// to tune a limit.
double best_rate(uint32_t windows, const std::function<uint64_t()>& side);
// Set `*ahead` to the candidate with which `side` has the best rate. Return that rate.
double tune(uint32_t windows, const std::function<uint64_t()>& side,
            std::initializer_list<uint64_t> candidates, uint64_t* ahead);
// Set the medians, the lowest and the highest ratio of `result` from the rates of the rounds.
void summarise(const std::vector<double>& values, const std::vector<double>& limits,
               Compared* result);

double median(std::vector<double> values);
// Return the value at `share` (0 to 1) of `sorted`, which is in ascending order.
double percentile(std::vector<double>& sorted, double share);

// Bounce one cache line between two threads on cores 0 and 1. Return the nanoseconds of a round
// trip in the best of five short windows; 0 on a machine with one core.
double line_round_trip_ns();
const char* distance_name(double round_trip_ns);  // "near", "far", "single core"

// Make the compiler compute `value`, without storing it.
template <typename T>
inline void keep(const T& value) {
  asm volatile("" : : "r,m"(value) : "memory");
}

// One line of JSON on stdout: {"name": name, field...}. Strings must need no escapes. The
// destructor prints the line.
class Line {
 public:
  explicit Line(const std::string& name);
  // A figure that is measured on both media: `name` on a file, `name`.dram on dram.
  Line(const std::string& name, const std::string& medium);
  // Write null if `value` is not finite, for example a rate over a time too short for the clock.
  Line& number(const char* field, double value);
  Line& text(const char* field, const std::string& value);
  Line& compared(const Compared& compared);
  ~Line();
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

 private:
  std::string line_;
};

}  // namespace petps::bench
