#include "base/printable.h"

#include <cstddef>
#include <cstdint>

namespace petps::base {

namespace {

// Return the length of the UTF-8 sequence at the start of `text`, or 0 if it is not valid: too
// long, a surrogate, above U+10FFFF, or cut. Set `code` to the character.
size_t sequence_length(std::string_view text, uint32_t& code) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  if (first < 0x80) {
    code = first;
    return 1;
  }
  const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < length) return 0;
  code = first & (0xFFu >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3Fu);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xD800 && code <= 0xDFFF;
  return code < kLeast[length] || is_surrogate || code > 0x10FFFF ? 0 : length;
}

}  // namespace

std::string printable(std::string_view text) {
  std::string shown;
  shown.reserve(text.size());
  while (!text.empty()) {
    uint32_t code = 0;
    const size_t length = sequence_length(text, code);
    const bool is_control = code < 0x20 || (code >= 0x7F && code < 0xA0);
    if (length == 0 || is_control) {
      shown += '?';
    } else {
      shown += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return shown;
}

}  // namespace petps::base
