// One frame of each kind, with fixed content: the golden bytes hold them, and the mutation test
// starts from them.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "wire/wire.h"

namespace petps::wire {

struct NamedFrame {
  std::string name;
  Frame bytes;
};

std::vector<NamedFrame> sample_frames();
Frame sample_frame(std::string_view name);

// Decode the frame by the opcode of its own header and return the Status. Check that views lie
// inside the frame.
base::Status decode_any(std::span<const std::byte> frame);

// Decode the body of a whole frame into `out`, with the decoder of its message.
template <typename T>
base::Status decode_frame(base::Status (*decode)(const FrameHeader&, std::span<const std::byte>,
                                                 T&),
                          std::span<const std::byte> frame, T& out) {
  FrameHeader header;
  EXPECT_TRUE(decode_header(frame, header).ok());
  return decode(header, frame.subspan(kHeaderBytes), out);
}

inline void expect_refused(const base::Status& status, base::Code code, const std::string& part) {
  EXPECT_EQ(status.code(), code) << status.to_string();
  EXPECT_NE(status.message().find(part), std::string_view::npos) << status.to_string();
}

std::string to_hex(std::span<const std::byte> bytes);  // 16 bytes per line
Frame from_hex(const std::string& text);

}  // namespace petps::wire
