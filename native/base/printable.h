// Texts that may come from a peer, made safe to show.
#pragma once

#include <string>
#include <string_view>

namespace petps::base {

// Return `text` with '?' instead of each control character (C0, DEL, C1), of each character that no
// eye sees (such as U+202E, which reorders others), and of each byte that is not part of valid
// UTF-8.
std::string printable(std::string_view text);

}  // namespace petps::base
