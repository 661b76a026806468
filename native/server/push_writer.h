// The thread that applies pushes and changes of the catalogue. A drain to a file may take
// milliseconds, and no pull may wait for it. Internal to server.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "table/table.h"
#include "transport/memory_budget.h"
#include "transport/transport.h"
#include "wire/wire.h"

namespace petps::server {

// Bytes of all frames that wait for the writer: four frames of the largest size. Further frames
// wait in the buffers of their connections and of the kernel.
inline constexpr size_t kPushQueueBytes = size_t{64} << 20;
inline constexpr size_t kPushQueueJobs = 1024;

// The writer remembers the pushes of at least this many clients, the most recent ones, and of at
// most twice as many.
inline constexpr size_t kPushClients = 32'768;

// Detects pushes that their client gave up and that arrive after a newer push (wire::PushOrder).
// Threads: one.
class GivenUpPushes {
 public:
  // Record the calls that `order` reports as finished. Return whether `order` itself belongs to a
  // finished call.
  bool has(const wire::PushOrder& order);

 private:
  struct Calls {
    uint64_t oldest = 0;
    uint64_t finished = 0;  // bit i: call `oldest` + i
  };
  static void combine(Calls& known, Calls other);

  // By client. When calls_ is full, it replaces calls_before_. Trees and not hash tables, because
  // peers choose the keys.
  std::map<uint64_t, Calls> calls_;
  std::map<uint64_t, Calls> calls_before_;
};

// The worker and connection that a request came from, and its header.
struct JobOrigin {
  size_t worker = 0;
  transport::ConnectionId connection = 0;
  wire::FrameHeader header;
  uint64_t start_ns = 0;
};

struct PushJob {
  JobOrigin origin;
  table::TablePointer table;
  uint32_t stamp = 0;
  size_t keys = 0;
  std::vector<std::byte> frame;  // a whole, checked frame
  std::span<const std::byte> body() const { return std::span(frame).subspan(wire::kHeaderBytes); }
};

struct PushDone {
  JobOrigin origin;
  base::Status status;
  wire::PushReply reply;
};

class PushWriter {
 public:
  // Call `done` for each finished job, on the writer's thread. Pushes that wait while another one
  // is applied are applied together, if they are of one table and stamp: they share its drains.
  PushWriter(table::Tables& tables, const wire::Limits& limits, transport::MemoryBudget& memory,
             std::function<void(PushDone)> done);
  ~PushWriter();  // calls finish()

  void start();
  void finish();  // performs the queued jobs, then stops the thread
  // Queue a job. Return false, with `job` unchanged, if the queue is full.
  bool queue(PushJob& job);
  size_t waiting() const;
  uint64_t groups() const { return groups_.load(std::memory_order_relaxed); }
  // Twice the number of groups taken; odd while one is applied.
  uint64_t rounds() const { return rounds_.load(std::memory_order_relaxed); }

 private:
  void run();
  std::vector<PushJob> take_group();
  void apply(const std::vector<PushJob>& group);
  base::Status add_batch(const PushJob& job);

  table::Tables& tables_;
  const wire::Limits limits_;
  transport::MemoryBudget& memory_;
  const std::function<void(PushDone)> done_;
  mutable std::mutex mutex_;  // guards jobs_, bytes_ and finishing_
  std::condition_variable ready_;
  std::deque<PushJob> jobs_;
  size_t bytes_ = 0;
  bool finishing_ = false;
  std::atomic<uint64_t> groups_{0};  // of pushes, applied so far
  std::atomic<uint64_t> rounds_{0};
  // Only the writer's thread uses the rest.
  std::vector<table::Batch> batches_;
  std::vector<table::ApplyReport> reports_;
  std::deque<std::vector<uint8_t>> deleted_;  // marks of the batches that delete
  GivenUpPushes given_up_;
  std::thread thread_;
};

}  // namespace petps::server
