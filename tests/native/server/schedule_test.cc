// How workers are scheduled, as the kernel reports it.
#include "server/schedule.h"

#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "base/time_slice.h"
#include "raw_client.h"
#include "server/server.h"

namespace petps::server {
namespace {

constexpr size_t kRuntime = 3;  // index in the kernel's sched_attr, in words of 8 bytes
using Words = std::array<uint64_t, 6>;

Words attributes_of(pid_t thread) {
  Words words{};
  syscall(SYS_sched_getattr, thread, words.data(), sizeof(words), 0);  // zeros if not permitted
  return words;
}

int policy_of(const Words& words) { return static_cast<int>(words[0] >> 32); }

bool kernel_keeps_slices() {
  bool kept = false;
  std::thread([&] {
    Words wanted = attributes_of(0);
    wanted[kRuntime] = 2 * base::kShortSliceNs;
    syscall(SYS_sched_setattr, 0, wanted.data(), 0);
    kept = attributes_of(0)[kRuntime] == wanted[kRuntime];
  }).join();
  return kept;
}

class ScheduleTest : public testing::Test {
 protected:
  ScheduleTest() : users_(pool_.add_table("users", 16, 64, 1000)) {}

  // Return the attributes of the one worker, once it has answered; no other thread may have its
  // slice.
  Words worker_of(uint32_t real_time) {
    ServerOptions options;
    options.port = 0;
    options.real_time = real_time;
    auto started = Server::start(*pool_.tables, options);
    EXPECT_TRUE(started.ok()) << started.status().to_string();
    if (!started.ok()) return {};
    RawClient client(started.value()->port());
    EXPECT_TRUE(decode_pulled(client.call(pull_frame(1, {{users_.id(), {1}}}))).status.ok());
    Words found{};
    int workers = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name;
      std::getline(std::ifstream(task.path() / "comm"), name);
      const Words words = attributes_of(std::stoi(task.path().filename()));
      if (name == "petps-worker") {
        ++workers;
        found = words;
      } else {
        EXPECT_NE(words[kRuntime], base::kShortSliceNs) << name;
        EXPECT_EQ(policy_of(words), policy_of(attributes_of(0))) << name;
      }
    }
    EXPECT_EQ(workers, 1);
    return found;
  }

  TestPool pool_;
  table::Table& users_;
};

TEST_F(ScheduleTest, WorkersGetShortTimeSlicesAndNobodyElseDoes) {
  if (!kernel_keeps_slices()) GTEST_SKIP() << "no slices of threads before Linux 6.12";
  EXPECT_EQ(worker_of(0)[kRuntime], base::kShortSliceNs);
}

TEST_F(ScheduleTest, WorkersRunInRealTimeWhereThatIsPermitted) {
  if (!check_real_time(2).ok()) GTEST_SKIP() << check_real_time(2).to_string();
  EXPECT_EQ(policy_of(worker_of(2)), SCHED_FIFO);
}

TEST_F(ScheduleTest, APriorityThatIsNotPermittedIsRefusedBeforeAnythingListens) {
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_RTPRIO, &before), 0);
  const rlimit none{0, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_RTPRIO, &none), 0);
  std::thread([&] {  // affects this thread and those that it starts
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct data[2] = {};
    EXPECT_EQ(syscall(SYS_capset, &header, data), 0);
    ServerOptions options;
    options.port = 0;
    options.real_time = 1;
    const auto refused = Server::start(*pool_.tables, options);
    EXPECT_EQ(refused.status().code(), base::Code::kFailedPrecondition);
    EXPECT_NE(refused.status().message().find("LimitRTPRIO"), std::string_view::npos);
  })
      .join();
  EXPECT_EQ(setrlimit(RLIMIT_RTPRIO, &before), 0);
}

TEST_F(ScheduleTest, APriorityThatLinuxDoesNotHaveIsRefused) {
  EXPECT_EQ(check_real_time(kMaxRealTime + 1).code(), base::Code::kInvalidArgument);
}

}  // namespace
}  // namespace petps::server
