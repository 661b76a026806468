// Bytes of one connection that have arrived and are not consumed yet; finds whole frames in them.
// Internal to transport.
//
// ASSUMPTIONS: one thread. rules.frame_length reads header_bytes bytes only.
// ERRORS: a frame that breaks the rules stays at the front, and every later look() reports it
// again.
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
  // One recv should take everything that a pipelining client has sent: 64 KiB are 15 pulls of 500
  // keys. Pages that are never written cost nothing, so idle connections stay small.
  static constexpr size_t kFirstBytes = size_t{64} << 10;
  // A buffer that grew beyond this for a large frame is freed when it runs empty.
  static constexpr size_t kKeptBytes = size_t{1} << 20;

  // Return room for at least one more byte. Return an empty span if the buffer already holds a
  // whole frame of the largest size.
  std::span<std::byte> space(const FrameRules& rules);
  // Add the bytes that were written to the start of space().
  void commit(size_t bytes) {
    end_ += bytes;
    touched_ = std::max(touched_, end_);
  }

  enum class Look { kNothing, kPartial, kFrame, kBroken };
  // Look at the front of the buffer. kFrame: `frame` views the frame. kBroken: `reason` says why.
  Look look(const FrameRules& rules, std::span<const std::byte>& frame, base::Status& reason);
  // Remove the frame that look() returned last.
  void consume();

  size_t bytes() const { return end_ - begin_; }
  // Return the memory in use: pages that were never written cost nothing.
  size_t touched() const { return touched_; }
  uint64_t frames_consumed() const { return frames_consumed_; }
  void release();

 private:
  void grow(size_t capacity);

  std::unique_ptr<std::byte[]> memory_;
  size_t capacity_ = 0;
  size_t begin_ = 0;
  size_t end_ = 0;
  size_t touched_ = 0;  // bytes of memory_ ever written, from its start
  size_t frame_ = 0;    // length of the frame at the front; 0: not known yet
  uint64_t frames_consumed_ = 0;
};

}  // namespace petps::transport
