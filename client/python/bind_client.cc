#include <pybind11/stl.h>

#include <algorithm>
#include <mutex>

#include "bindings.h"
#include "petps_client/dedup.h"

namespace petps::client::python {
namespace {

// Return (uint64[u] distinct keys in order of first occurrence, int64[n] places). places[i] is the
// number of key i among the distinct keys. `keys`: uint64[n].
py::tuple distinct(const py::object& keys) {
  const auto view = keys_of(keys);
  if (view.size() >= uint64_t{1} << 32) throw_invalid("keys: 4,294,967,296 or more in one call");
  Distinct distinct;
  {
    const py::gil_scoped_release released;
    distinct.build(view);
  }
  py::array_t<uint64_t> distinct_keys(static_cast<py::ssize_t>(distinct.keys().size()));
  std::copy(distinct.keys().begin(), distinct.keys().end(), distinct_keys.mutable_data());
  py::array_t<int64_t> places(static_cast<py::ssize_t>(view.size()));
  std::copy(distinct.positions().begin(), distinct.positions().end(), places.mutable_data());
  return py::make_tuple(std::move(distinct_keys), std::move(places));
}

void check(const base::Status& status) {
  if (!status.ok()) throw StatusError(status);
}

template <typename T>
T value_of(base::Result<T> result) {
  check(result.status());
  return std::move(result).value();
}

Form form_of(const std::string& dtype) {
  if (dtype == "f32") return Form::kFloat32;
  if (dtype == "stored") return Form::kStored;
  throw_invalid("dtype must be 'f32' or 'stored', got '" + dtype + "'");
}

std::optional<OnUnavailable> on_unavailable_of(const py::object& option) {
  if (option.is_none()) return {};
  const auto text = py::isinstance<py::str>(option) ? option.cast<std::string>()
                                                    : py::repr(option).cast<std::string>();
  if (text == "error") return OnUnavailable::kError;
  if (text == "default") return OnUnavailable::kDefault;
  throw_invalid("on_unavailable must be 'error' or 'default', got '" + text + "'");
}

Dedup dedup_of(const py::object& option) {
  if (option.is_none()) return Dedup::kWhenItPays;
  return option.cast<bool>() ? Dedup::kAlways : Dedup::kNever;
}

py::dict dict_of(const Table& table) {
  py::dict out;
  out["name"] = table.name;
  out["model"] = table.model;
  out["instance"] = table.instance;
  out["dtype"] = std::string(codec::dtype_name(table.dtype));
  out["dim"] = table.dim;
  out["row_bytes"] = table.row_bytes;
  out["takes_pushes"] = table.takes_pushes;
  out["capacity"] = table.capacity;
  out["rows"] = table.rows;
  return out;
}

py::tuple tuple_of(const PushReport& report) {
  return py::make_tuple(report.inserted, report.updated, report.deleted, report.absent,
                        report.refused);
}

// Copy an id of exactly N bytes.
template <size_t N>
void copy_id(const py::bytes& bytes, std::array<uint8_t, N>& id) {
  const auto view = static_cast<std::string_view>(bytes);
  if (view.size() != N) {
    throw_invalid("an id of a trace has " + std::to_string(view.size()) + " bytes, expected " +
                  std::to_string(N));
  }
  std::copy(view.begin(), view.end(), id.begin());
}

std::unique_ptr<PullTrace> trace_of(const py::bytes& trace_id, const py::bytes& span_id,
                                    const std::vector<py::bytes>& part_ids) {
  auto trace = std::make_unique<PullTrace>();
  copy_id(trace_id, trace->trace_id);
  copy_id(span_id, trace->span_id);
  trace->part_ids.resize(part_ids.size());
  for (size_t i = 0; i < part_ids.size(); ++i) copy_id(part_ids[i], trace->part_ids[i]);
  return trace;
}

// Return (server, keys, found, attempts, end in ns since 1970, name of the code) of each part.
py::list parts_of(const PullTrace& trace) {
  py::list out;
  for (const PullTrace::Part& part : trace.parts) {
    out.append(py::make_tuple(part.server, part.keys, part.found, part.attempts, part.end_ns,
                              std::string(base::code_name(part.code))));
  }
  return out;
}

// Shares the client with calls in progress: close() in another thread affects later calls only.
class Session {
 public:
  Session(const std::string& url, const Options& options) {
    const py::gil_scoped_release released;
    client_ = value_of(Client::connect(url, options));
  }
  ~Session() { close(); }

