#include "server/schedule.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string>
#include <thread>

namespace petps::server {

namespace {

// The kernel's struct sched_attr in its first version; glibc has it since 2.41.
struct Attributes {
  uint32_t size = sizeof(Attributes);
  uint32_t policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime_ns = 0;
  uint64_t deadline_ns = 0;
  uint64_t period_ns = 0;
};
static_assert(sizeof(Attributes) == 48);

bool run_in_real_time(uint32_t priority) {
  sched_param wanted{};
  wanted.sched_priority = static_cast<int>(priority);
  return sched_setscheduler(0, SCHED_FIFO, &wanted) == 0;  // of this thread
}

}  // namespace

base::Status check_real_time(uint32_t priority) {
  if (priority == 0) return {};
  const std::string text = "real_time = " + std::to_string(priority);
  if (priority > kMaxRealTime) {
    return base::Status(base::Code::kInvalidArgument,
                        text + " is outside 0.." + std::to_string(kMaxRealTime));
  }
  bool permitted = false;
  std::thread([&] { permitted = run_in_real_time(priority); }).join();
  if (permitted) return {};
  return base::Status(base::Code::kFailedPrecondition,
                      text +
                          " is not permitted: give the process CAP_SYS_NICE or an RLIMIT_RTPRIO "
                          "of that (systemd: LimitRTPRIO), or set it to 0");
}

void schedule_worker(uint32_t real_time) {
  if (real_time != 0) {
    run_in_real_time(real_time);
    return;
  }
  Attributes mine;
  if (syscall(SYS_sched_getattr, 0, &mine, sizeof(mine), 0) != 0) return;
  if (mine.policy != SCHED_OTHER) return;  // somebody chose it
  mine.size = sizeof(mine);
  mine.runtime_ns = kWorkerSliceNs;
  syscall(SYS_sched_setattr, 0, &mine, 0);
}

}  // namespace petps::server
