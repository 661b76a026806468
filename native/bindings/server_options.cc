#include "bindings/server_options.h"

#include <pybind11/stl.h>

namespace petps::bindings {

namespace {

// Move the limit called `name` from `limits` to `value`, if it is present.
template <typename T>
void take(py::dict& limits, const char* name, T& value) {
  if (!limits.contains(name)) return;
  value = limits[name].cast<T>();
  limits.attr("pop")(name);
}

py::dict histogram(const server::HistogramSnapshot& snapshot) {
  py::dict result;
  result["count"] = snapshot.count;
  result["sum_ns"] = snapshot.sum_ns;
  result["p50_ns"] = snapshot.quantile_ns(0.50);
  result["p99_ns"] = snapshot.quantile_ns(0.99);
  result["p999_ns"] = snapshot.quantile_ns(0.999);
  py::list buckets;  // (largest value, number of values up to it), for buckets that have values
  uint64_t below = 0;
  for (size_t bucket = 0; bucket < snapshot.counts.size(); ++bucket) {
    if (snapshot.counts[bucket] == 0) continue;
    below += snapshot.counts[bucket];
    buckets.append(py::make_tuple(server::HistogramSnapshot::upper_ns(bucket), below));
  }
  result["buckets"] = buckets;
  return result;
}

}  // namespace

void apply_limits(const py::dict& given, server::ServerOptions& options) {
  py::dict limits = given.attr("copy")().cast<py::dict>();
  take(limits, "body_bytes", options.limits.body_bytes);
  take(limits, "keys_per_pull", options.limits.keys_per_pull);
  take(limits, "sections_per_pull", options.limits.sections_per_pull);
  take(limits, "keys_per_push", options.limits.keys_per_push);
  take(limits, "hot_keys", options.limits.hot_keys);
  take(limits, "in_flight", options.limits.in_flight);
  take(limits, "connections", options.limits.connections);
  options.transport.connections = options.limits.connections;
  take(limits, "connections_per_peer", options.transport.connections_per_peer);
  take(limits, "memory_bytes", options.memory_bytes);
  take(limits, "idle_ms", options.transport.idle_ms);
  take(limits, "frame_ms", options.transport.frame_ms);
  take(limits, "output_stall_ms", options.transport.output_stall_ms);
  take(limits, "output_pause_bytes", options.transport.output_pause_bytes);
  take(limits, "output_close_bytes", options.transport.output_close_bytes);
  take(limits, "pin_ms", options.transport.pin_ms);
  for (const auto& item : limits)  // no limit has this name
    invalid("server limit '" + item.first.cast<std::string>() + "' is unknown");
}

py::dict stats_of(const server::StatsSnapshot& snapshot) {
  py::dict result;
  for (const server::StatField& field : server::kStatFields)
    result[field.name] = snapshot.*field.value;
  py::dict latency;
  for (size_t opcode = 0; opcode < snapshot.latency.size(); ++opcode) {
    if (snapshot.latency[opcode].count == 0) continue;
    const std::string_view name = wire::opcode_name(static_cast<uint16_t>(opcode));
    latency[py::str(name.data(), name.size())] = histogram(snapshot.latency[opcode]);
  }
  result["latency"] = latency;
  py::dict errors;
  for (size_t code = 1; code < snapshot.errors_by_code.size(); ++code) {
    const std::string_view name = base::code_name(static_cast<base::Code>(code));
    errors[py::str(name.data(), name.size())] = snapshot.errors_by_code[code];
  }
  result["errors_by_code"] = errors;
  py::dict tables;
  for (const auto& [id, counts] : snapshot.tables) {
    py::dict table;
    table["pulls"] = counts.pulls;
    table["keys"] = counts.keys;
    table["misses"] = counts.misses();
    table["latency"] = histogram(counts.latency);
    tables[py::int_(id)] = table;
  }
  result["tables"] = tables;
  return result;
}

}  // namespace petps::bindings
