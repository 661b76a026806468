// petps._native.Server: the native server over the tables of an open pool.
#include <pybind11/stl.h>

#include "bindings/server_handle.h"
#include "bindings/software.h"
#include "transport/gather_choice.h"

namespace petps::bindings {

namespace {

transport::GatherMode parse_gather(const std::string& name) {
  transport::GatherMode mode;
  if (transport::parse_gather_mode(name, mode)) return mode;
  invalid("gather '" + name + "' is unknown; write 'auto', 'copy', 'sendmsg' or 'zerocopy'");
}

std::shared_ptr<tls::ServerContext> open_tls(std::string certificate, std::string key,
                                             std::string client_ca, const std::string& clients) {
  tls::ServerFiles files{std::move(certificate), std::move(key), std::move(client_ca), {}};
  if (clients == "optional") {
    files.client_certificates = tls::ClientCertificates::kOptional;
  } else if (clients == "required") {
    files.client_certificates = tls::ClientCertificates::kRequired;
  } else if (clients != "off") {
    invalid("client_certificates '" + clients +
            "' is unknown; write 'off', 'optional' or 'required'");
  }
  const Released released_gil;
  return unwrap(tls::ServerContext::open(std::move(files)));
}

// Move the limit called `name` from `limits` to `value`, if it is present.
template <typename T>
void take(py::dict& limits, const char* name, T& value) {
  if (!limits.contains(name)) return;
  value = limits[name].cast<T>();
  limits.attr("pop")(name);
}

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

std::unique_ptr<ServerHandle> start(
    const std::shared_ptr<Session>& session, const std::string& host, uint16_t port,
    uint32_t workers, const std::string& gather, uint32_t hot_set_seconds, uint64_t drain_ms,
    const py::dict& limits, const wire::ShardMap* shard_map, std::string address,
    uint32_t call_workers, const std::string& rdma, uint32_t real_time, uint32_t busy_poll_us,
    std::shared_ptr<access::Gate> gate, std::shared_ptr<tls::ServerContext> tls) {
  server::ServerOptions options;
  options.host = host;
  options.port = port;
  options.workers = workers;
  options.gather = parse_gather(gather);
  options.hot_set_seconds = hot_set_seconds;
  options.drain_ms = drain_ms;
  options.software = software();
  apply_limits(limits, options);
  if (shard_map != nullptr) options.shard_map = *shard_map;
  options.address = std::move(address);
  options.call_workers = call_workers;
  options.real_time = real_time;
  options.busy_poll_us = busy_poll_us;
  options.gate = std::move(gate);
  options.tls = std::move(tls);
  if (rdma != "off") options.rdma = unwrap(transport::open_verbs(rdma == "auto" ? "" : rdma));
  const Released released_gil;
  return std::make_unique<ServerHandle>(session, options);
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

py::dict stats(ServerHandle& handle) {
  server::StatsSnapshot snapshot;
  {
    const Released released_gil;
    snapshot = handle.with([](server::Server& server) { return server.stats(); });
  }
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

}  // namespace

void bind_server(py::module_& module) {
  py::class_<tls::ServerContext, std::shared_ptr<tls::ServerContext>>(
      module, "ServerTls", "The certificate and key of a server.")
      .def(py::init(&open_tls), py::arg("certificate"), py::arg("key"), py::arg("client_ca") = "",
           py::arg("client_certificates") = "off")
      .def(
          "reload", [](tls::ServerContext& context) { check(context.reload()); },
          py::call_guard<Released>());
  py::class_<ServerHandle> server(module, "Server",
                                  "The native server over an open pool's tables.");
  server.def_static("start", start, py::arg("tables"), py::kw_only(), py::arg("host") = "127.0.0.1",
                    py::arg("port") = 7070, py::arg("workers") = 1, py::arg("gather") = "auto",
                    py::arg("hot_set_seconds") = 10, py::arg("drain_ms") = 5000,
                    py::arg("limits") = py::dict(), py::arg("shard_map") = py::none(),
                    py::arg("address") = "", py::arg("call_workers") = 0, py::arg("rdma") = "off",
                    py::arg("real_time") = 0, py::arg("busy_poll_us") = 0,
                    py::arg("gate") = py::none(), py::arg("tls") = py::none());
  server.def_property_readonly("port", &ServerHandle::port);
  server.def_property_readonly("address", &ServerHandle::address);
  server.def_property_readonly("calls", &ServerHandle::calls,
                               py::return_value_policy::reference_internal);
  server.def(
      "set_shard_map",
      [](ServerHandle& handle, const wire::ShardMap& map) {
        check(handle.with([&](server::Server& running) { return running.set_shard_map(map); }));
      },
      py::arg("map"), py::call_guard<Released>());
  server.def("stop", &ServerHandle::stop, py::call_guard<Released>());
  server.def("stats", stats,
             "Return the counters by name; `errors_by_code` by the name of the code; `latency` by "
             "operation (count, sum, quantiles and buckets in ns); and `tables` by the id of each "
             "table that was pulled: pulls, keys, misses and latency.");
  server.def(
      "status_json",
      [](ServerHandle& handle) {
        return handle.with([](server::Server& running) { return running.status_json(); });
      },
      py::call_guard<Released>());
  server.def(
      "set_status_member",
      [](ServerHandle& handle, const std::string& name, std::string json) {
        handle.with(
            [&](server::Server& running) { running.set_status_member(name, std::move(json)); });
      },
      py::arg("name"), py::arg("json"), py::call_guard<Released>());
}

}  // namespace petps::bindings
