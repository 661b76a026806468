#include "base/printable.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>

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

// First and last characters of the ranges that no eye sees, but that reorder others or end a line:
// the categories Cf, Zl and Zp of Unicode 14.
constexpr struct {
  uint32_t first, last;
} kUnseen[] = {
    {0x00AD, 0x00AD},   {0x0600, 0x0605},   {0x061C, 0x061C},   {0x06DD, 0x06DD},
    {0x070F, 0x070F},   {0x0890, 0x0891},   {0x08E2, 0x08E2},   {0x180E, 0x180E},
    {0x200B, 0x200F},   {0x2028, 0x202E},   {0x2060, 0x2064},   {0x2066, 0x206F},
    {0xFEFF, 0xFEFF},   {0xFFF9, 0xFFFB},   {0x110BD, 0x110BD}, {0x110CD, 0x110CD},
    {0x13430, 0x13438}, {0x1BCA0, 0x1BCA3}, {0x1D173, 0x1D17A}, {0xE0001, 0xE0001},
    {0xE0020, 0xE007F},
};

bool is_printable(uint32_t code) {
  if (code < 0x20 || (code >= 0x7F && code < 0xA0)) return false;
  return std::none_of(std::begin(kUnseen), std::end(kUnseen), [code](const auto& range) {
    return range.first <= code && code <= range.last;
  });
}

}  // namespace

std::string printable(std::string_view text) {
  std::string shown;
  shown.reserve(text.size());
  while (!text.empty()) {
    uint32_t code = 0;
    const size_t length = sequence_length(text, code);
    if (length == 0 || !is_printable(code)) {
      shown += '?';
    } else {
      shown += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return shown;
}

}  // namespace petps::base
