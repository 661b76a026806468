// petps._native.Server: the native server over the tables of an open pool.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "bindings/partitions.h"
#include "bindings/record.h"
#include "bindings/server_handle.h"
#include "bindings/server_options.h"
#include "bindings/software.h"
#include "transport/gather_choice.h"

namespace petps::bindings {

namespace {

transport::GatherMode parse_gather(const std::string& name) {
  transport::GatherMode mode;
  if (transport::parse_gather_mode(name, mode)) return mode;
  invalid("gather '" + name + "' is unknown; write 'auto', 'copy', 'sendmsg' or 'zerocopy'");
}

tls::ServerFiles tls_files(std::string certificate, std::string key, std::string client_ca,
                           const std::string& clients) {
  tls::ServerFiles files{std::move(certificate), std::move(key), std::move(client_ca), {}};
  if (clients == "optional") {
    files.client_certificates = tls::ClientCertificates::kOptional;
  } else if (clients == "required") {
    files.client_certificates = tls::ClientCertificates::kRequired;
  } else if (clients != "off") {
    invalid("client_certificates '" + clients +
            "' is unknown; write 'off', 'optional' or 'required'");
  }
  return files;
}

std::shared_ptr<tls::ServerContext> open_tls(std::string certificate, std::string key,
                                             std::string client_ca, const std::string& clients) {
  tls::ServerFiles files =
      tls_files(std::move(certificate), std::move(key), std::move(client_ca), clients);
  const Released released_gil;
  return unwrap(tls::ServerContext::open(std::move(files)));
}

void move_tls(tls::ServerContext& context, std::string certificate, std::string key,
              std::string client_ca, const std::string& clients) {
  tls::ServerFiles files =
      tls_files(std::move(certificate), std::move(key), std::move(client_ca), clients);
  const Released released_gil;
  check(context.reload(std::move(files)));
}

py::list incidents_after(ServerHandle& handle, uint64_t number) {
  std::vector<server::Incident> incidents;
  {
    const Released released_gil;
    incidents =
        handle.with([&](server::Server& running) { return running.incidents_after(number); });
  }
  py::list result;
  for (const server::Incident& incident : incidents)
    result.append(py::make_tuple(incident.number, incident.text, incident.host));
  return result;
}

py::tuple progress(ServerHandle& handle) {
  server::Progress progress;
  {
    const Released released_gil;
    progress = handle.with([](server::Server& running) { return running.progress(); });
  }
  return py::make_tuple(progress.workers, progress.pushes);
}

server::Pauses pauses_of(const std::vector<uint32_t>& pushes, const std::vector<uint32_t>& pulls) {
  return {partition_set(pushes), partition_set(pulls)};
}

void set_pauses(ServerHandle& handle, const std::vector<uint32_t>& pushes,
                const std::vector<uint32_t>& pulls) {
  const server::Pauses pauses = pauses_of(pushes, pulls);
  const Released released_gil;
  handle.with([&](server::Server& running) { running.set_pauses(pauses); });
}

py::dict take_pushed(ServerHandle& handle, uint32_t partition) {
  std::vector<server::PushedKey> taken;
  bool is_complete = true;
  {
    const Released released_gil;
    is_complete =
        handle.with([&](server::Server& running) { return running.take_pushed(partition, taken); });
  }
  if (!is_complete) {
    check(base::Status(base::Code::kResourceExhausted,
                       "more pushes to partition " + std::to_string(partition) +
                           " than can be remembered: read all its rows again"));
  }
  std::map<uint32_t, std::vector<uint64_t>> keys;
  for (const server::PushedKey& pushed : taken) keys[pushed.table].push_back(pushed.key);
  py::dict result;
  for (const auto& [table, own] : keys)
    result[py::int_(table)] =
        py::array_t<uint64_t>(static_cast<py::ssize_t>(own.size()), own.data());
  return result;
}

py::bytes bytes_of(std::span<const uint8_t> bytes) {
  return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

py::tuple spans(ServerHandle& handle, size_t most) {
  std::vector<server::Span> taken;
  uint64_t dropped = 0;
  {
    const Released released_gil;
    dropped = handle.take_spans(most, taken);
  }
  return py::make_tuple(py::cast(taken), dropped);
}

void bind_span(py::module_& module) {
  using server::Span;
  Record<Span>(module, "Span", "One answered pull, as a worker recorded it. Times are in ns.")
      .field("trace_id", [](const Span& span) { return bytes_of(span.trace_id); })
      .field("span_id", [](const Span& span) { return bytes_of(span.span_id); })
      .field("parent_id", [](const Span& span) { return bytes_of(span.parent_id); })
      .field("start_ns", &Span::start_ns)
      .field("duration_ns", &Span::duration_ns)
      .field("queued_ns", &Span::queued_ns)
      .field("waited_ns", &Span::waited_ns)
      .field("lookup_ns", &Span::lookup_ns)
      .field("send_ns", &Span::send_ns)
      .field("version", &Span::version)
      .field("instance", &Span::instance)
      .field("keys", &Span::keys)
      .field("rows_found", &Span::rows_found)
      .field("sections", &Span::sections)
      .field("tables",
             [](const Span& span) {
               const size_t n = std::min<size_t>(span.sections, span.tables.size());
               return std::vector<uint32_t>(span.tables.begin(), span.tables.begin() + n);
             })
      .field("code", [](const Span& span) { return std::string(base::code_name(span.code)); })
      .field("source", [](const Span& span) {
        constexpr std::array<const char*, 3> kNames = {"tcp", "grpc", "rdma"};
        return kNames[span.source];
      });
}

std::unique_ptr<ServerHandle> start(
    const std::shared_ptr<Session>& session, const std::string& host, uint16_t port,
    uint32_t workers, const std::string& gather, uint32_t hot_set_seconds, uint64_t drain_ms,
    const py::dict& limits, const wire::ShardMap* shard_map, std::string address,
    uint32_t call_workers, const std::string& rdma, uint32_t real_time, uint32_t busy_poll_us,
    std::shared_ptr<access::Gate> gate, std::shared_ptr<tls::ServerContext> tls,
    std::optional<double> trace_sample, const std::vector<uint32_t>& paused_pushes,
    const std::vector<uint32_t>& paused_pulls) {
  server::ServerOptions options;
  options.pauses = pauses_of(paused_pushes, paused_pulls);
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
  options.trace = trace_sample.has_value();
  options.trace_sample = trace_sample.value_or(0);
  if (rdma != "off") options.rdma = unwrap(transport::open_verbs(rdma == "auto" ? "" : rdma));
  const Released released_gil;
  return std::make_unique<ServerHandle>(session, options);
}

py::dict stats(ServerHandle& handle) {
  server::StatsSnapshot snapshot;
  {
    const Released released_gil;
    snapshot = handle.with([](server::Server& server) { return server.stats(); });
  }
  return stats_of(snapshot);
}

}  // namespace

void bind_server(py::module_& module) {
  py::class_<tls::ServerContext, std::shared_ptr<tls::ServerContext>>(
      module, "ServerTls", "The certificate and key of a server.")
      .def(py::init(&open_tls), py::arg("certificate"), py::arg("key"), py::arg("client_ca") = "",
           py::arg("client_certificates") = "off")
      .def(
          "reload", [](tls::ServerContext& context) { check(context.reload()); },
          py::call_guard<Released>())
      .def("move", move_tls, py::arg("certificate"), py::arg("key"), py::arg("client_ca") = "",
           py::arg("client_certificates") = "off");
  bind_span(module);
  py::class_<ServerHandle> server(module, "Server",
                                  "The native server over an open pool's tables.");
  server.def_static(
      "start", start, py::arg("tables"), py::kw_only(), py::arg("host") = "127.0.0.1",
      py::arg("port") = 7070, py::arg("workers") = 1, py::arg("gather") = "auto",
      py::arg("hot_set_seconds") = 10, py::arg("drain_ms") = 5000, py::arg("limits") = py::dict(),
      py::arg("shard_map") = py::none(), py::arg("address") = "", py::arg("call_workers") = 0,
      py::arg("rdma") = "off", py::arg("real_time") = 0, py::arg("busy_poll_us") = 0,
      py::arg("gate") = py::none(), py::arg("tls") = py::none(),
      py::arg("trace_sample") = py::none(), py::arg("paused_pushes") = std::vector<uint32_t>(),
      py::arg("paused_pulls") = std::vector<uint32_t>());
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
  server.def("set_pauses", set_pauses, py::arg("pushes"), py::arg("pulls"));
  server.def(
      "keep_pulls",
      [](ServerHandle& handle, uint64_t until_ns) {
        handle.with([&](server::Server& running) { running.keep_pulls(until_ns); });
      },
      py::arg("until_ns"), py::call_guard<Released>());
  server.def(
      "track_pushes",
      [](ServerHandle& handle, uint32_t partition, bool is_tracked) {
        handle.with([&](server::Server& running) { running.track_pushes(partition, is_tracked); });
      },
      py::arg("partition"), py::arg("is_tracked"), py::call_guard<Released>());
  server.def("take_pushed", take_pushed, py::arg("partition"));
  server.def("stop", &ServerHandle::stop, py::arg("drain_ms") = py::none(),
             py::call_guard<Released>());
  server.def("incidents_after", incidents_after, py::arg("number"));
  server.def(
      "refusals",
      [](ServerHandle& handle) {
        return handle.with([](server::Server& running) { return running.refusals(); });
      },
      py::call_guard<Released>());
  server.def("progress", progress);
  server.def("spans", spans, py::arg("most"));
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
