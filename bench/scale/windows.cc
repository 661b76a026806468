#include "bench/scale/windows.h"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

namespace petps::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Costs {
  double voluntary = 0;  // context switches because a thread waited: for a lock, a peer, the disk
  double involuntary = 0;
  double user_s = 0;
  double system_s = 0;

  Costs& operator+=(const Costs& other) { return add(other, 1); }
  Costs& operator-=(const Costs& other) { return add(other, -1); }

 private:
  Costs& add(const Costs& other, double sign) {
    voluntary += sign * other.voluntary;
    involuntary += sign * other.involuntary;
    user_s += sign * other.user_s;
    system_s += sign * other.system_s;
    return *this;
  }
};

Costs costs_of_thread() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return {static_cast<double>(usage.ru_nvcsw), static_cast<double>(usage.ru_nivcsw),
          seconds(usage.ru_utime), seconds(usage.ru_stime)};
}

// Return the costs of each thread that a process has now.
std::map<std::string, Costs> costs_by_thread(pid_t process) {
  std::map<std::string, Costs> all;
  if (process == 0) return all;
  const std::string folder = "/proc/" + std::to_string(process) + "/task";
  for (const auto& task : std::filesystem::directory_iterator(folder)) {
    Costs costs;
    std::ifstream status(task.path() / "status");
    for (std::string field; status >> field;) {
      if (field == "voluntary_ctxt_switches:") status >> costs.voluntary;
      if (field == "nonvoluntary_ctxt_switches:") status >> costs.involuntary;
    }
    std::ifstream stat(task.path() / "stat");
    const std::string text((std::istreambuf_iterator<char>(stat)), {});
    if (text.empty()) continue;  // the thread has just ended
    std::istringstream fields(text.substr(text.rfind(')') + 2));
    std::string skipped;
    for (int field = 0; field < 11; ++field) fields >> skipped;
    fields >> costs.user_s >> costs.system_s;
    const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
    costs.user_s /= ticks;
    costs.system_s /= ticks;
    all[task.path().filename()] = costs;
  }
  return all;
}

// The sums over the windows of one number of threads.
struct Sums {
  std::vector<double> rates;
  Costs costs;
  double rows = 0;
  double seconds = 0;
};

void run_window(uint32_t threads, const Windows& windows, const Work& work, Sums* sums) {
  std::atomic<uint64_t> rows{0};
  std::mutex mutex;
  Costs costs;
  std::barrier start(threads + 1);
  std::vector<std::thread> crew;
  for (uint32_t thread = 0; thread < threads; ++thread) {
    crew.emplace_back([&, thread] {
      start.arrive_and_wait();
      const Costs before = costs_of_thread();
      const auto end = Clock::now() + windows.window;
      uint64_t own_rows = 0;
      do own_rows += work(thread);
      while (Clock::now() < end);
      rows += own_rows;
      Costs after = costs_of_thread();
      const std::lock_guard lock(mutex);
      costs += after -= before;
    });
  }
  const auto server_before = costs_by_thread(windows.server);
  const auto begun = Clock::now();
  start.arrive_and_wait();
  for (std::thread& thread : crew) thread.join();
  const double seconds = std::chrono::duration<double>(Clock::now() - begun).count();
  for (const auto& [id, thread_costs] : costs_by_thread(windows.server)) {
    costs += thread_costs;
    if (server_before.contains(id)) costs -= server_before.at(id);
  }
  sums->rates.push_back(static_cast<double>(rows) / seconds);
  sums->costs += costs;
  sums->rows += static_cast<double>(rows);
  sums->seconds += seconds;
}

}  // namespace

uint32_t processors() {
  cpu_set_t set;
  sched_getaffinity(0, sizeof set, &set);
  return static_cast<uint32_t>(CPU_COUNT(&set));
}

void measure_scale(const std::string& name, const Windows& windows,
                   const std::function<Work(uint32_t threads)>& prepare,
                   const std::function<void(Line&)>& describe) {
  std::vector<Sums> all(std::size(kThreadCounts));
  for (uint32_t round = 0; round < windows.rounds; ++round) {
    for (size_t i = 0; i < all.size(); ++i)
      run_window(kThreadCounts[i], windows, prepare(kThreadCounts[i]), &all[i]);
  }
  for (size_t i = 0; i < all.size(); ++i) {
    const Sums& sums = all[i];
    Compared compared;
    summarise(sums.rates, all[0].rates, &compared);
    compared.value_best = *std::max_element(sums.rates.begin(), sums.rates.end());
    compared.limit_best = *std::max_element(all[0].rates.begin(), all[0].rates.end());
    const double cpu_s = sums.costs.user_s + sums.costs.system_s;
    Line line(name + "." + std::to_string(kThreadCounts[i]));
    line.text("medium", "file")
        .text("unit", "rows/s")
        .text("ratio_to", "one thread in the same rounds")
        .number("threads", kThreadCounts[i])
        .number("processors", processors());
    describe(line);
    line.number("voluntary_switches_per_1000_rows", 1000 * sums.costs.voluntary / sums.rows)
        .number("involuntary_switches_per_1000_rows", 1000 * sums.costs.involuntary / sums.rows)
        .number("system_cpu_share", sums.costs.system_s / cpu_s)
        .number("processors_used", cpu_s / sums.seconds)
        .compared(compared);
  }
}

}  // namespace petps::bench
