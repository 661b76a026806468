// petps._native.Router: the router of a cluster.
#include <pybind11/stl.h>

#include "bindings/call_frames.h"
#include "bindings/record.h"
#include "bindings/server_options.h"
#include "bindings/software.h"
#include "codec/codec.h"
#include "router/names.h"
#include "router/router.h"
#include "server/calls.h"

namespace petps::bindings {

namespace {

using router::Router;

// What one token sees of the servers.
using RouterNames = Router::Seen;

std::unique_ptr<Router> start(const std::string& servers, const std::string& host, uint16_t port,
                              uint32_t workers, uint32_t calls, uint32_t callers,
                              uint64_t caller_idle_ms, uint32_t deadline_ms, uint64_t drain_ms,
                              const py::dict& limits, std::shared_ptr<tls::ServerContext> tls,
                              const std::string& ca, const std::string& server_name,
                              const std::string& zone, bool needs_token) {
  server::ServerOptions given;
  apply_limits(limits, given);
  router::RouterOptions options;
  options.servers = servers;
  options.host = host;
  options.port = port;
  options.workers = workers;
  options.calls = calls;
  options.callers = callers;
  options.caller_idle_ms = caller_idle_ms;
  options.deadline_ms = deadline_ms;
  options.drain_ms = drain_ms;
  options.limits = given.limits;
  options.transport = given.transport;
  options.memory_bytes = given.memory_bytes;
  options.tls = std::move(tls);
  options.server_tls.ca = ca;
  options.server_tls.server_name = server_name;
  options.zone = zone;
  options.needs_token = needs_token;
  options.software = software();
  const Released released_gil;
  return unwrap(Router::start(options));
}

py::dict stats(Router& router) {
  router::RouterSnapshot snapshot;
  {
    const Released released_gil;
    snapshot = router.snapshot();
  }
  py::dict result = stats_of(snapshot.stats);
  result["callers"] = snapshot.callers;
  result["calls_in_flight"] = snapshot.calls_in_flight;
  result["logins_in_flight"] = snapshot.logins_in_flight;
  result["logins_failed"] = snapshot.logins_failed;
  result["hedges"] = snapshot.hedges;
  result["hedges_won"] = snapshot.hedges_won;
  result["pulls_without_thread"] = snapshot.pulls_without_thread;
  py::dict servers;
  for (const client::ServerCounts& server : snapshot.servers)
    servers[py::str(server.server)] = server.is_live;
  result["servers"] = servers;
  return result;
}

RouterNames names(Router& router, const std::string& token, const std::string& host) {
  const Released released_gil;
  return unwrap(router.names(token, host));
}

// Answer a request on this thread, with the GIL dropped.
server::CallReply call(Router& router, const RouterNames& seen, const std::string& token,
                       const std::string& host, wire::Frame frame) {
  const Released released_gil;
  return {0, router.call(seen, token, host, std::move(frame))};
}

server::CallReply pull(Router& router, const RouterNames& seen, const std::string& token,
                       const std::string& host, uint32_t instance,
                       const std::vector<std::pair<uint32_t, py::bytes>>& sections,
                       uint64_t min_version, uint32_t wait_ms, const py::bytes& trace) {
  return call(router, seen, token, host,
              encode_pull_call(instance, sections, min_version, wait_ms, trace));
}

server::CallReply push(Router& router, const RouterNames& seen, const std::string& token,
                       const std::string& host, const wire::TableInfo& table, const py::bytes& keys,
                       const py::bytes& rows, const py::bytes& deleted, uint64_t stamp) {
  const PushedTable pushed{table.name, table.id,    table.instance,
                           table.dim,  table.dtype, table.row_bytes};
  return call(router, seen, token, host, encode_push_call(pushed, keys, rows, deleted, stamp));
}

server::CallReply set_hot_keys(Router& router, const RouterNames& seen, const std::string& token,
                               const std::string& host, uint32_t table, const py::bytes& keys) {
  return call(router, seen, token, host, encode_hot_keys_call(table, keys));
}

server::CallReply tables(Router& router, const RouterNames& seen, const std::string& token,
                         const std::string& host) {
  wire::Frame frame;
  wire::encode_tables(0, {}, frame);
  return call(router, seen, token, host, std::move(frame));
}

std::vector<std::string> aliases_of(const RouterNames& names, uint32_t instance) {
  std::vector<std::string> aliases;
  for (const wire::AliasInfo& alias : names.listing->reply.aliases) {
    if (alias.instance == instance) aliases.push_back(alias.name);
  }
  return aliases;
}

void bind_names(py::module_& module) {
  Record<wire::InstanceInfo>(module, "RouterInstance", "An instance as a router lists it.")
      .field("id", &wire::InstanceInfo::id)
      .field("name", &wire::InstanceInfo::name)
      .field("model", &wire::InstanceInfo::model)
      .field("partitions", &wire::InstanceInfo::partitions)
      .field("applied_version", &wire::InstanceInfo::applied_version);
  Record<wire::TableInfo>(module, "RouterTable", "A table as a router lists it.")
      .field("id", &wire::TableInfo::id)
      .field("instance", &wire::TableInfo::instance)
      .field("name", &wire::TableInfo::name)
      .field("dtype",
             [](const wire::TableInfo& table) {
               return std::string(codec::dtype_name(static_cast<codec::Dtype>(table.dtype)));
             })
      .field("feed",
             [](const wire::TableInfo& table) {
               return std::string(table.feed == 0 ? "push" : "delta");
             })
      .field("dim", &wire::TableInfo::dim)
      .field("row_bytes", &wire::TableInfo::row_bytes)
      .field("capacity", &wire::TableInfo::capacity)
      .field("rows", &wire::TableInfo::rows)
      .field("default_row", [](const wire::TableInfo& table) {
        return py::bytes(reinterpret_cast<const char*>(table.default_row.data()),
                         table.default_row.size());
      });
  py::class_<RouterNames> names(module, "RouterNames", "What one token sees of the servers.");
  names.def_property_readonly("instances",
                              [](const RouterNames& of) { return of.listing->reply.instances; });
  names.def_property_readonly("tables",
                              [](const RouterNames& of) { return of.listing->reply.tables; });
  names.def("aliases", aliases_of, py::arg("instance"));
  names.def("leave", [](const RouterNames& of) { of.has_left->store(true); });
  names.def(
      "resolve",
      [](const RouterNames& of, const std::string& model) {
        return *unwrap(of.listing->resolve(model));
      },
      py::arg("model"));
  names.def(
      "table",
      [](const RouterNames& of, const wire::InstanceInfo& instance, const std::string& table) {
        return *unwrap(of.listing->find(instance, table));
      },
      py::arg("instance"), py::arg("table"));
}

}  // namespace

void bind_router(py::module_& module) {
  bind_names(module);
  py::class_<Router> router(module, "Router", "The router of a cluster.");
  router.def_static("start", start, py::kw_only(), py::arg("servers"),
                    py::arg("host") = "127.0.0.1", py::arg("port") = 7080, py::arg("workers") = 1,
                    py::arg("calls") = 64, py::arg("callers") = 256,
                    py::arg("caller_idle_ms") = 300'000, py::arg("deadline_ms") = 1'500,
                    py::arg("drain_ms") = 5'000, py::arg("limits") = py::dict(),
                    py::arg("tls") = py::none(), py::arg("ca") = "", py::arg("server_name") = "",
                    py::arg("zone") = "", py::arg("needs_token") = false);
  router.def_property_readonly("port", &Router::port);
  router.def(
      "stop", [](Router& running) { check(running.stop()); }, py::call_guard<Released>());
  router.def("tend", &Router::tend, py::call_guard<Released>());
  router.def("stats", stats);
  router.def("progress", &Router::progress);
  router.def(
      "check_sight",
      [](Router& running, const std::string& token, const std::string& host) {
        check(running.check_sight(token, host));
      },
      py::arg("token"), py::arg("host"), py::call_guard<Released>());
  router.def("names", names, py::arg("token"), py::arg("host"));
  router.def("knows", &Router::knows, py::arg("token"), py::arg("host"),
             py::call_guard<Released>());
  router.def("pull", pull, py::arg("seen"), py::arg("token"), py::arg("host"), py::arg("instance"),
             py::arg("sections"), py::kw_only(), py::arg("min_version") = 0, py::arg("wait_ms") = 0,
             py::arg("trace") = py::bytes());
  router.def("push", push, py::arg("seen"), py::arg("token"), py::arg("host"), py::arg("table"),
             py::arg("keys"), py::arg("rows"), py::kw_only(), py::arg("deleted") = py::bytes(),
             py::arg("stamp") = 0);
  router.def("set_hot_keys", set_hot_keys, py::arg("seen"), py::arg("token"), py::arg("host"),
             py::arg("table"), py::arg("keys"));
  router.def("tables", tables, py::arg("seen"), py::arg("token"), py::arg("host"));
  router.def(
      "hold", [](Router& running, size_t bytes) { check(running.hold(bytes)); }, py::arg("bytes"));
  router.def("release", &Router::release, py::arg("bytes"));
  router.def("status_json", &Router::status_json, py::call_guard<Released>());
}

}  // namespace petps::bindings
