// One worker: receives requests, starts pulls or hands requests to calls, and posts the replies.
// Internal to router.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "router/calls.h"
#include "router/started_pulls.h"
#include "server/stats.h"
#include "transport/transport.h"
#include "wire/wire.h"

namespace petps::router {

struct Shared;

// Connections of each kind that a worker resumes at once to try their frames again, for which there
// was no place. With more, callers that wait would take the time of those that are served.
inline constexpr size_t kResumedAtOnce = 16;

// Return whose places the requests of a token, or of a host without one, take; never 0.
uint64_t owner_of(const std::string& name);
// Count an answered request.
void count(const Job& job, server::WorkerStats& stats);

class Worker {
 public:
  Worker(Shared& shared, size_t number, transport::Endpoint& endpoint)
      : shared_(shared), number_(number), endpoint_(endpoint) {}

  // Prepare to wait for servers. Errors: kIoError.
  base::Status open();
  void run();                                // serve until shared.stopping, then drain
  bool drained() const { return drained_; }  // after run(): whether nothing was left in flight
  void finish(JobPointer job);               // called by the thread of a call
  void drop_replies();                       // after run(), when no call runs any more

  const server::WorkerStats& stats() const { return stats_; }
  // Return how many pulls were answered without the thread of a call.
  uint64_t started_pulls() const { return started_pulls_.load(std::memory_order_relaxed); }
  uint64_t rounds() const { return rounds_.load(std::memory_order_relaxed); }
  transport::Endpoint& endpoint() { return endpoint_; }

 private:
  // The result of handling a frame. kDone: it was taken. kHold: the same, and the connection is
  // paused until it is answered. kWait: there is no place for it now. kLogin: the connection is
  // paused until its caller is known, and the frame is handled again.
  enum class Outcome : uint8_t { kDone, kHold, kWait, kLogin };
  struct ConnectionState {
    transport::ConnectionId id = 0;
    CallerPointer caller = nullptr;  // null: it has not said who it is
    std::string host = {};
    uint64_t owner = 0;  // whose places its requests take: a token's, or without one a host's
    uint64_t blocked_since_ns = 0;  // there is no place for the frame at the front; 0: there was
    uint32_t in_flight = 0;
    bool is_revoked = false;  // it ends when no request is in flight
    Job* held = nullptr;      // for which it is paused
  };

  ConnectionState& state_of(transport::ConnectionId connection);
  void handle(const transport::Event& event);
  bool handle_frames(transport::ConnectionId connection);
  Outcome handle_frame(transport::ConnectionId connection, std::span<const std::byte> frame);
  base::Status look_at_pull(const wire::FrameHeader& header, std::span<const std::byte> body,
                            uint32_t& wait_ms) const;
  Outcome submit(ConnectionState& state, const wire::FrameHeader& header,
                 std::span<const std::byte> frame, uint32_t wait_ms);
  Outcome wait_for_place(ConnectionState& state, const wire::FrameHeader& header);
  Callers::Place place_of(const ConnectionState& state, const wire::FrameHeader& header,
                          std::span<const std::byte> frame);
  bool is_any_blocked() const { return !blocked_.empty() || !blocked_logins_.empty(); }
  bool resume_blocked();
  size_t resume_some(std::deque<transport::ConnectionId>& blocked);
  void note_leavers();
  void take_arrivals();
  void post_replies();
  void post_reply(JobPointer job);
  void end_revoked(const ConnectionState& state);
  void end(JobPointer job);
  void refuse(transport::ConnectionId connection, const wire::FrameHeader& header,
              const base::Status& status);
  void drain();

  Shared& shared_;
  const size_t number_;
  transport::Endpoint& endpoint_;
  std::vector<ConnectionState> connections_;  // by slot
  // Paused until there is a place; the one that has waited longest first. Some may be closed. Those
  // that have not said who they are wait apart, so that they delay no caller.
  std::deque<transport::ConnectionId> blocked_;
  std::deque<transport::ConnectionId> blocked_logins_;
  uint64_t retry_ns_ = 0;                      // when to try blocked connections again,
  bool has_free_place_ = false;                // or at once if a job has ended
  std::vector<transport::ConnectionId> held_;  // paused until a job is done
  StartedPulls started_;
  uint32_t in_flight_ = 0;
  bool draining_ = false;
  bool drained_ = false;
  wire::Frame reply_;
  gather::GatherList list_;

  std::mutex done_mutex_;  // guards done_
  std::vector<JobPointer> done_;
  std::vector<JobPointer> done_now_;
  std::atomic<bool> has_done_{false};
  std::atomic<uint64_t> rounds_{0};
  std::atomic<uint64_t> started_pulls_{0};
  server::WorkerStats stats_;
};

}  // namespace petps::router
