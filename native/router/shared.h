// The state that the threads of one router share. Internal to router.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "router/callers.h"
#include "router/calls.h"
#include "router/router.h"
#include "router/worker.h"
#include "transport/memory_budget.h"
#include "transport/transport.h"

namespace petps::router {

struct Shared {
  explicit Shared(const RouterOptions& router_options);

  const RouterOptions options;
  const std::shared_ptr<transport::MemoryBudget> memory;
  uint64_t started_ns = 0;
  std::atomic<bool> stopping{false};
  std::atomic<uint64_t> drain_until_ns{0};
  std::unique_ptr<transport::Transport> transport;
  Callers callers;
  Calls calls;
  Calls logins;
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<std::thread> threads;
  mutable std::mutex call_stats_mutex;  // guards call_stats
  server::WorkerStats call_stats;       // of Router::call

  // Return the job to its worker, which sends the reply.
  void run(JobPointer job);
  RouterSnapshot snapshot() const;
  std::string status_json() const;
};

struct Router::Impl {
  explicit Impl(const RouterOptions& options) : shared(options) {}
  Shared shared;
  bool stopped = false;
};

}  // namespace petps::router
