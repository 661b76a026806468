#include "bench/common/measure.h"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <thread>

namespace petps::bench {

namespace {

constexpr uint32_t kAttempts = 4;  // measurements of a window before a disturbed one is accepted
constexpr double kNearNs = 150;    // between about 50 (near cores) and 370 (far cores)

uint64_t nanoseconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

struct Window {
  uint64_t operations = 0;
  uint64_t wall_ns = 0;
  bool calm = false;
};

Window run_once(const std::function<uint64_t()>& side, const Plan& plan) {
  const uint64_t cpu = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
  const uint64_t wall = nanoseconds(CLOCK_MONOTONIC);
  Window window;
  window.operations = side();
  window.wall_ns = nanoseconds(CLOCK_MONOTONIC) - wall;
  const uint64_t used = nanoseconds(CLOCK_THREAD_CPUTIME_ID) - cpu;
  window.calm = plan.crew != nullptr
                    ? plan.crew->kept_cores()
                    : static_cast<double>(used) >= plan.calm * static_cast<double>(window.wall_ns);
  return window;
}

struct Sum {
  double best = 0;
  uint64_t operations = 0;
  uint64_t wall_ns = 0;
  double rate() const {
    return static_cast<double>(operations) * 1e9 / static_cast<double>(wall_ns);
  }
};

void add_window(const std::function<uint64_t()>& side, const Plan& plan, Sum* sum,
                uint64_t* disturbed) {
  Window best;
  for (uint32_t attempt = 0; attempt < kAttempts; ++attempt) {
    const Window window = run_once(side, plan);
    if (attempt == 0 || window.calm || window.wall_ns < best.wall_ns) best = window;
    if (window.calm) break;
    *disturbed += 1;
  }
  sum->best = std::max(
      sum->best, static_cast<double>(best.operations) * 1e9 / static_cast<double>(best.wall_ns));
  sum->operations += best.operations;
  sum->wall_ns += best.wall_ns;
}

void pin_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

double ping_pong_window() {
  constexpr uint64_t kTrips = 2000;
  struct alignas(128) Ball {
    std::atomic<uint64_t> turn{0};
  } ball;
  std::thread other([&] {
    pin_to(1);
    for (uint64_t i = 1; i <= 2 * kTrips; i += 2) {
      while (ball.turn.load(std::memory_order_acquire) != i) {
      }
      ball.turn.store(i + 1, std::memory_order_release);
    }
  });
  uint64_t start = 0;
  std::thread here([&] {
    pin_to(0);
    // The first round trip also waits for the other thread to start, so it is not timed.
    ball.turn.store(1, std::memory_order_release);
    while (ball.turn.load(std::memory_order_acquire) != 2) {
    }
    start = nanoseconds(CLOCK_MONOTONIC);
    for (uint64_t i = 3; i <= 2 * kTrips; i += 2) {
      ball.turn.store(i, std::memory_order_release);
      while (ball.turn.load(std::memory_order_acquire) != i + 1) {
      }
    }
    start = nanoseconds(CLOCK_MONOTONIC) - start;
  });
  here.join();
  other.join();
  return static_cast<double>(start) / static_cast<double>(kTrips - 1);
}

}  // namespace

Crew::Crew(uint32_t threads) {
  if (threads > 1) pin_to(0);
  for (uint32_t thread = 1; thread < threads; ++thread) {
    others_.emplace_back([this, thread] {
      pin_to(static_cast<int>(thread));
      for (uint64_t round = 1;; ++round) {
        while (started_.load(std::memory_order_acquire) < round) {
          if (ends_.load(std::memory_order_relaxed)) return;
        }
        take_part(thread);
        finished_.fetch_add(1, std::memory_order_release);
      }
    });
  }
}

Crew::~Crew() {
  ends_.store(true, std::memory_order_relaxed);
  for (std::thread& other : others_) other.join();
}

void Crew::take_part(uint32_t thread) {
  const auto switches = [] {
    rusage usage{};
    getrusage(RUSAGE_THREAD, &usage);
    return static_cast<uint64_t>(usage.ru_nivcsw);
  };
  const uint64_t before = switches();
  (*part_)(thread);
  lost_.fetch_add(switches() - before, std::memory_order_relaxed);
}

void Crew::run(const std::function<void(uint32_t thread)>& part) {
  part_ = &part;
  finished_.store(0, std::memory_order_relaxed);
  lost_.store(0, std::memory_order_relaxed);
  started_.fetch_add(1, std::memory_order_release);
  take_part(0);
  while (finished_.load(std::memory_order_acquire) < others_.size()) {
  }
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double percentile(std::vector<double>& sorted, double share) {
  const auto last = static_cast<double>(sorted.size() - 1);
  return sorted[static_cast<size_t>(std::ceil(share * last))];
}

Compared compare(const Plan& plan, const std::function<uint64_t()>& petps,
                 const std::function<uint64_t()>& limit) {
  std::vector<double> values, limits;
  Compared result;
  run_once(petps, plan);
  run_once(limit, plan);
  for (uint32_t round = 0; round < plan.rounds; ++round) {
    Sum ours, theirs;
    for (uint32_t window = 0; window < plan.windows; ++window) {
      add_window(petps, plan, &ours, &result.disturbed);
      add_window(limit, plan, &theirs, &result.disturbed);
    }
    result.value_best = std::max(result.value_best, ours.best);
    result.limit_best = std::max(result.limit_best, theirs.best);
    values.push_back(ours.rate());
    limits.push_back(theirs.rate());
  }
  summarise(values, limits, &result);
  return result;
}

void summarise(const std::vector<double>& values, const std::vector<double>& limits,
               Compared* result) {
  std::vector<double> ratios;
  for (size_t i = 0; i < values.size(); ++i) ratios.push_back(values[i] / limits[i]);
  result->value = median(values);
  result->limit = median(limits);
  result->ratio = median(ratios);
  result->ratio_low = *std::min_element(ratios.begin(), ratios.end());
  result->ratio_high = *std::max_element(ratios.begin(), ratios.end());
}

double tune(uint32_t windows, const std::function<uint64_t()>& side,
            std::initializer_list<uint64_t> candidates, uint64_t* ahead) {
  double best = 0;
  uint64_t best_ahead = 0;
  for (const uint64_t candidate : candidates) {
    *ahead = candidate;
    const double rate = best_rate(windows, side);
    if (rate > best) best = rate, best_ahead = candidate;
  }
  *ahead = best_ahead;
  return best;
}

double best_rate(uint32_t windows, const std::function<uint64_t()>& side) {
  double best = 0;
  run_once(side, Plan{});
  for (uint32_t i = 0; i < windows; ++i) {
    const Window window = run_once(side, Plan{});
    best = std::max(
        best, static_cast<double>(window.operations) * 1e9 / static_cast<double>(window.wall_ns));
  }
  return best;
}

double line_round_trip_ns() {
  if (std::thread::hardware_concurrency() < 2) return 0;
  double best = ping_pong_window();
  for (int i = 0; i < 4; ++i) best = std::min(best, ping_pong_window());
  return best;
}

const char* distance_name(double round_trip_ns) {
  if (round_trip_ns == 0) return "single core";
  return round_trip_ns < kNearNs ? "near" : "far";
}

Line::Line(const std::string& name, const std::string& medium)
    : Line(medium == "dram" ? name + ".dram" : name) {
  text("medium", medium);
}

Line::Line(const std::string& name) { text("name", name); }

Line& Line::number(const char* field, double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%.10g", value);
  line_ += (line_.empty() ? "{\"" : ", \"") + std::string(field) + "\": ";
  line_ += std::isfinite(value) ? text : "null";
  return *this;
}

Line& Line::text(const char* field, const std::string& value) {
  line_ += (line_.empty() ? "{\"" : ", \"") + std::string(field) + "\": \"" + value + "\"";
  return *this;
}

Line& Line::compared(const Compared& c) {
  return number("value", c.value)
      .number("limit", c.limit)
      .number("ratio", c.ratio)
      .number("ratio_low", c.ratio_low)
      .number("ratio_high", c.ratio_high)
      .number("value_best", c.value_best)
      .number("limit_best", c.limit_best)
      .number("disturbed", static_cast<double>(c.disturbed));
}

Line::~Line() {
  std::printf("%s}\n", line_.c_str());
  std::fflush(stdout);
}

}  // namespace petps::bench
