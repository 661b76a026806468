#include "transport/limits.h"

#include <unistd.h>

#include <algorithm>

namespace petps::transport {

using base::Code;
using base::Status;

Status too_many_connections(const Limits& limits) {
  return Status(Code::kResourceExhausted,
                "the server has its " + std::to_string(limits.connections) +
                    " connections already: close one or ask another replica");
}

Status too_many_of_peer(const std::string& host, const Limits& limits) {
  return Status(Code::kResourceExhausted,
                host + " has its " + std::to_string(limits.connections_per_peer) +
                    " connections already: close one, or raise the server's "
                    "limits.connections_per_peer");
}

Status stalled_peer(const std::string& address, const Limits& limits) {
  return Status(Code::kResourceExhausted, "peer " + address + " has read nothing for " +
                                              std::to_string(limits.output_stall_ms) + " ms");
}

Status truncated_frame(size_t bytes) {
  return Status(Code::kInvalidArgument, "truncated frame: the peer stopped sending after " +
                                            std::to_string(bytes) + " bytes of it");
}

Status slow_frame(const Limits& limits) {
  return Status(Code::kDeadlineExceeded, "a frame was not complete " +
                                             std::to_string(limits.frame_ms) +
                                             " ms after its first byte: connection closed");
}

size_t default_memory_bytes() {
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  const long page = ::sysconf(_SC_PAGE_SIZE);
  if (pages <= 0 || page <= 0) return kMemoryBytesMax;
  return std::min(kMemoryBytesMax,
                  static_cast<size_t>(pages) * static_cast<size_t>(page) / kMemoryShare);
}

bool IdleClock::is_idle_for(const ReceiveBuffer& in, bool is_awaited, uint64_t now, uint64_t ms) {
  if (is_awaited || frames_ != in.frames_consumed()) begin(in, now);
  return now >= since_ns_ + ms * 1'000'000;
}

void IdleClock::begin(const ReceiveBuffer& in, uint64_t now) {
  since_ns_ = now;
  frames_ = in.frames_consumed();
}

bool FrameClock::is_overdue(const ReceiveBuffer& in, const Limits& limits, uint64_t now) {
  if (since_ns_ == 0 || frame_ != in.frames_consumed()) {
    since_ns_ = now;
    frame_ = in.frames_consumed();
  }
  return now > since_ns_ + limits.frame_ms * 1'000'000;
}

}  // namespace petps::transport
