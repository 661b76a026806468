// How every comparison is timed: short windows of one side and the other in turn, in one process,
// so that both sides meet the same machine. A window in which the thread lost its core to somebody
// else is taken again; per round the sums are compared; the median of five rounds is reported.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace petps::bench {

struct Compared {
  double value = 0;      // operations a second of petps: median over the rounds
  double limit = 0;      // of the limit
  double ratio = 0;      // median of the rounds' ratios
  double ratio_low = 0;  // lowest and highest round
  double ratio_high = 0;
  double value_best = 0;  // best single windows: what a calm machine would show
  double limit_best = 0;
  uint64_t disturbed = 0;  // windows taken again
};

// Threads that do the same thing at the same time, the caller among them. They spin between two
// calls of run(), so that a window holds no wake-up.
class Crew {
 public:
  explicit Crew(uint32_t threads);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;
  void run(const std::function<void(uint32_t thread)>& part);
  // Whether none of them lost its core to somebody else in the last run().
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
  uint32_t windows = 100;      // of each side in a round
  double calm = 0.97;          // share of a window's wall time that its thread must have had a core
  const Crew* crew = nullptr;  // whose threads must keep their cores instead; null: one
};

// Each side runs one window, on the plan's threads, and returns its operations.
Compared compare(const Plan& plan, const std::function<uint64_t()>& petps,
                 const std::function<uint64_t()>& limit);
// Operations a second of one side alone: best window of `windows`, for tuning a limit.
double best_rate(uint32_t windows, const std::function<uint64_t()>& side);

double median(std::vector<double> values);
double percentile(std::vector<double>& sorted, double share);

// One line of a cache bounced between two threads on cores 0 and 1: nanoseconds of a round trip, the
// lowest of a few short windows. 0 with one core.
double line_round_trip_ns();
const char* distance_name(double round_trip_ns);  // "near", "far", "single core"

// Keeps `value` alive without storing it.
template <typename T>
inline void keep(const T& value) {
  asm volatile("" : : "r,m"(value) : "memory");
}

// One line of JSON on stdout: {"name": name, field...}. Strings must need no escapes.
class Line {
 public:
  explicit Line(const std::string& name);
  // Null where it is not finite: over a time that the kernel's clock did not see.
  Line& number(const char* field, double value);
  Line& text(const char* field, const std::string& value);
  Line& compared(const Compared& compared);
  ~Line();  // prints
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

 private:
  std::string line_;
};

}  // namespace petps::bench
