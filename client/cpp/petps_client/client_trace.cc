// What a traced pull records of its parts.
#include <algorithm>

#include "base/clock.h"
#include "petps_client/pull_call.h"

namespace petps::client {

using base::Code;
using base::Status;

void PullCall::trace_servers(const Routing& by) {
  std::vector<PullTrace::Part>& parts = options_.trace->parts;
  parts.resize(std::max(parts.size(), first_traced_part_ + by.all.size()));
}

void PullCall::trace_attempt(const Share& share, const RemoteServer& server) {
  PullTrace::Part& part = options_.trace->parts[first_traced_part_ + share.server];
  part.server = server.name();
  part.keys = share.keys;
  part.found = 0;
  part.end_ns = 0;
  part.attempts += 1;
}

void PullCall::trace_request(Flight& flight) {
  if (!flight.leased.has(wire::kFeatureTrace)) return;  // an older server would refuse the request
  const PullTrace& trace = *options_.trace;
  const size_t part = first_traced_part_ + flight.share.server;
  wire::TraceContext context;
  context.trace_id = trace.trace_id;
  context.span_id = part < trace.part_ids.size() ? trace.part_ids[part] : trace.span_id;
  context.flags = wire::kTraceSampled;
  flight.exchange->carry(context);
}

void PullCall::trace_end(const Share& share, Code code) {
  PullTrace::Part& part = options_.trace->parts[first_traced_part_ + share.server];
  part.end_ns = base::wall_ns();
  part.code = code;
  for (const uint64_t count : share.found_counts) part.found += count;
}

void PullCall::trace_failure(PullTrace& trace, const Status& status) {
  for (PullTrace::Part& part : trace.parts) {
    if (part.end_ns != 0) continue;
    part.end_ns = base::wall_ns();
    part.code = status.code();
  }
}

}  // namespace petps::client