  void close() {
    // Release the GIL before taking the mutex. The last owner's destructor waits for the
    // client's background thread.
    const py::gil_scoped_release released;
    std::shared_ptr<Client> last;
    const std::lock_guard lock(mutex_);
    last.swap(client_);
  }

  std::shared_ptr<Client> client() {
    const std::lock_guard lock(mutex_);
    if (client_ != nullptr) return client_;
    throw StatusError(
        base::Status(base::Code::kFailedPrecondition, "the client is closed: connect again"));
  }

  // Run `request` without the GIL. The client stays alive until it returns. If close() came during
  // the request, this call ends the client, also without the GIL (see close).
  template <typename Request>
  auto call(const Request& request) {
    const py::gil_scoped_release released;
    const std::shared_ptr<Client> shared = client();
    return request(*shared);
  }

  // `pulls`: a list of (table, keys, out, mask or None, mask of unavailable keys or None). Return
  // (found, version, instance).
  py::tuple pull(const py::list& pulls, const std::string& dtype, uint32_t deadline_ms,
                 uint64_t min_version, uint32_t wait_ms, const py::object& dedup,
                 const py::object& on_unavailable, PullTrace* trace) {
    const Form form = form_of(dtype);
    std::vector<std::string> names;
    std::vector<TablePull> views;
    names.reserve(pulls.size());  // `views` refers to its elements
    for (const py::handle pull : pulls) {
      const auto [table, keys, out, mask, unavailable] =
          pull.cast<std::tuple<std::string, py::object, py::object, py::object, py::object>>();
      names.push_back(table);
      const auto key_view = keys_of(keys);
      views.push_back({names.back(), key_view, out_of(out, key_view.size(), form),
                       mask_of(mask, key_view.size()), form,
                       mask_of(unavailable, key_view.size())});
    }
    PullOptions options;
    options.deadline_ms = deadline_ms;
    options.min_version = min_version;
    options.wait_ms = wait_ms;
    options.dedup = dedup_of(dedup);
    options.on_unavailable = on_unavailable_of(on_unavailable);
    options.trace = trace;
    const PullReport report =
        call([&](Client& client) { return value_of(client.pull_many(views, options)); });
    return py::make_tuple(report.found, report.applied_version, report.instance);
  }

  py::tuple push(const std::string& table, const py::object& keys, const py::object& rows,
                 bool stored, bool allow_not_finite, uint32_t deadline_ms) {
    const auto key_view = keys_of(keys);
    PushOptions options;
    options.deadline_ms = deadline_ms;
    options.allow_not_finite = allow_not_finite;
    if (stored) {
      const auto bytes = stored_rows_of(rows, key_view.size());
      return run_push(options, [&](Client& client) {
        return client.push_stored(table, key_view, bytes, options);
      });
    }
    const FloatRows floats = rows_of(rows, key_view.size());
    return run_push(options, [&](Client& client) {
      return client.push(table, key_view, floats.values, floats.dim, options);
    });
  }

  py::tuple erase(const std::string& table, const py::object& keys, uint32_t deadline_ms) {
    const auto key_view = keys_of(keys);
    PushOptions options;
    options.deadline_ms = deadline_ms;
    return run_push(options,
                    [&](Client& client) { return client.erase(table, key_view, options); });
  }

  py::dict describe(const std::string& table, uint32_t deadline_ms) {
    return dict_of(
        call([&](Client& client) { return value_of(client.describe(table, deadline_ms)); }));
  }

  py::list tables(uint32_t deadline_ms) {
    py::list out;
    for (const Table& table :
         call([&](Client& client) { return value_of(client.tables(deadline_ms)); }))
      out.append(dict_of(table));
    return out;
  }

  py::dict pull_counts() {
    const PullCounts counts = client()->pull_counts();
    py::dict out;
    out["pulls"] = counts.pulls;
    out["partial_pulls"] = counts.partial_pulls;
    out["unavailable_keys"] = counts.unavailable_keys;
    out["hedges"] = counts.hedges;
    out["hedges_won"] = counts.hedges_won;
    return out;
  }

  size_t shards() {
    return call([](Client& client) { return client.shards(); });
  }

  py::list server_counts() {
    // Without the GIL: a background thread that holds the routing may call a Python resolver.
    const auto all = call([](Client& client) { return client.server_counts(); });
    py::list out;
    for (const ServerCounts& counts : all)
      out.append(py::make_tuple(counts.server, counts.failures, counts.is_live));
    return out;
  }

