// A cursor over received bytes and a builder of frames to send. Internal to room wire.
//
// ASSUMPTIONS: offsets never exceed the span; every take checks what is left by subtraction,
// which cannot overflow.
// ERRORS: a failed take leaves the cursor in place and returns false; the caller names the part
// that it was reading.
#pragma once

#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/status.h"
#include "wire/wire.h"

namespace petps::wire {

class Cursor {
 public:
  explicit Cursor(std::span<const std::byte> bytes) : bytes_(bytes) {}

  size_t left() const { return bytes_.size() - at_; }

  template <typename T>
  bool take(T& out) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (left() < sizeof(T)) return false;
    std::memcpy(&out, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return true;
  }

  bool take_bytes(size_t n, std::span<const std::byte>& out) {
    if (left() < n) return false;
    out = bytes_.subspan(at_, n);
    at_ += n;
    return true;
  }

  // View n values in place. The span given to the constructor must be aligned for T, as FORMAT.md
  // lays out frames.
  template <typename T>
  bool take_array(size_t n, std::span<const T>& out) {
    if (n > left() / sizeof(T)) return false;
    const std::byte* start = bytes_.data() + at_;
    if (reinterpret_cast<uintptr_t>(start) % alignof(T) != 0) return false;
    out = {reinterpret_cast<const T*>(start), n};
    at_ += n * sizeof(T);
    return true;
  }

  // Take a u16 length and that many bytes.
  bool take_name(std::string_view& out) {
    uint16_t length = 0;
    const size_t before = at_;
    std::span<const std::byte> text;
    if (!take(length) || length > kMaxNameBytes || !take_bytes(length, text)) {
      at_ = before;
      return false;
    }
    out = {reinterpret_cast<const char*>(text.data()), text.size()};
    return true;
  }

 private:
  std::span<const std::byte> bytes_;
  size_t at_ = 0;
};

// Start `frame` with a header; finish_frame completes the header.
inline void start_frame(uint16_t opcode, uint64_t request_id, Frame& frame) {
  FrameHeader header;
  header.opcode = opcode;
  header.request_id = request_id;
  frame.resize(kHeaderBytes);
  std::memcpy(frame.data(), &header, kHeaderBytes);
}

inline void start_frame(Opcode opcode, uint64_t request_id, Frame& frame) {
  start_frame(static_cast<uint16_t>(opcode), request_id, frame);
}

inline uint16_t reply_opcode(Opcode opcode) { return static_cast<uint16_t>(opcode) | kReplyBit; }

inline void start_reply(Opcode opcode, uint64_t request_id, Frame& frame) {
  start_frame(reply_opcode(opcode), request_id, frame);
}

inline void append_bytes(const void* bytes, size_t n, Frame& frame) {
  if (n == 0) return;
  const size_t at = frame.size();
  frame.resize(at + n);
  std::memcpy(frame.data() + at, bytes, n);
}

template <typename T>
void append(const T& value, Frame& frame) {
  static_assert(std::is_trivially_copyable_v<T>);
  append_bytes(&value, sizeof(T), frame);
}

// A longer name is cut: names are bounded where they are created, and a frame must stay decodable.
inline void append_name(std::string_view name, Frame& frame) {
  name = name.substr(0, kMaxNameBytes);
  append(static_cast<uint16_t>(name.size()), frame);
  append_bytes(name.data(), name.size(), frame);
}

inline void pad_body(Frame& frame) {
  while (frame.size() % kBodyAlignment != 0) frame.push_back(std::byte{0});
}

inline void finish_frame(Frame& frame, size_t sections = 0, base::Code code = base::Code::kOk,
                         uint32_t flags = 0) {
  FrameHeader header;
  std::memcpy(&header, frame.data(), kHeaderBytes);
  header.body_bytes = static_cast<uint32_t>(frame.size() - kHeaderBytes);
  header.sections = static_cast<uint32_t>(sections);
  header.code = static_cast<uint16_t>(code);
  header.flags = flags;
  std::memcpy(frame.data(), &header, kHeaderBytes);
}

inline base::Status bad_frame(std::string message) {
  return base::Status(base::Code::kInvalidArgument, std::move(message));
}

// Return "truncated push: the body of 8024 bytes ends inside the keys".
base::Status truncated(std::string_view message, std::string_view part, size_t body_bytes);

// Return kInvalidArgument unless the header is that of a request (or a reply) with this opcode and
// code 0, and its body is exactly `body`.
base::Status expect_request(const FrameHeader& header, Opcode opcode,
                            std::span<const std::byte> body);
base::Status expect_reply(const FrameHeader& header, Opcode opcode,
                          std::span<const std::byte> body);
// Return kInvalidArgument if bytes follow the message's last part, which is `part`.
base::Status expect_end(const Cursor& cursor, std::string_view message, std::string_view part);

}  // namespace petps::wire
