// The measurement of what each way of sending rows costs on this machine, over a loopback
// connection of its own.
//
// Why loopback: it is available at start-up. It always copies, so zero-copy never wins here; an
// operator whose network card gathers sets zero-copy in the configuration (GATHER.md).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "transport/gather_choice.h"

namespace petps::transport {

// Send rows at random places of `memory` (at least one row of the largest class) for at most
// about limit_ms, or until `stop`. Errors: those of opening the connection.
base::Result<GatherCosts> measure_gather(std::span<const std::byte> memory, uint64_t limit_ms,
                                         const std::atomic<bool>& stop);

}  // namespace petps::transport
