// The thread that applies pushes and changes of the catalogue. A drain to a file may take
// milliseconds, and no pull may wait for it. Internal to server.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "table/table.h"
#include "transport/memory_budget.h"
#include "transport/transport.h"
#include "wire/wire.h"

namespace petps::server {

// Bytes of all frames that wait for the writer: four frames of the largest size. Further frames
// wait in their connections' buffers, then in the kernel's.
inline constexpr size_t kPushQueueBytes = size_t{64} << 20;
inline constexpr size_t kPushQueueJobs = 1024;

// Clients whose pushes are remembered: at least this many of the most recent, at most twice as
// many.
inline constexpr size_t kPushClients = 32'768;

// A detector of pushes that their client gave up and that arrive after a newer push
// (wire::PushOrder).
// Threads: one.
class GivenUpPushes {
 public:
  // Return whether `order` belongs to such a push, and remember what it reports about other calls.
  bool has(const wire::PushOrder& order);

 private:
  struct Calls {
    uint64_t oldest = 0;
    uint64_t finished = 0;  // bit i: call `oldest` + i
  };
  static void combine(Calls& known, Calls other);

  // By client. When calls_ is full, it replaces calls_before_. Trees, because peers choose the
  // keys.
  std::map<uint64_t, Calls> calls_;
  std::map<uint64_t, Calls> calls_before_;
};

struct PushJob {
  size_t worker = 0;
  transport::ConnectionId connection = 0;
  uint64_t request_id = 0;
  uint64_t start_ns = 0;
  uint16_t opcode = 0;           // kPush or kControl
  table::TablePointer table;     // of a push
  std::vector<std::byte> frame;  // a whole, checked frame
};

struct PushDone {
  transport::ConnectionId connection = 0;
  uint64_t request_id = 0;
  uint64_t start_ns = 0;
  uint16_t opcode = 0;
  base::Status status;
  wire::PushReply reply;
};

class PushWriter {
 public:
  // Call `done` for each finished job, on the writer's thread, with the job's worker.
  PushWriter(table::Tables& tables, const wire::Limits& limits, transport::MemoryBudget& memory,
             std::function<void(size_t worker, PushDone done)> done);
  ~PushWriter();  // calls finish()

  void start();
  void finish();  // applies what is queued, then stops the thread
  // Queue a job. Return false, with `job` unchanged, if the queue is full.
  bool queue(PushJob& job);
  size_t waiting() const;

 private:
  void run();
  PushDone perform(const PushJob& job);
  base::Result<wire::PushReply> apply(const PushJob& job);
  base::Status change_catalogue(const PushJob& job);

  table::Tables& tables_;
  const wire::Limits limits_;
  transport::MemoryBudget& memory_;
  const std::function<void(size_t, PushDone)> done_;
  mutable std::mutex mutex_;  // guards jobs_, bytes_ and ending_
  std::condition_variable ready_;
  std::deque<PushJob> jobs_;
  size_t bytes_ = 0;
  bool ending_ = false;
  std::vector<uint8_t> deleted_;  // this and given_up_: writer's thread only
  GivenUpPushes given_up_;
  std::thread thread_;
};

}  // namespace petps::server
