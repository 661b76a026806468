// How workers are scheduled, as the kernel tells it.
#include "server/slice.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "raw_client.h"
#include "server/server.h"

namespace petps::server {
namespace {

constexpr size_t kRuntime = 3;  // of the kernel's sched_attr, in words of 8 bytes
using Words = std::array<uint64_t, 6>;

Words attributes_of(pid_t thread) {
  Words words{};
  syscall(SYS_sched_getattr, thread, words.data(), sizeof(words), 0);  // zeros where it may not
  return words;
}

bool kernel_keeps_slices() {
  bool kept = false;
  std::thread([&] {
    Words wanted = attributes_of(0);
    wanted[kRuntime] = 2 * kWorkerSliceNs;
    syscall(SYS_sched_setattr, 0, wanted.data(), 0);
    kept = attributes_of(0)[kRuntime] == wanted[kRuntime];
  }).join();
  return kept;
}

TEST(Slice, WorkersTakeShortTurnsAndNobodyElseDoes) {
  if (!kernel_keeps_slices()) GTEST_SKIP() << "no slices of threads before Linux 6.12";
  TestPool pool;
  const table::Table& users = pool.add_table("users", 16, 64, 1000);
  ServerOptions options;
  options.port = 0;
  auto started = Server::start(*pool.tables, options);
  ASSERT_TRUE(started.ok()) << started.status().to_string();
  RawClient client(started.value()->port());
  // It is answered by the worker, which therefore runs.
  ASSERT_TRUE(decode_pulled(client.call(pull_frame(1, {{users.id(), {1}}}))).status.ok());

  int workers = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    const Words words = attributes_of(std::stoi(task.path().filename()));
    if (name == "petps-worker") {
      ++workers;
      EXPECT_EQ(words[kRuntime], kWorkerSliceNs);
    } else {
      EXPECT_NE(words[kRuntime], kWorkerSliceNs) << name;
    }
  }
  EXPECT_EQ(workers, 1);
}

}  // namespace
}  // namespace petps::server
