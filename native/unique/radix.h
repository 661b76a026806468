// Least significant byte first, from one array to the other and back; bytes that all ids share are
// skipped.
#pragma once

#include <cstdint>
#include <span>

namespace petps::unique {

// Sorts ids ascending. ids_room: uint64[ids.size()]. order, if given, is permuted alike, with
// order_room of its size.
void radix_sort(std::span<uint64_t> ids, uint64_t* ids_room, uint32_t* order = nullptr,
                uint32_t* order_room = nullptr);

}  // namespace petps::unique
