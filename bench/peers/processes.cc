#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "bench/common/loaded_table.h"
#include "bench/peers/peer.h"
#include "bench/pull/loopback.h"
#include "bench/pull/tcp_processes.h"

namespace petps::bench {

ServerProgram::ServerProgram(const std::string& folder, const std::string& name,
                             const std::vector<std::string>& command) {
  process_ = fork_child(name.c_str(), [&] {
    run_on(server_core());
    const int log = open((folder + "/" + name + ".log").c_str(), O_CREAT | O_WRONLY, 0600);
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
    std::vector<char*> arguments;
    for (const std::string& argument : command)
      arguments.push_back(const_cast<char*>(argument.c_str()));
    arguments.push_back(nullptr);
    execvp(arguments[0], arguments.data());
    _exit(127);
  });
}

ServerProgram::~ServerProgram() {
  kill(process_, SIGKILL);
  waitpid(process_, nullptr, 0);
}

uint16_t free_port() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = loopback(0);
  socklen_t length = sizeof address;
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    fail("no free port on 127.0.0.1");
  close(listener);
  return ntohs(address.sin_port);
}

void retry(const std::string& what, const std::function<bool()>& attempt) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  while (!attempt()) {
    if (std::chrono::steady_clock::now() > deadline) fail(what + " does not answer");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

uint64_t bytes_below(const std::string& folder) {
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    struct stat facts;
    if (entry.is_regular_file() && stat(entry.path().c_str(), &facts) == 0)
      bytes += static_cast<uint64_t>(facts.st_blocks) * 512;
  }
  return bytes;
}

}  // namespace petps::bench
