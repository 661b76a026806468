// Bytes of one connection's replies that the network has not taken yet. Internal to transport.
//
// ASSUMPTIONS: one thread.
#pragma once

#include <cstddef>
#include <vector>

namespace petps::transport {

class SendBuffer {
 public:
  size_t bytes() const { return memory_.size() - begin_; }
  const std::byte* data() const { return memory_.data() + begin_; }
  // Return the memory in use, which may exceed bytes().
  size_t capacity() const { return memory_.capacity(); }

  // Add room for `n` bytes at the end and return it. The caller must fill it before the next call.
  std::byte* append(size_t n) {
    memory_.resize(memory_.size() + n);
    return memory_.data() + memory_.size() - n;
  }
  // Remove the first `n` bytes. An empty buffer holds no memory.
  void consume(size_t n) {
    begin_ += n;
    if (bytes() == 0) {
      release();
    } else if (begin_ > memory_.size() / 2) {  // so each byte moves at most once
      memory_.erase(memory_.begin(), memory_.begin() + static_cast<ptrdiff_t>(begin_));
      begin_ = 0;
    }
  }
  void release() {
    memory_ = std::vector<std::byte>();  // `= {}` would keep the memory
    begin_ = 0;
  }

 private:
  std::vector<std::byte> memory_;
  size_t begin_ = 0;
};

}  // namespace petps::transport
