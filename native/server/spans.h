// Spans of sampled requests: what a worker records for OpenTelemetry. Internal to server, except
// Span.
//
// A worker writes finished spans to a ring of its own and never waits: a span that finds no room is
// dropped and counted. Another thread takes them (Server::take_spans).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "wire/wire.h"

namespace petps::server {

// Spans of one worker that wait to be taken: 140 KiB. With two takings a second a worker can record
// 2,048 spans a second.
inline constexpr size_t kSpansKept = 1024;
// Tables that a span names. A pull may have thousands.
inline constexpr size_t kSpanTables = 8;

// One answered pull. Ids are in network order; times are in nanoseconds.
struct Span {
  std::array<uint8_t, 16> trace_id{};
  std::array<uint8_t, 8> span_id{};
  std::array<uint8_t, 8> parent_id{};  // zeros: the server began the trace
  uint64_t start_ns = 0;               // since 1970
  uint64_t duration_ns = 0;            // from the arrival, or the first look at it, to the sending
  uint64_t queued_ns = 0;              // until the worker first looked at the request
  uint64_t waited_ns = 0;              // from then until it was served: for its version or a pin
  uint64_t lookup_ns = 0;              // finding the rows, and copying them in copy mode
  uint64_t send_ns = 0;                // handing the reply to the network
  uint64_t version = 0;                // applied; 0 after an error
  uint32_t instance = 0;               // of the first known table; 0: none
  uint32_t keys = 0;
  uint32_t rows_found = 0;
  uint32_t sections = 0;
  std::array<uint32_t, kSpanTables> tables{};  // of the first sections
  base::Code code = base::Code::kOk;
  uint8_t source = 0;  // 0 tcp, 1 a call of this process (gRPC), 2 rdma
};

// Spans from one writing thread to one taking thread at a time.
class SpanRing {
 public:
  SpanRing() : spans_(kSpansKept) {}

  // Return false, and count it, if the ring is full.
  bool push(const Span& span) {
    const uint64_t end = end_.load(std::memory_order_relaxed);
    // Acquire: the taker has copied the slot's old span before it is overwritten.
    if (end - begin_.load(std::memory_order_acquire) == kSpansKept) {
      dropped_.store(dropped_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      return false;
    }
    spans_[end % kSpansKept] = span;
    end_.store(end + 1, std::memory_order_release);  // the taker sees the whole span
    return true;
  }
  // Move at most `most` spans to the end of `out`, the oldest first.
  void take(size_t most, std::vector<Span>& out) {
    uint64_t begin = begin_.load(std::memory_order_relaxed);
    const uint64_t end = end_.load(std::memory_order_acquire);
    for (; begin != end && most > 0; ++begin, --most) out.push_back(spans_[begin % kSpansKept]);
    begin_.store(begin, std::memory_order_release);
  }
  uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  std::vector<Span> spans_;
  std::atomic<uint64_t> begin_{0};  // of the taker
  std::atomic<uint64_t> end_{0};    // of the writer
  std::atomic<uint64_t> dropped_{0};
};

// What a worker needs to record spans. The worker's thread calls everything but ring().take().
class SpanRecorder {
 public:
  // `sample`: the share of the pulls without a caller's context that begin a trace, from 0 to 1.
  explicit SpanRecorder(double sample);

  // What a connection's request at the front has met so far; reset once it is answered.
  struct Front {
    uint64_t arrived_ns = 0;  // 0: the worker has not looked at it
    uint64_t looked_ns = 0;
    bool is_sampled = false;  // without a caller's context
  };

  // Note that the worker has just received what waited.
  void note_poll(uint64_t now_ns) { polled_ns_ = now_ns; }
  // Begin the span of a pull that is served from `start_ns` on, if it is sampled.
  void begin(const wire::PullRequest& pull, uint64_t start_ns, uint8_t source, Front& front);
  // Forget the span: the request is served later.
  void cancel() { is_open_ = false; }
  bool is_open() const { return is_open_; }
  // The next three do nothing if no span is open.
  void begin_lookup();
  void begin_send(uint64_t version, uint32_t instance, uint64_t rows_found);
  // The request was answered or refused; its reply may wait for flush().
  void end(const base::Status& refusal);
  // The replies of the spans that have ended were sent as far as the network takes them.
  void flush() {
    if (ended_ > 0) push_ended();
  }
  SpanRing& ring() { return ring_; }
  const SpanRing& ring() const { return ring_; }

 private:
  // A span whose reply waits for the flush. `began_ns` and `sending_ns` are of the monotonic clock.
  struct Ended {
    Span span;
    uint64_t began_ns = 0;
    uint64_t sending_ns = 0;
  };
  void push_ended();
  uint64_t random();

  uint64_t threshold_;  // of 2^64: a random number below it begins a trace
  uint64_t state_;      // of random()
  uint64_t polled_ns_ = 0;
  bool is_open_ = false;
  Ended open_;
  uint64_t looking_ns_ = 0;
  size_t ended_ = 0;
  // A turn of a connection answers at most in_flight requests, of which few are sampled.
  std::array<Ended, wire::kMaxInFlight> ended_spans_;
  SpanRing ring_;
};

}  // namespace petps::server
