// Requests from this process: whole frames in, whole frames out, without a socket. Workers of their
// own answer them, with the limits and errors of the native port.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "transport/memory_budget.h"
#include "transport/transport.h"
#include "wire/wire.h"

namespace petps::server {

// Calls that were submitted and whose reply was not taken yet; further calls are refused.
inline constexpr size_t kMaxCalls = 4096;

struct CallReply {
  uint64_t ticket = 0;
  wire::Frame frame;
};

class CallEndpoint;

// Return the error of a request to a server that stops.
base::Status server_is_stopping();

// The calls of this process and their replies, which count in `memory` from submit to take.
//
// Threads: any thread may call submit, take and finish; an endpoint belongs to its worker.
class Calls {
 public:
  Calls(size_t endpoints, std::shared_ptr<transport::MemoryBudget> memory);
  ~Calls();

  // Queue `frame`, a whole request, and return the ticket of its reply. Errors: kUnavailable
  // (finished), kResourceExhausted (kMaxCalls, memory), kFailedPrecondition (no endpoints).
  base::Result<uint64_t> submit(wire::Frame frame);
  // Nobody waits for this reply any more: a pull that waits for a version gives its place up. The
  // call is answered nevertheless.
  void drop(uint64_t ticket);
  // Count bytes that a door holds for its own calls, until release(). Errors: kResourceExhausted.
  base::Status hold(size_t bytes);
  void release(size_t bytes) { memory_->change(bytes, 0); }
  // Return the replies that have arrived, each once.
  std::vector<CallReply> take();
  // Return an eventfd that is readable while replies wait. take() resets it.
  int ready_descriptor() const { return ready_; }
  // Answer the remaining calls with kUnavailable. The workers must have stopped.
  void finish();

  size_t endpoints() const { return endpoints_.size(); }
  transport::Endpoint& endpoint(size_t i);

 private:
  friend class CallEndpoint;
  void answer(uint64_t ticket, size_t request_bytes, wire::Frame reply);

  const std::shared_ptr<transport::MemoryBudget> memory_;
  std::vector<std::unique_ptr<CallEndpoint>> endpoints_;
  int ready_ = -1;
  std::mutex mutex_;  // guards the members below
  bool finished_ = false;
  uint64_t next_ticket_ = 1;
  size_t open_ = 0;
  std::vector<CallReply> replies_;
};

}  // namespace petps::server
