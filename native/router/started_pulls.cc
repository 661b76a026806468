#include "router/started_pulls.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/clock.h"
#include "router/pull_work.h"

namespace petps::router {

using base::Status;
using State = client::StartedPull::State;

namespace {

constexpr size_t kEvents = 64;

uint64_t tag_of(uint32_t slot, int file) {
  return uint64_t{slot} << 32 | static_cast<uint32_t>(file);
}

}  // namespace

StartedPulls::~StartedPulls() {
  if (epoll_ >= 0) ::close(epoll_);
}

Status StartedPulls::open() {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  if (epoll_ >= 0) return {};
  return base::errno_status(base::Code::kIoError, "epoll_create1", errno);
}

void StartedPulls::add(JobPointer& job) {
  if (free_.empty()) {
    free_.push_back(static_cast<uint32_t>(jobs_.size()));
    jobs_.emplace_back();
  }
  const uint32_t slot = free_.back();
  client::StartedPull& pull = *job->pull->started;
  for (const pollfd& entry : pull.awaited()) {
    if (!arm(slot, entry)) return;
  }
  due_ns_ = std::min(due_ns_, pull.due_ns());
  free_.pop_back();
  jobs_[slot] = std::move(job);
}

// A connection reports one event, and is then silent until it is armed again. It stays in the epoll
// while the client has it for other calls, so an event may come for a job that does not wait for
// it: StartedPull ignores that.
bool StartedPulls::arm(uint32_t slot, const pollfd& entry) {
  epoll_event event{};
  event.events = static_cast<uint32_t>(entry.events) | EPOLLONESHOT;  // poll's numbers are epoll's
  event.data.u64 = tag_of(slot, entry.fd);
  return epoll_ctl(epoll_, EPOLL_CTL_MOD, entry.fd, &event) == 0 ||
         (errno == ENOENT && epoll_ctl(epoll_, EPOLL_CTL_ADD, entry.fd, &event) == 0);
}

// Arm the file again if the job still waits for it.
bool StartedPulls::rearm(uint32_t slot, int file) {
  for (const pollfd& entry : jobs_[slot]->pull->started->awaited()) {
    if (entry.fd == file) return arm(slot, entry);
  }
  return true;
}

JobPointer StartedPulls::take(uint32_t slot) {
  free_.push_back(slot);
  return std::move(jobs_[slot]);
}

void StartedPulls::look(const std::function<void(JobPointer, bool is_done)>& end) {
  std::array<epoll_event, kEvents> ready;
  const int count = epoll_wait(epoll_, ready.data(), kEvents, 0);
  for (int i = 0; i < count; ++i) {
    const uint64_t tag = ready[static_cast<size_t>(i)].data.u64;
    const auto slot = static_cast<uint32_t>(tag >> 32);
    const auto file = static_cast<int>(static_cast<uint32_t>(tag));
    if (jobs_[slot] == nullptr) continue;
    const State state = jobs_[slot]->pull->started->advance(file);
    if (state == State::kWaiting && rearm(slot, file)) continue;
    end(take(slot), state == State::kDone);
  }
  const uint64_t now = base::monotonic_ns();
  if (now < due_ns_) return;
  due_ns_ = UINT64_MAX;
  for (uint32_t slot = 0; slot < jobs_.size(); ++slot) {
    if (jobs_[slot] == nullptr) continue;
    const uint64_t due = jobs_[slot]->pull->started->due_ns();
    if (due <= now) {
      end(take(slot), false);
    } else {
      due_ns_ = std::min(due_ns_, due);
    }
  }
}

int StartedPulls::wait_ms(int most) const {
  const uint64_t now = base::monotonic_ns();
  if (due_ns_ <= now) return 0;
  const uint64_t left_ms = (due_ns_ - now) / 1'000'000 + 1;  // no due job: very long
  return static_cast<int>(std::min<uint64_t>(left_ms, static_cast<uint64_t>(most)));
}

std::vector<JobPointer> StartedPulls::take_all() {
  std::vector<JobPointer> all;
  for (uint32_t slot = 0; slot < jobs_.size(); ++slot) {
    if (jobs_[slot] != nullptr) all.push_back(take(slot));
  }
  return all;
}

}  // namespace petps::router
