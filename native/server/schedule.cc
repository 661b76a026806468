#include "server/schedule.h"

#include <sched.h>

#include <string>
#include <thread>

#include "base/time_slice.h"

namespace petps::server {

namespace {

bool run_in_real_time(uint32_t priority) {
  sched_param parameters{};
  parameters.sched_priority = static_cast<int>(priority);
  return sched_setscheduler(0, SCHED_FIFO, &parameters) == 0;  // 0: the calling thread
}

}  // namespace

base::Status check_real_time(uint32_t priority) {
  if (priority == 0) return {};
  const std::string text = "real_time = " + std::to_string(priority);
  if (priority > kMaxRealTime) {
    return base::Status(base::Code::kInvalidArgument,
                        text + " is outside 0.." + std::to_string(kMaxRealTime));
  }
  bool is_permitted = false;
  std::thread([&] { is_permitted = run_in_real_time(priority); }).join();
  if (is_permitted) return {};
  return base::Status(base::Code::kFailedPrecondition,
                      text +
                          " is not permitted: give the process CAP_SYS_NICE or an RLIMIT_RTPRIO "
                          "of this value (systemd: LimitRTPRIO), or set real_time to 0");
}

void schedule_worker(uint32_t real_time) {
  if (real_time != 0) {
    run_in_real_time(real_time);
    return;
  }
  base::set_time_slice(base::kShortSliceNs);
}

}  // namespace petps::server
