// The two servers of the TCP bench, each in its own process, and the memory that controls them.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>

#include "bench/common/loaded_table.h"
#include "bench/pull/tcp_limit.h"

namespace petps::bench {

// Memory shared with the child processes.
struct Control {
  std::atomic<uint32_t> petps_port{0};  // 0: not serving yet
  std::atomic<uint32_t> limit_port{0};
  std::atomic<bool> apply{false};  // the petps server applies batches while it is set
  std::atomic<uint64_t> applied_rows{0};
  std::atomic<uint64_t> apply_ns{0};  // time spent in apply
};

struct ApplyPace {
  uint64_t batch_rows = 2048;
  uint64_t rows_per_s = 102'400;  // 50 batches per second
};

// Both clients run on the first core and both servers on the last. With one core they share it.
int client_core();
int server_core();
// Pin the calling thread, and the threads that it will create, to a core. core < 0: any core.
void run_on(int core);
// Pin every thread of another process.
void run_process_on(pid_t process, int core);
// Give the calling thread, and the threads that it will create, real-time priority (SCHED_FIFO)
// if that is permitted; a higher number runs first. A pull sleeps and wakes twice. Without
// priority it would wait each time until the time slice of whatever else runs is over.
void run_before_others(int priority = 1);
// Return the scheduling of the calling thread: "fifo" or "shared".
const char* scheduling();

// Run `run` in a child process that is killed when this process exits. The caller must have no
// other threads.
pid_t fork_child(const char* name, const std::function<void()>& run);

// The two server processes. They are killed when the calling process exits. The caller must have no
// other threads.
class ServerProcesses {
 public:
  ServerProcesses(const TableShape& shape, const ApplyPace& pace, const TlsPaths& tls = {});
  ~ServerProcesses();
  ServerProcesses(const ServerProcesses&) = delete;
  ServerProcesses& operator=(const ServerProcesses&) = delete;

  void wait_until_serving();
  Control& control() { return *control_; }
  pid_t petps() const { return petps_; }
  pid_t limit() const { return limit_; }

 private:
  Control* control_;
  pid_t petps_ = 0;
  pid_t limit_ = 0;
};

}  // namespace petps::bench
