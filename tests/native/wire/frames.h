// One frame of each kind, with fixed content: what the golden bytes hold and what the mutation test
// starts from.
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

// Decodes the frame by the opcode of its own header; the Status of whatever it is. Checks that
// views lie inside it.
base::Status decode_any(std::span<const std::byte> frame);

std::string to_hex(std::span<const std::byte> bytes);  // 16 bytes a line
Frame from_hex(const std::string& text);

}  // namespace petps::wire
