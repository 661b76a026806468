// Calls: the threads that ask servers, for requests that may have to wait. A client's calls wait,
// so each such request is one job of one thread. (A pull begins without one: started_pulls.h.)
// Internal to router.
//
// There is no queue: a job has a place, and there are as many threads as places. When all places
// are taken, requests stay in the transport's buffers, whose limits then stop the peers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "gather/gather.h"
#include "router/callers.h"
#include "transport/transport.h"
#include "wire/wire.h"

namespace petps::router {

// A further thread beyond this number would only wait for the same servers.
inline constexpr uint32_t kMaxCalls = 1024;
// Threads for logins of tokens that the router does not know. They are not those of requests, so
// that guessed tokens take no place from callers; one host has half of them.
inline constexpr uint32_t kLogins = 2 * kLoginsOfHost;
// Memory of each buffer that a job keeps for the next request: a reply of 4,000 rows of 512 bytes
// needs half of it.
inline constexpr size_t kReplyBytesKept = size_t{4} << 20;

class Calls;
struct PullWork;  // pull_work.h

// One request of one caller, and its reply. A job keeps its memory for later requests.
struct Job {
  Job();
  ~Job();
  // Set by the worker.
  size_t worker = 0;
  transport::ConnectionId connection = 0;
  wire::FrameHeader header;
  wire::Frame frame;       // the whole request
  CallerPointer caller;    // null: the job is to find it
  std::string host;        // of the peer
  Calls* calls = nullptr;  // where it has a place
  uint64_t owner = 0;      // whose places this job takes
  uint64_t start_ns = 0;
  uint32_t wait_ms = 0;              // of a pull: how long it may wait for its version
  bool is_held = false;              // its connection is paused until the job is done
  bool is_only_login = false;        // the reply is sent only if the login fails
  std::atomic<bool> is_left{false};  // nobody waits for the reply any more
  std::shared_ptr<const std::atomic<bool>> has_left;  // the same, of Router::call; null: not of it

  // Set by who answers: the thread of the call, or the worker.
  gather::GatherList reply;
  base::Code code = base::Code::kOk;  // of the reply
  bool is_revoked = false;            // the caller was ended, and its connection is
  uint64_t caller_owner = 0;  // of a login: whose places the caller's jobs take; 0: the host's
  uint64_t keys = 0;
  uint64_t rows = 0;         // found, or written
  uint64_t refused = 0;      // rows that full tables did not take
  size_t counted_bytes = 0;  // in the memory budget

  // Reused by who answers.
  wire::Frame scratch;
  std::vector<uint8_t> mask;
  std::unique_ptr<PullWork> pull;  // null: none yet

  bool is_awaited() const {
    return !is_left.load(std::memory_order_relaxed) &&
           (has_left == nullptr || !has_left->load(std::memory_order_relaxed));
  }
  std::span<const std::byte> body() const { return std::span(frame).subspan(wire::kHeaderBytes); }
};
using JobPointer = std::unique_ptr<Job>;

// Threads: any.
class Calls {
 public:
  // `run` answers a job and returns it to its worker. `kind`: "call" or "login".
  Calls(const char* kind, uint32_t limit, std::function<void(JobPointer)> run);
  ~Calls() { stop(); }
  // Start the threads. Errors: kResourceExhausted (the system gives no more threads).
  base::Status start();
  void stop();  // jobs that no thread has taken are answered first

  // Take a place for a request of this owner, and return its job; null: all places are taken, or
  // the owner has half of them.
  JobPointer begin(uint64_t owner);
  // The same, but wait for a place until then; null: there was none.
  JobPointer begin_until(uint64_t owner, uint64_t until_ns);
  // Let the job wait for a version. Return false if too many do, or too many of its owner.
  bool begin_wait(Job& job);
  void submit(JobPointer job);
  // Give the job's place back. Its reply has been posted.
  void end(JobPointer job);
  uint32_t in_flight() const;

 private:
  struct Owner {
    uint32_t jobs = 0;
    uint32_t waits = 0;
  };
  void work();
  JobPointer begin_locked(uint64_t owner);

  const std::string kind_;
  const uint32_t limit_;
  const std::function<void(JobPointer)> run_;
  std::vector<std::thread> threads_;
  mutable std::mutex mutex_;        // guards everything below
  std::condition_variable wakes_;   // a job was submitted
  std::condition_variable places_;  // a job has ended
  bool stopping_ = false;
  std::vector<JobPointer> submitted_;  // not taken by a thread yet; the oldest last
  std::vector<JobPointer> unused_;
  std::unordered_map<uint64_t, Owner> owners_;  // that have jobs
  uint32_t in_flight_ = 0;
  uint32_t waits_ = 0;
};

}  // namespace petps::router
