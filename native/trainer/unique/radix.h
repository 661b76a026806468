// Radix sort of ids, least significant byte first, from one array to the other and back. It skips
// bytes that are equal in all ids.
#pragma once

#include <cstdint>
#include <span>

namespace petps::unique {

// Sort ids ascending. ids_room: working space, uint64[ids.size()]. order, if not null, has the size
// of ids and is permuted in the same way; order_room is working space of that size.
void radix_sort(std::span<uint64_t> ids, uint64_t* ids_room, uint32_t* order = nullptr,
                uint32_t* order_room = nullptr);

}  // namespace petps::unique
