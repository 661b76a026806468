// How long reading many rows may keep slots from reuse. Part of room table.
#pragma once

#include <chrono>

namespace petps::table {

// How long a pin is held, for which no slot of a replaced row is reused. A row may wait for a disk.
inline constexpr auto kPinned = std::chrono::milliseconds(5);

}  // namespace petps::table
