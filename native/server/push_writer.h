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

#include "server/server.h"
#include "table/table.h"
#include "transport/memory_budget.h"
#include "transport/transport.h"
#include "wire/wire.h"

namespace petps::server {

// Bytes of all frames that wait for the writer: four frames of the largest size. Further frames
// wait in the buffers of their connections and of the kernel.
inline constexpr size_t kPushQueueBytes = size_t{64} << 20;
inline constexpr size_t kPushQueueJobs = 1024;

// Keys of a tracked partition that wait to be taken: 64 MiB.
inline constexpr size_t kTrackedKeys = size_t{4} << 20;

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
  uint64_t owner = 0;  // a hash of the grant, or else of the host, that it came from
  table::TablePointer table;
  uint32_t stamp = 0;
  size_t keys = 0;
  uint64_t map_change_count = 0;  // of the map that its keys were checked by
  std::vector<std::byte> frame;   // a whole, checked frame
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
  // Owners take turns, and one of them has at most half of the queue, so that nobody with many
  // pushes keeps others waiting. Jobs of one owner keep their order.
  // `check_again` (change count, keys) refuses a push whose partition has gone since it was queued.
  using CheckAgain = std::function<base::Status(uint64_t, std::span<const uint64_t>)>;
  PushWriter(table::Tables& tables, const wire::Limits& limits, transport::MemoryBudget& memory,
             std::function<void(PushDone)> done, CheckAgain check_again = nullptr);
  ~PushWriter();  // calls finish()

  void start();
  void finish();  // performs the queued jobs, then stops the thread
  // Return whether the queue would take a frame of this owner now.
  bool has_room(uint64_t owner, size_t bytes) const;
  // Queue a job. Return false, with `job` unchanged, if the queue is full.
  bool queue(PushJob& job);
  size_t waiting() const;
  // Wait until the pushes that are applied now, if any, are applied.
  void wait_for_round() const;
  // See Server::track_pushes and take_pushed. `partitions`: of the model.
  void track(uint32_t partition, uint32_t partitions, bool is_tracked);
  bool take_tracked(uint32_t partition, std::vector<PushedKey>& out);
  uint64_t groups() const { return groups_.load(std::memory_order_relaxed); }
  // Twice the number of groups taken; odd while one is applied.
  uint64_t rounds() const { return rounds_.load(std::memory_order_relaxed); }

 private:
  void run();
  struct Waiting {
    std::deque<PushJob> jobs;
    size_t bytes = 0;  // of their frames
  };

  bool has_room_locked(uint64_t owner, size_t bytes) const;
  std::vector<PushJob> take_group();
  void apply(const std::vector<PushJob>& group);
  base::Status add_batch(const PushJob& job);
  void note_pushed(uint32_t table, std::span<const uint64_t> keys);

  table::Tables& tables_;
  const wire::Limits limits_;
  transport::MemoryBudget& memory_;
  const std::function<void(PushDone)> done_;
  const CheckAgain check_again_;  // null: nothing changes
  mutable std::mutex mutex_;      // guards everything up to finishing_
  std::condition_variable ready_;
  std::map<uint64_t, Waiting> waiting_;  // by owner; each has jobs
  size_t jobs_ = 0;                      // of all owners
  size_t bytes_ = 0;
  uint64_t turn_ = 0;  // the owner whose job was the first of the last group
  bool finishing_ = false;
  std::atomic<uint64_t> groups_{0};  // of pushes, applied so far
  std::atomic<uint64_t> rounds_{0};
  struct Tracked {
    std::vector<PushedKey> keys;
    bool has_lost = false;
  };
  std::mutex tracked_mutex_;             // guards the next two
  std::map<uint32_t, Tracked> tracked_;  // by partition
  uint32_t partitions_ = 1;
  // Only the writer's thread uses the rest.
  std::vector<table::Batch> batches_;
  std::vector<table::ApplyReport> reports_;
  std::deque<std::vector<uint8_t>> deleted_;  // marks of the batches that delete
  GivenUpPushes given_up_;
  std::thread thread_;
};

}  // namespace petps::server