  std::string status(int server, uint32_t deadline_ms) {
    return call([&](Client& client) { return value_of(client.status(server, deadline_ms)); });
  }

  void send_hot_sets() {
    call([](Client& client) { check(client.send_hot_sets()); });
  }

 private:
  // Return (error or None, counts). A push to a full table is an error with counts.
  template <typename Push>
  py::tuple run_push(PushOptions& options, const Push& push) {
    PushReport report;  // filled on success and on failure
    options.report = &report;
    const base::Status status = call([&](Client& client) { return push(client).status(); });
    if (status.ok()) return py::make_tuple(py::none(), tuple_of(report));
    if (status.code() != base::Code::kResourceExhausted) throw StatusError(status);
    return py::make_tuple(std::string(status.message()), tuple_of(report));
  }

  std::mutex mutex_;
  std::shared_ptr<Client> client_;
};

}  // namespace

void bind_client(py::module_& module) {
  py::class_<PullTrace>(module, "PullTrace")
      .def(py::init(&trace_of), py::arg("trace_id"), py::arg("span_id"), py::arg("part_ids"))
      .def("parts", &parts_of);
  py::class_<Session>(module, "Client")
      .def(py::init([](const std::string& url, const std::string& name, uint32_t deadline_ms,
                       uint32_t keys_per_request, uint32_t requests_in_flight, uint32_t connections,
                       uint32_t hot_sample_every, uint32_t hot_keys, uint32_t hot_set_ms,
                       uint32_t catalogue_ms, std::string token, std::string token_file,
                       const std::string& tls_ca, const std::string& tls_certificate,
                       const std::string& tls_key, const std::string& tls_server_name,
                       const py::object& on_unavailable, std::string zone, bool hedge) {
             Options options;
             options.zone = std::move(zone);
             options.hedge = hedge;
             options.on_unavailable = on_unavailable_of(on_unavailable);
             options.tls = {tls_ca, tls_certificate, tls_key, tls_server_name};
             options.name = name;
             options.deadline_ms = deadline_ms;
             options.keys_per_request = keys_per_request;
             options.requests_in_flight = requests_in_flight;
             options.connections = connections;
             options.hot_sample_every = hot_sample_every;
             options.hot_keys = hot_keys;
             options.hot_set_ms = hot_set_ms;
             options.catalogue_ms = catalogue_ms;
             options.token = std::move(token);
             options.token_file = std::move(token_file);
             return std::make_unique<Session>(url, options);
           }),
           py::arg("url"), py::kw_only(), py::arg("name"), py::arg("deadline_ms"),
           py::arg("keys_per_request"), py::arg("requests_in_flight"), py::arg("connections"),
           py::arg("hot_sample_every"), py::arg("hot_keys"), py::arg("hot_set_ms"),
           py::arg("catalogue_ms"), py::arg("token"), py::arg("token_file"), py::arg("tls_ca"),
           py::arg("tls_certificate"), py::arg("tls_key"), py::arg("tls_server_name"),
           py::arg("on_unavailable"), py::arg("zone"), py::arg("hedge"))
      .def("pull", &Session::pull, py::arg("pulls"), py::arg("dtype"), py::arg("deadline_ms"),
           py::arg("min_version"), py::arg("wait_ms"), py::arg("dedup"), py::arg("on_unavailable"),
           py::arg("trace") = py::none())
      .def("push", &Session::push, py::arg("table"), py::arg("keys"), py::arg("rows"),
           py::arg("stored"), py::arg("allow_not_finite"), py::arg("deadline_ms"))
      .def("erase", &Session::erase, py::arg("table"), py::arg("keys"), py::arg("deadline_ms"))
      .def("describe", &Session::describe, py::arg("table"), py::arg("deadline_ms"))
      .def("tables", &Session::tables, py::arg("deadline_ms"))
      .def("pull_counts", &Session::pull_counts)
      .def("server_counts", &Session::server_counts)
      .def("shards", &Session::shards)
      .def("status", &Session::status, py::arg("server"), py::arg("deadline_ms"))
      .def("send_hot_sets", &Session::send_hot_sets)
      .def("close", &Session::close);
}

PYBIND11_MODULE(_native, module) {
  module.attr("__version__") = PETPS_VERSION;
  bind_errors(module);
  bind_client(module);
  module.def("distinct", &distinct, py::arg("keys"));
}

}  // namespace petps::client::python
