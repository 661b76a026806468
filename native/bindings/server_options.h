// What the servers and the routers of Python have in common.
#pragma once

#include "bindings/bindings.h"
#include "server/server.h"

namespace petps::bindings {

// Set the limits that Python gives by name. Raise kInvalidArgument for an unknown one.
void apply_limits(const py::dict& given, server::ServerOptions& options);
// Return the counters by name.
py::dict stats_of(const server::StatsSnapshot& snapshot);

}  // namespace petps::bindings
