#include "router/calls.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <system_error>

#include "base/clock.h"
#include "router/pull_work.h"

namespace petps::router {

using base::Code;
using base::Status;

Job::Job() = default;
Job::~Job() = default;

Calls::Calls(const char* kind, uint32_t limit, std::function<void(JobPointer)> run)
    : kind_(kind), limit_(limit), run_(std::move(run)) {}

Status Calls::start() {
  for (uint32_t i = 0; i < limit_; ++i) {
    try {
      threads_.emplace_back([this] { work(); });
    } catch (const std::system_error& error) {
      return Status(Code::kResourceExhausted,
                    "cannot start thread " + std::to_string(i + 1) + " of " +
                        std::to_string(limit_) + " for " + kind_ + "s: " + error.what() +
                        ": raise the limit of threads, or lower router.calls");
    }
    pthread_setname_np(threads_.back().native_handle(), ("petps-" + kind_).c_str());
  }
  return {};
}

void Calls::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wakes_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

JobPointer Calls::begin(uint64_t owner) {
  const std::lock_guard lock(mutex_);
  return begin_locked(owner);
}

JobPointer Calls::begin_until(uint64_t owner, uint64_t until_ns) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (JobPointer job = begin_locked(owner)) return job;
    const uint64_t now = base::monotonic_ns();
    if (now >= until_ns) return nullptr;
    places_.wait_for(lock, std::chrono::nanoseconds(until_ns - now));
  }
}

JobPointer Calls::begin_locked(uint64_t owner) {
  if (in_flight_ >= limit_) return nullptr;
  Owner& of = owners_[owner];
  if (of.jobs >= std::max(limit_ / 2, 1u)) return nullptr;
  ++of.jobs;
  ++in_flight_;
  if (unused_.empty()) unused_.push_back(std::make_unique<Job>());
  JobPointer job = std::move(unused_.back());
  unused_.pop_back();
  job->calls = this;
  job->owner = owner;
  return job;
}

bool Calls::begin_wait(Job& job) {
  const std::lock_guard lock(mutex_);
  Owner& of = owners_[job.owner];
  if (waits_ >= limit_ / 2 || of.waits >= limit_ / 4) return false;
  ++of.waits;
  ++waits_;
  return true;
}

void Calls::submit(JobPointer job) {
  {
    const std::lock_guard lock(mutex_);
    submitted_.insert(submitted_.begin(), std::move(job));
  }
  wakes_.notify_one();
}

void Calls::end(JobPointer job) {
  if (job->pull != nullptr) job->pull->clear();  // before the client that it uses
  if (job->reply.capacity() > kReplyBytesKept) job->reply = gather::GatherList();
  if (job->frame.capacity() > kReplyBytesKept) job->frame = wire::Frame();
  if (job->scratch.capacity() > kReplyBytesKept) job->scratch = wire::Frame();
  job->caller.reset();
  job->has_left.reset();
  const std::lock_guard lock(mutex_);
  --in_flight_;
  const auto of = owners_.find(job->owner);
  if (job->wait_ms > 0) {
    --waits_;
    --of->second.waits;
  }
  if (--of->second.jobs == 0) owners_.erase(of);
  unused_.push_back(std::move(job));
  places_.notify_all();  // the first may wait for its own half
}

uint32_t Calls::in_flight() const {
  const std::lock_guard lock(mutex_);
  return in_flight_;
}

void Calls::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wakes_.wait(lock, [this] { return stopping_ || !submitted_.empty(); });
    if (submitted_.empty()) return;
    JobPointer job = std::move(submitted_.back());
    submitted_.pop_back();
    lock.unlock();
    run_(std::move(job));
    lock.lock();
  }
}

}  // namespace petps::router
