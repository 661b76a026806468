#include "mutant.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace petps::crash {

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
  if (WIFSIGNALED(status)) return "the process died of signal " + std::to_string(WTERMSIG(status));
  return problem;
}

}  // namespace petps::crash
