#include "transport/receive_buffer.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace petps::transport {

using base::Code;
using base::Status;

void ReceiveBuffer::grow(size_t capacity) {
  // Uninitialised on purpose: a header that announces 16 MiB costs nothing until the bytes arrive.
  std::unique_ptr<std::byte[]> bigger(new std::byte[capacity]);
  if (end_ > begin_) std::memcpy(bigger.get(), memory_.get() + begin_, end_ - begin_);
  memory_ = std::move(bigger);
  capacity_ = capacity;
  end_ -= begin_;
  begin_ = 0;
  touched_ = end_;
}

std::span<std::byte> ReceiveBuffer::space(const FrameRules& rules) {
  if (begin_ == end_) {
    begin_ = end_ = 0;
    if (capacity_ > kKeptBytes) release();
  }
  if (capacity_ == 0) grow(kFirstBytes);
  // The frame at the front must fit behind begin_, and a nearly full buffer would cause tiny
  // receives.
  const size_t wanted = std::max(frame_, std::min(bytes() + 1, rules.frame_bytes_max));
  if (wanted > capacity_) {
    grow(std::max(wanted, std::min(2 * capacity_, rules.frame_bytes_max)));
  } else if (begin_ > 0 && (begin_ + wanted > capacity_ || capacity_ - end_ < capacity_ / 4)) {
    std::memmove(memory_.get(), memory_.get() + begin_, bytes());
    end_ -= begin_;
    begin_ = 0;
  }
  return {memory_.get() + end_, capacity_ - end_};
}

ReceiveBuffer::Look ReceiveBuffer::look(const FrameRules& rules, std::span<const std::byte>& frame,
                                        Status& reason) {
  const size_t n = bytes();
  if (n == 0) return Look::kNothing;
  if (frame_ == 0) {
    if (n < rules.header_bytes) return Look::kPartial;
    size_t length = 0;
    reason = rules.frame_length({memory_.get() + begin_, rules.header_bytes}, length);
    if (!reason.ok()) return Look::kBroken;
    const bool is_first = rules.first_bytes_max > 0 && frames_consumed_ == 0;
    const size_t most = is_first ? rules.first_bytes_max : rules.frame_bytes_max;
    if (length < rules.header_bytes || length > most) {
      reason = Status(Code::kResourceExhausted,
                      "frame of " + std::to_string(length) + " bytes is above the limit of " +
                          std::to_string(most) +
                          (is_first ? " for the first frame of a connection: begin with a hello"
                                    : ": split the request"));
      return Look::kBroken;
    }
    frame_ = length;
  }
  if (n < frame_) return Look::kPartial;
  frame = {memory_.get() + begin_, frame_};
  return Look::kFrame;
}

void ReceiveBuffer::consume() {
  begin_ += frame_;
  frame_ = 0;
  ++frames_consumed_;
}

void ReceiveBuffer::release() {
  memory_.reset();
  capacity_ = begin_ = end_ = touched_ = frame_ = 0;
}

}  // namespace petps::transport
