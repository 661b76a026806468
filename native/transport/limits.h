// The errors for peers that broke one of Limits, and the clocks that measure incomplete frames and
// idle connections. Internal to transport.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "transport/memory_budget.h"
#include "transport/receive_buffer.h"
#include "transport/transport.h"

namespace petps::transport {

base::Status too_many_connections(const Limits& limits);
base::Status too_many_of_peer(const std::string& host, const Limits& limits);
base::Status stalled_peer(const std::string& address, const Limits& limits);
base::Status truncated_frame(size_t bytes);
base::Status slow_frame(const Limits& limits);

class FrameClock {
 public:
  // Call this when no frame is incomplete, or when the connection is not read.
  void reset() { since_ns_ = 0; }
  // Call this while the frame at the front of `in` is incomplete. Return whether it has been
  // incomplete for longer than Limits::frame_ms.
  bool is_overdue(const ReceiveBuffer& in, const Limits& limits, uint64_t now);

 private:
  uint64_t since_ns_ = 0;
  uint64_t frame_ = 0;  // in.frames_consumed() at that time
};

// A connection may lose its place to a new peer only after this idle time, which is longer than a
// hello takes.
inline constexpr uint64_t kSpareIdleMs = 1'000;

// Measures for how long a connection has sent no whole frame although nothing is owed to it. Only
// the sweep uses it, so requests pay nothing for it.
class IdleClock {
 public:
  void begin(const ReceiveBuffer& in, uint64_t now);
  // Return whether the connection has been idle for `ms`. `is_awaited`: a reply is owed to the
  // peer, or something depends on the connection.
  bool is_idle_for(const ReceiveBuffer& in, bool is_awaited, uint64_t now, uint64_t ms);
  uint64_t since_ns() const { return since_ns_; }

 private:
  uint64_t since_ns_ = 0;
  uint64_t frames_ = 0;  // in.frames_consumed() at that time
};

}  // namespace petps::transport
