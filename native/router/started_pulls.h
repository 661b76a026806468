// The pulls of one worker that wait for servers without a thread. Internal to router.
#pragma once

#include <poll.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "base/status.h"
#include "router/calls.h"

namespace petps::router {

// Threads: the worker's.
class StartedPulls {
 public:
  StartedPulls() = default;
  ~StartedPulls();
  StartedPulls(const StartedPulls&) = delete;
  StartedPulls& operator=(const StartedPulls&) = delete;

  base::Status open();
  // The epoll of the connections: readable when look() has something to do.
  int file() const { return epoll_; }
  // Take a job whose pull was started, and leave `job` null; if the system has no memory for it,
  // leave the job.
  void add(JobPointer& job);
  // Take what has arrived. Call `end` for each job that waits no longer: is_done says whether its
  // answer is complete, else it needs the thread of a call.
  void look(const std::function<void(JobPointer, bool is_done)>& end);
  // Return how long look() may wait, in ms, if nothing arrives; at most `most`.
  int wait_ms(int most) const;
  std::vector<JobPointer> take_all();

 private:
  JobPointer take(uint32_t slot);
  bool arm(uint32_t slot, const pollfd& entry);
  bool rearm(uint32_t slot, int file);

  int epoll_ = -1;
  std::vector<JobPointer> jobs_;  // by slot; null: free
  std::vector<uint32_t> free_;
  uint64_t due_ns_ = UINT64_MAX;  // no job is due earlier
};

}  // namespace petps::router
