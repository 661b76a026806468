#include "mutant.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>

namespace petps::crash {

namespace {

std::atomic<bool> is_mutant{false};
std::atomic<uint64_t> yields{0};
int result_channel = -1;

// End the mutant, from whatever loop it is in.
[[noreturn]] void give_up() {
  constexpr char kWhy[] = "it waits for a lock that nobody holds";
  const ssize_t written = write(result_channel, kWhy, sizeof kWhy - 1);
  _exit(written > 0 ? 0 : 1);
}

}  // namespace

// What a loop that waits for another thread calls (base::yield), in place of the C library's. A
// mutant has no other thread that could hold what it waits for. On a busy machine such a loop uses
// next to no processor, so a limit of CPU time ends it only after minutes.
extern "C" int sched_yield() noexcept {
  if (!is_mutant.load(std::memory_order_relaxed)) return static_cast<int>(syscall(SYS_sched_yield));
  if (yields.fetch_add(1, std::memory_order_relaxed) > kYieldsMax) give_up();
  return 0;
}

std::string run_in_child(const std::function<std::string()>& run) {
  int channel[2];
  if (pipe(channel) != 0) return "";
  const pid_t child = fork();
  if (child == 0) {
    close(channel[0]);
    close(STDERR_FILENO);  // the failed checks of a mutant are expected
    const rlimit limit{kBusySeconds, kBusySeconds};
    setrlimit(RLIMIT_CPU, &limit);
    alarm(kHangSeconds);
    result_channel = channel[1];
    is_mutant = true;
    const std::string problem = run().substr(0, 2000);
    const ssize_t written = write(channel[1], problem.data(), problem.size());
    _exit(written == static_cast<ssize_t>(problem.size()) ? 0 : 1);
  }
  close(channel[1]);
  std::string problem;
  char buffer[2048];
  for (ssize_t n; (n = read(channel[0], buffer, sizeof buffer)) > 0;)
    problem.append(buffer, static_cast<size_t>(n));
  close(channel[0]);
  int status = 0;
  waitpid(child, &status, 0);
  // It sleeps, or the machine is too busy to tell: this kills no mutant.
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) return "";
  if (WIFSIGNALED(status)) return "the process died of signal " + std::to_string(WTERMSIG(status));
  return problem;
}

}  // namespace petps::crash
