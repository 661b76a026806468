// What each way of sending rows costs on this machine, over a loopback connection of its own.
//
// Why loopback: it is what can be had at start-up, and it always copies, so zero-copy never wins
// here; who has a network card that gathers says so in the configuration (GATHER.md).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "transport/gather_choice.h"

namespace petps::transport {

// Sends rows at random places of `memory` (at least one of the largest class) for at most about
// limit_ms, or until `stop`. Errors: what opening the connection said.
base::Result<GatherCosts> measure_gather(std::span<const std::byte> memory, uint64_t limit_ms,
                                         const std::atomic<bool>& stop);

}  // namespace petps::transport
