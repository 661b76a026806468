// part=grid measures gather.<mode>.<row bytes>.<keys>: each gather mode, by row bytes and keys of a
// pull.
//
// part=connections measures pull.tcp.connections.<n>, and pull.tcp.fairness: the latency of short
// pulls while another client has long pulls in flight.
//
// One process runs one server per gather mode over the same tables; only one is busy at a time.
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "bench/common/arguments.h"
#include "bench/common/loaded_table.h"
#include "bench/common/measure.h"
#include "bench/pull/pull_load.h"
#include "bench/pull/tcp_processes.h"
#include "server/server.h"
#include "transport/gather_choice.h"

namespace petps::bench {
namespace {

using transport::GatherMode;

constexpr std::array<uint32_t, 5> kRowBytes{64, 128, 512, 1024, 4096};
constexpr std::array<uint32_t, 3> kKeys{100, 500, 2000};
constexpr std::array<GatherMode, 4> kModes{GatherMode::kCopy, GatherMode::kSendmsg,
                                           GatherMode::kZerocopy, GatherMode::kAuto};
constexpr size_t kAuto = 3;
constexpr size_t kMiddle = 2;  // 512-byte rows

struct Setting {
  std::string part;
  std::string medium;
  std::string folder;
  uint64_t table_bytes = 0;
  uint32_t windows = 0;
  double window_s = 0;
  double connections_window_s = 0;
  uint32_t connections_max = 0;
  uint64_t rows(size_t r) const { return table_bytes / kRowBytes[r]; }
  std::string pool_folder(size_t r) const {
    return folder + "/gather-" + std::to_string(kRowBytes[r]);
  }
};

// Memory shared with the server process.
struct Doors {
  std::atomic<bool> open{false};
  uint32_t tables[kRowBytes.size()] = {};
  uint32_t ports[kRowBytes.size()][kModes.size()] = {};
};

[[noreturn]] void serve(const Setting& setting, Doors& doors) {
  run_on(server_core());
  run_before_others();
  const bool grid = setting.part == "grid";
  std::vector<std::unique_ptr<LoadedTable>> tables;
  std::vector<std::unique_ptr<server::Server>> servers;
  for (size_t r = 0; r < kRowBytes.size(); ++r) {
    if (!grid && r != kMiddle) continue;
    TableShape shape;
    shape.medium = setting.medium;
    shape.folder = setting.pool_folder(r);
    std::filesystem::create_directories(shape.folder);
    shape.rows = setting.rows(r);
    shape.dim = kRowBytes[r] / 4;
    tables.push_back(std::make_unique<LoadedTable>(shape));
    doors.tables[r] = tables.back()->table().id();
    for (size_t m = 0; m < kModes.size(); ++m) {
      if ((m == kAuto) == grid) continue;
      server::ServerOptions options;
      options.port = 0;
      options.gather = kModes[m];
      // All numbers of connections are measured at the same time, and all come from this host.
      options.transport.connections_per_peer = 2 * setting.connections_max;
      servers.push_back(value_of(server::Server::start(tables.back()->tables(), options)));
      doors.ports[r][m] = servers.back()->port();
    }
  }
  doors.open.store(true, std::memory_order_release);
  for (;;) pause();
}

class ServerProcess {
 public:
  explicit ServerProcess(const Setting& setting) : setting_(setting) {
    void* shared =
        mmap(nullptr, sizeof(Doors), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) fail("mmap failed");
    doors_ = new (shared) Doors;
    process_ = fork_child("bench-petps", [&] { serve(setting, *doors_); });
    while (!doors_->open.load(std::memory_order_acquire)) {
      if (waitpid(process_, nullptr, WNOHANG) != 0) fail("the server process ended");
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    if (clock_getcpuclockid(process_, &clock_) != 0) fail("the server process has no clock");
  }
  ~ServerProcess() {
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
    munmap(doors_, sizeof(Doors));
    for (size_t r = 0; r < kRowBytes.size(); ++r)
      std::filesystem::remove_all(setting_.pool_folder(r));
  }
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  const Doors& doors() const { return *doors_; }
  double cpu_s() const {
    timespec now{};
    clock_gettime(clock_, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9;
  }
  // Return the clock ticks in user space and in the kernel. They are coarse: use only their share.
  std::pair<double, double> ticks() const {
    std::ifstream file("/proc/" + std::to_string(process_) + "/stat");
    std::string field;
    std::pair<double, double> ticks{0, 0};
    for (int i = 1; i <= 15 && file >> field; ++i) {
      if (i == 14) ticks.first = std::stod(field);
      if (i == 15) ticks.second = std::stod(field);
    }
    return ticks;
  }

 private:
  const Setting& setting_;
  Doors* doors_;
  pid_t process_ = 0;
  clockid_t clock_ = 0;
};

// The results of one gather mode, or one number of connections, over all windows of a cell.
struct Way {
  std::unique_ptr<PullLoad> load;
  std::vector<double> rates;
  std::vector<double> ratios;  // per window, to the first way of the cell
  std::vector<double> latencies;
  double rows = 0;
  double cpu_s = 0;
  double user_ticks = 0;
  double kernel_ticks = 0;

  void window(const ServerProcess& server, double seconds) {
    const double cpu = server.cpu_s();
    const auto ticks = server.ticks();
    const Load done = load->run(seconds);
    cpu_s += server.cpu_s() - cpu;
    const auto after = server.ticks();
    user_ticks += after.first - ticks.first;
    kernel_ticks += after.second - ticks.second;
    rows += static_cast<double>(done.rows);
    rates.push_back(done.rows_per_s());
    latencies.insert(latencies.end(), done.latencies_us.begin(), done.latencies_us.end());
  }
  double cpu_s_per_million() const { return cpu_s / rows * 1e6; }
  double kernel_share() const {
    const double ticks = user_ticks + kernel_ticks;
    return ticks > 0 ? kernel_ticks / ticks : 0;
  }
};

void measure_cell(const Setting& setting, const ServerProcess& server, size_t r, uint32_t keys) {
  const Doors& doors = server.doors();
  const Requests requests = make_requests(doors.tables[r], setting.rows(r), kRowBytes[r], keys);
  std::array<Way, transport::kGatherModes.size()> ways;
  for (size_t m = 0; m < ways.size(); ++m) {
    ways[m].load = std::make_unique<PullLoad>(doors.ports[r][m], requests, 1, 2);
    ways[m].load->check();
    ways[m].load->run(setting.window_s / 4);  // warm-up: sockets grow, caches fill
  }
  for (uint32_t window = 0; window < setting.windows; ++window) {
    for (Way& way : ways) way.window(server, setting.window_s);
    for (Way& way : ways) way.ratios.push_back(way.rates.back() / ways[0].rates.back());
  }
  for (Way& way : ways) std::sort(way.latencies.begin(), way.latencies.end());
  const Way& copy = ways[0];
  std::vector<double> copies = copy.latencies;
  for (size_t m = 0; m < ways.size(); ++m) {
    Way& way = ways[m];
    const double p50 = percentile(way.latencies, 0.5);
    const double p99 = percentile(way.latencies, 0.99);
    const double cpu = way.cpu_s_per_million();
    Line line(std::string("gather.") + transport::gather_mode_name(kModes[m]) + "." +
                  std::to_string(kRowBytes[r]) + "." + std::to_string(keys),
              setting.medium);
    line.text("unit", "rows/s")
        .text("ratio_to", "gather by copy")
        .number("value", median(way.rates))
        .number("limit", median(copy.rates))
        .number("ratio", median(way.ratios))
        .number("ratio_low", *std::min_element(way.ratios.begin(), way.ratios.end()))
        .number("ratio_high", *std::max_element(way.ratios.begin(), way.ratios.end()))
        .number("p50_us", p50)
        .number("p50_ratio", p50 / percentile(copies, 0.5))
        .number("p99_us", p99)
        .number("p99_ratio", p99 / percentile(copies, 0.99))
        .number("server_cpu_s_per_million_rows", cpu)
        .number("server_cpu_ratio", cpu / copy.cpu_s_per_million())
        .number("server_kernel_share", way.kernel_share())
        .number("connections", 1)
        .number("in_flight", 2);
  }
}

void measure_connections(const Setting& setting, const ServerProcess& server) {
  const Doors& doors = server.doors();
  const Requests requests =
      make_requests(doors.tables[kMiddle], setting.rows(kMiddle), kRowBytes[kMiddle], 500);
  const uint32_t port = doors.ports[kMiddle][kAuto];
  std::vector<std::pair<uint32_t, Way>> numbers;
  for (const uint32_t n : {1u, 2u, 8u, 64u, 1000u}) {
    if (n > setting.connections_max) continue;
    numbers.emplace_back(n, Way{});
    numbers.back().second.load = std::make_unique<PullLoad>(port, requests, n, 1);
    numbers.back().second.load->check();
    numbers.back().second.load->run(setting.connections_window_s / 4);
  }
  for (uint32_t window = 0; window < setting.windows; ++window) {
    for (auto& [n, way] : numbers) way.window(server, setting.connections_window_s);
    for (auto& [n, way] : numbers)
      way.ratios.push_back(way.rates.back() / numbers[0].second.rates.back());
  }
  for (auto& [n, way] : numbers) {
    std::sort(way.latencies.begin(), way.latencies.end());
    Line("pull.tcp.connections." + std::to_string(n), setting.medium)
        .text("unit", "rows/s")
        .text("ratio_to", "one connection with one pull in flight")
        .number("value", median(way.rates))
        .number("limit", median(numbers[0].second.rates))
        .number("ratio", median(way.ratios))
        .number("p50_us", percentile(way.latencies, 0.5))
        .number("p99_us", percentile(way.latencies, 0.99))
        // The latency of a pull if the server answers all connections in round-robin order.
        .number("fair_us", 500.0 * n / median(way.rates) * 1e6)
        .number("server_cpu_s_per_million_rows", way.cpu_s_per_million())
        .number("in_flight", n);
  }
}

// Measures a client with 10-key pulls: alone, and while another one has four 2,000-key pulls in
// flight.
void measure_fairness(const Setting& setting, const ServerProcess& server) {
  const Doors& doors = server.doors();
  const auto ask = [&](uint32_t keys) {
    return make_requests(doors.tables[kMiddle], setting.rows(kMiddle), kRowBytes[kMiddle], keys);
  };
  const Requests small = ask(10);
  const Requests large = ask(2000);
  const uint32_t port = doors.ports[kMiddle][kAuto];
  PullLoad few(port, small, 1, 1);
  PullLoad many(port, large, 1, 4);
  // The two clients share a core. This one has priority: the figure is the server's fairness.
  run_before_others(2);
  std::vector<double> alone, beside, long_pulls, long_alone_rate, long_rate;
  const auto add = [](std::vector<double>& to, const Load& load) {
    to.insert(to.end(), load.latencies_us.begin(), load.latencies_us.end());
  };
  for (uint32_t window = 0; window < setting.windows; ++window) {
    add(alone, few.run(setting.connections_window_s));
    long_alone_rate.push_back(many.run(setting.connections_window_s).rows_per_s());
    Load loaded;
    std::thread other([&] {
      run_before_others();
      loaded = many.run(setting.connections_window_s);
    });
    add(beside, few.run(setting.connections_window_s));
    other.join();
    add(long_pulls, loaded);
    long_rate.push_back(loaded.rows_per_s());
  }
  for (std::vector<double>* latencies : {&alone, &beside, &long_pulls})
    std::sort(latencies->begin(), latencies->end());
  const double p99 = percentile(beside, 0.99);
  const double long_p50 = percentile(long_pulls, 0.5);
  Line("pull.tcp.fairness", setting.medium)
      .text("unit", "us")
      .text("ratio_to", "p50 of the 2,000-key pulls beside which the 10-key pulls run")
      .number("value", p99)
      .number("limit", long_p50)
      .number("ratio", p99 / long_p50)
      .number("p50_us", percentile(beside, 0.5))
      .number("alone_p50_us", percentile(alone, 0.5))
      .number("alone_p99_us", percentile(alone, 0.99))
      .number("long_rows_per_s", median(long_rate))
      .number("long_alone_rows_per_s", median(long_alone_rate));
}

}  // namespace
}  // namespace petps::bench

int main(int count, char** values) {
  using namespace petps::bench;
  Arguments arguments(count, values);
  Setting setting;
  setting.part = arguments.text("part", "grid");
  setting.medium = arguments.text("medium", "file");
  setting.folder = arguments.text("folder", "build/bench");
  setting.table_bytes = arguments.number("table_mib", 128) << 20;
  setting.windows = arguments.small_number("windows", 9);
  setting.window_s = static_cast<double>(arguments.number("window_ms", 25)) / 1e3;
  setting.connections_window_s =
      static_cast<double>(arguments.number("connections_window_ms", 150)) / 1e3;
  setting.connections_max = arguments.small_number("connections_max", 1000);
  arguments.finish();
  // A thousand connections need a thousand descriptors in each process.
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = std::min<rlim_t>(files.rlim_max, 8192);
  setrlimit(RLIMIT_NOFILE, &files);
  const ServerProcess server(setting);
  run_before_others();
  run_on(client_core());
  if (setting.part == "grid") {
    for (size_t r = 0; r < kRowBytes.size(); ++r) {
      for (const uint32_t keys : kKeys) measure_cell(setting, server, r, keys);
    }
    return 0;
  }
  measure_connections(setting, server);
  measure_fairness(setting, server);
}
