// Bytes of one connection that have arrived and were not consumed; finds whole frames in them.
// Internal to transport.
//
// ASSUMPTIONS: one thread. rules.frame_length looks at header_bytes only.
// ERRORS: a frame that breaks the rules stays in front: every further look reports it again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "transport/transport.h"

namespace petps::transport {

class ReceiveBuffer {
 public:
  // One recv should take everything a pipelining client has sent: 64 KiB are 15 pulls of 500 keys.
  // Untouched pages cost nothing, so idle connections stay small.
  static constexpr size_t kFirstBytes = size_t{64} << 10;
  // A buffer that once held a large frame is given back when it runs empty.
  static constexpr size_t kKeptBytes = size_t{1} << 20;

  // Room for at least one more byte, or empty: the buffer holds a whole frame of the largest size
  // already.
  std::span<std::byte> space(const FrameRules& rules);
  void received(size_t bytes) {
    end_ += bytes;
    touched_ = std::max(touched_, end_);
  }

  enum class Look { kNothing, kPartial, kFrame, kBroken };
  // What stands in front. kFrame: `frame` views it. kBroken: `reason` tells why.
  Look look(const FrameRules& rules, std::span<const std::byte>& frame, base::Status& reason);
  void consume();  // the frame that look() gave last

  size_t bytes() const { return end_ - begin_; }
  // Memory that it really has: pages that were never written cost nothing.
  size_t touched() const { return touched_; }
  uint64_t frames_consumed() const { return frames_consumed_; }
  void release();

 private:
  void grow(size_t capacity);

  std::unique_ptr<std::byte[]> memory_;
  size_t capacity_ = 0;
  size_t begin_ = 0;
  size_t end_ = 0;
  size_t touched_ = 0;  // of memory_, from its start
  size_t frame_ = 0;    // length of the frame in front; 0: not known yet
  uint64_t frames_consumed_ = 0;
};

}  // namespace petps::transport
