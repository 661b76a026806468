// The two servers of the TCP bench, each a process of its own, with what the bench asks of them.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>

#include "bench/common/loaded_table.h"

namespace petps::bench {

// Shared with the children.
struct Control {
  std::atomic<uint32_t> petps_port{0};  // 0: not serving yet
  std::atomic<uint32_t> limit_port{0};
  std::atomic<bool> apply{false};  // the server's apply thread works while it is set
  std::atomic<uint64_t> applied_rows{0};
  std::atomic<uint64_t> apply_ns{0};  // spent inside of apply
};

struct ApplyPace {
  uint64_t batch_rows = 2048;
  uint64_t rows_per_s = 102'400;  // 50 batches
};

// Cores of the two ends: both servers on the last, both clients on the first; of one core, both.
int client_core();
int server_core();
// The calling thread and those it makes. core < 0: any core.
void run_on(int core);
// The same for every thread of another process.
void run_process_on(pid_t process, int core);
// Before everything else on the machine, where that is allowed (SCHED_FIFO): a pull sleeps and wakes
// twice, and each time would wait for the slice of whatever else runs. The calling thread and those
// it makes.
void run_before_others(int priority = 1);  // a higher one goes first
const char* scheduling();                  // of the calling thread: "fifo" or "shared"

// Runs `run` in a child process that ends with this one; the caller must have no thread.
pid_t fork_child(const char* name, const std::function<void()>& run);

// Forks both servers; the caller must have no thread. They end with the caller.
class ServerProcesses {
 public:
  ServerProcesses(const TableShape& shape, const ApplyPace& pace);
  ~ServerProcesses();
  ServerProcesses(const ServerProcesses&) = delete;
  ServerProcesses& operator=(const ServerProcesses&) = delete;

  void wait_until_serving();
  Control& control() { return *control_; }
  pid_t petps() const { return petps_; }

 private:
  Control* control_;
  pid_t petps_ = 0;
  pid_t limit_ = 0;
};

}  // namespace petps::bench
