// The scheduling of workers, as the kernel reports it.
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
#include "server_fixture.h"

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
  bool is_kept = false;
  std::thread([&] {
    Words attributes = attributes_of(0);
    attributes[kRuntime] = 2 * base::kShortSliceNs;
    syscall(SYS_sched_setattr, 0, attributes.data(), 0);
    is_kept = attributes_of(0)[kRuntime] == attributes[kRuntime];
  }).join();
  return is_kept;
}

class ScheduleTest : public ServerTest {
 protected:
  // Start a server with one worker. Return the worker's attributes after it has answered a pull.
  // Expect that no other thread has its slice or policy.
  Words worker_attributes(uint32_t real_time) {
    options_.real_time = real_time;
    start();
    if (server_ == nullptr) return {};
    expect_serves(*connect());
    Words attributes{};
    int workers = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name;
      std::getline(std::ifstream(task.path() / "comm"), name);
      const Words words = attributes_of(std::stoi(task.path().filename()));
      if (name == "petps-worker") {
        ++workers;
        attributes = words;
      } else {
        EXPECT_NE(words[kRuntime], base::kShortSliceNs) << name;
        EXPECT_EQ(policy_of(words), policy_of(attributes_of(0))) << name;
      }
    }
    EXPECT_EQ(workers, 1);
    return attributes;
  }
};

TEST_F(ScheduleTest, OnlyWorkersGetShortTimeSlices) {
  if (!kernel_keeps_slices()) GTEST_SKIP() << "Linux keeps the time slice of a thread since 6.12";
  EXPECT_EQ(worker_attributes(0)[kRuntime], base::kShortSliceNs);
}

TEST_F(ScheduleTest, WorkersRunInRealTimeIfThatIsPermitted) {
  if (!check_real_time(2).ok()) GTEST_SKIP() << check_real_time(2).to_string();
  EXPECT_EQ(policy_of(worker_attributes(2)), SCHED_FIFO);
}

TEST_F(ScheduleTest, APriorityThatIsNotPermittedIsRefused) {
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_RTPRIO, &before), 0);
  const rlimit none{0, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_RTPRIO, &none), 0);
  std::thread([&] {  // without capabilities: this thread and those that it starts
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct data[2] = {};
    EXPECT_EQ(syscall(SYS_capset, &header, data), 0);
    options_.real_time = 1;
    expect_error(Server::start(*pool_.tables, options_).status(), base::Code::kFailedPrecondition,
                 "LimitRTPRIO");
  })
      .join();
  EXPECT_EQ(setrlimit(RLIMIT_RTPRIO, &before), 0);
}

TEST_F(ScheduleTest, APriorityAboveTheHighestOfLinuxIsRefused) {
  EXPECT_EQ(check_real_time(kMaxRealTime + 1).code(), base::Code::kInvalidArgument);
}

}  // namespace
}  // namespace petps::server
