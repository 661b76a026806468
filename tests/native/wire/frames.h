// One frame of each kind, with fixed content: the golden bytes hold them, and the mutation test
// starts from them.
#pragma once

#include <string>
#include <vector>

#include "wire/wire.h"

namespace petps::wire {

struct NamedFrame {
  std::string name;
  Frame bytes;
};

std::vector<NamedFrame> sample_frames();

// Decode the frame by the opcode of its own header and return the Status. Check that views lie
// inside the frame.
base::Status decode_any(std::span<const std::byte> frame);

std::string to_hex(std::span<const std::byte> bytes);  // 16 bytes per line
Frame from_hex(const std::string& text);

}  // namespace petps::wire
