// Requests from this process: whole frames in, whole frames out, no socket between. They are answered
// by workers of their own, so that every limit and error is the one of the native port.
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

// Calls that wait or are worked on, at most; more are refused.
inline constexpr size_t kMaxCalls = 4096;

struct CallReply {
  uint64_t ticket = 0;
  wire::Frame frame;
};

class CallEndpoint;

// Their frames and replies count in `memory`, from submit to take.
//
// Threads: submit, take and finish by any; an endpoint by its worker.
class Calls {
 public:
  Calls(size_t endpoints, std::shared_ptr<transport::MemoryBudget> memory);
  ~Calls();

  // `frame` is a whole request; its reply has this ticket. Errors: kUnavailable (finished),
  // kResourceExhausted (kMaxCalls, memory).
  base::Result<uint64_t> submit(wire::Frame frame);
  // The replies that have come, each once.
  std::vector<CallReply> take();
  // Readable while replies wait (an eventfd; take() resets it).
  int ready_descriptor() const { return ready_; }
  // After the workers have ended: answers what they have not, with kUnavailable.
  void finish();

  size_t endpoints() const { return endpoints_.size(); }
  transport::Endpoint& endpoint(size_t i);

 private:
  friend class CallEndpoint;
  void answer(uint64_t ticket, size_t asked, wire::Frame frame);

  const std::shared_ptr<transport::MemoryBudget> memory_;
  std::vector<std::unique_ptr<CallEndpoint>> endpoints_;
  int ready_ = -1;
  std::mutex mutex_;  // guards all below
  bool finished_ = false;
  uint64_t next_ticket_ = 1;
  size_t open_ = 0;
  std::vector<CallReply> replies_;
};

}  // namespace petps::server
