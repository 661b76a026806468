#include "transport/limits.h"

namespace petps::transport {

using base::Code;
using base::Status;

Status reads_nothing(const std::string& address, const Limits& limits) {
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

bool FrameClock::overdue(const ReceiveBuffer& in, const Limits& limits, uint64_t now) {
  if (since_ns_ == 0 || frame_ != in.frames_consumed()) {
    since_ns_ = now;
    frame_ = in.frames_consumed();
  }
  return now > since_ns_ + limits.frame_ms * 1'000'000;
}

}  // namespace petps::transport
