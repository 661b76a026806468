#include "bench/pull/tcp_processes.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "bench/common/limit_memory.h"
#include "bench/common/random.h"
#include "pool/slots.h"
#include "server/server.h"

namespace petps::bench {
namespace {

using Clock = std::chrono::steady_clock;

// Draw batches of distinct keys before the clock starts. The Applier cycles through them.
std::vector<std::vector<uint64_t>> draw_batches(uint64_t rows, uint64_t batch_rows) {
  constexpr uint64_t kBatches = 512;
  Random random(7);
  std::vector<uint32_t> order(rows);
  for (uint32_t i = 0; i < rows; ++i) order[i] = i;
  std::vector<std::vector<uint64_t>> batches;
  uint64_t used = 0;
  for (uint64_t b = 0; b < kBatches; ++b) {
    if (used + batch_rows > rows) used = 0;
    std::vector<uint64_t>& keys = batches.emplace_back();
    for (uint64_t i = 0; i < batch_rows; ++i, ++used) {
      std::swap(order[used], order[used + random.below(rows - used)]);
      keys.push_back(LoadedTable::key(order[used]));
    }
  }
  return batches;
}

class Applier {
 public:
  Applier(LoadedTable& loaded, const ApplyPace& pace, Control& control)
      : loaded_(loaded),
        pace_{std::min(pace.batch_rows, loaded.rows()), pace.rows_per_s},
        control_(control),
        batches_(draw_batches(loaded.rows(), pace_.batch_rows)),
        rows_(pace_.batch_rows * loaded.row_bytes()) {}

  // Touch every slot that replacing rows will use, before the clock starts.
  void touch_slots() {
    const uint64_t rows = loaded_.rows() / 4 + 2 * pool::kSpareSlots;
    for (uint64_t done = 0; done < rows; done += pace_.batch_rows) apply();
  }

  void run() {
    const auto gap = std::chrono::nanoseconds(pace_.batch_rows * 1'000'000'000 / pace_.rows_per_s);
    for (;;) {
      while (!control_.apply.load(std::memory_order_acquire)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      auto due = Clock::now();
      while (control_.apply.load(std::memory_order_acquire)) {
        const auto start = Clock::now();
        apply();
        const auto spent = std::chrono::nanoseconds(Clock::now() - start);
        control_.apply_ns.fetch_add(static_cast<uint64_t>(spent.count()));
        control_.applied_rows.fetch_add(pace_.batch_rows);
        std::this_thread::sleep_until(due += gap);
      }
    }
  }

 private:
  void apply() {
    const std::vector<uint64_t>& keys = batches_[next_++ % batches_.size()];
    for (uint64_t i = 0; i < keys.size(); ++i) {
      LoadedTable::fill(keys[i], next_, rows_.data() + i * loaded_.row_bytes(),
                        loaded_.row_bytes());
    }
    const auto report = value_of(loaded_.table().apply({keys, rows_.data(), {}, 1}));
    if (report.updated != keys.size()) fail("apply did not update every row");
  }

  LoadedTable& loaded_;
  ApplyPace pace_;
  Control& control_;
  std::vector<std::vector<uint64_t>> batches_;
  std::vector<std::byte> rows_;
  uint64_t next_ = 0;
};

[[noreturn]] void run_petps(const TableShape& shape, const ApplyPace& pace, const TlsPaths& paths,
                            Control& control) {
  run_on(server_core());
  LoadedTable loaded(shape);
  Applier applier(loaded, pace, control);
  applier.touch_slots();
  run_before_others();
  server::ServerOptions options;
  options.port = 0;
  if (!paths.empty()) {
    tls::ServerFiles files;
    files.certificate = paths.certificate;
    files.key = paths.key;
    options.tls = value_of(tls::ServerContext::open(files));
  }
  const auto server = value_of(server::Server::start(loaded.tables(), options));
  control.petps_port.store(server->port(), std::memory_order_release);
  applier.run();
  std::_Exit(0);
}

[[noreturn]] void run_limit(const TableShape& shape, const TlsPaths& tls, Control& control) {
  run_on(server_core());
  const uint32_t row_bytes = shape.dim * 4;
  const LimitMemory rows(shape, shape.rows * row_bytes);
  for (uint64_t i = 0; i < shape.rows; ++i) {
    LoadedTable::fill(LoadedTable::key(i), 0, rows.at() + i * row_bytes, row_bytes);
  }
  run_before_others();
  uint16_t port = 0;
  const int listener = listen_on_loopback(&port);
  control.limit_port.store(port, std::memory_order_release);
  serve_rows(listener, rows.at(), row_bytes, tls);
}

void set_core(pid_t thread, int core) {
  const int cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int i = 0; i < cores; ++i) {
    if (core < 0 || i == core) CPU_SET(i, &set);
  }
  sched_setaffinity(thread, sizeof set, &set);
}

}  // namespace

pid_t fork_child(const char* name, const std::function<void()>& run) {
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) fail("fork failed");
  if (child > 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) std::_Exit(1);
  prctl(PR_SET_NAME, name);
  run();
  std::_Exit(0);
}

int client_core() { return 0; }
int server_core() { return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)) - 1; }

void run_on(int core) { set_core(0, core); }

void run_process_on(pid_t process, int core) {
  const std::string folder = "/proc/" + std::to_string(process) + "/task";
  for (const auto& thread : std::filesystem::directory_iterator(folder)) {
    set_core(static_cast<pid_t>(std::stol(thread.path().filename().string())), core);
  }
}

void run_before_others(int priority) {
  sched_param parameters{};
  parameters.sched_priority = priority;
  sched_setscheduler(0, SCHED_FIFO, &parameters);
}

const char* scheduling() { return sched_getscheduler(0) == SCHED_FIFO ? "fifo" : "shared"; }

ServerProcesses::ServerProcesses(const TableShape& shape, const ApplyPace& pace,
                                 const TlsPaths& tls) {
  void* shared =
      mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) fail("mmap failed");
  control_ = new (shared) Control;
  petps_ = fork_child("bench-petps", [&] { run_petps(shape, pace, tls, *control_); });
  limit_ = fork_child("bench-limit", [&] { run_limit(shape, tls, *control_); });
}

ServerProcesses::~ServerProcesses() {
  for (const pid_t child : {petps_, limit_}) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  munmap(control_, sizeof(Control));
}

void ServerProcesses::wait_until_serving() {
  while (control_->petps_port.load(std::memory_order_acquire) == 0 ||
         control_->limit_port.load(std::memory_order_acquire) == 0) {
    for (const pid_t child : {petps_, limit_}) {
      if (waitpid(child, nullptr, WNOHANG) != 0) fail("a server process ended");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

}  // namespace petps::bench
