// petps._native.Tables: one open pool and its catalogue.
#include <pybind11/stl.h>

#include "bindings/arrays.h"
#include "bindings/partitions.h"
#include "bindings/pool_info.h"
#include "bindings/table_handle.h"
#include "codec/codec.h"

namespace petps::bindings {

namespace {

using SessionPointer = std::shared_ptr<Session>;

table::TablesOptions options_of(const std::string& path, bool background) {
  table::TablesOptions options;
  options.pool.media.path = path;
  options.background = background;
  return options;
}

SessionPointer create(const std::string& path, const std::string& durability, uint64_t unit_bytes,
                      bool background, bool replace) {
  table::TablesOptions options = options_of(path, background);
  options.pool.media.replace = replace;
  options.pool.media.durability = parse_durability(durability);
  options.pool.unit_bytes = unit_bytes;
  const Released released_gil;
  return std::make_shared<Session>(unwrap(table::Tables::create(options)));
}

SessionPointer open(const std::string& path, bool read_only, bool allow_lost_power,
                    bool accept_lost_power, bool background) {
  table::TablesOptions options = options_of(path, background);
  options.allow_lost_power = allow_lost_power;
  options.accept_lost_power = accept_lost_power;
  options.pool.media.access = read_only ? media::Access::kReadOnly : media::Access::kReadWrite;
  const Released released_gil;
  return std::make_shared<Session>(unwrap(table::Tables::open(options)));
}

struct NewTable {
  std::string name;
  uint32_t instance;
  uint32_t dim;
  std::string dtype;
  uint64_t capacity;
  std::string feed;
  py::object default_row;
  uint32_t expire_after;
};

pool::TableSpec spec_of(const NewTable& settings) {
  pool::TableSpec spec;
  const codec::Dtype dtype = unwrap(codec::parse_dtype(settings.dtype));
  spec.name = settings.name;
  spec.instance = settings.instance;
  spec.dtype = static_cast<uint8_t>(dtype);
  spec.feed = parse_feed(settings.feed);
  spec.dim = settings.dim;
  spec.row_bytes = static_cast<uint32_t>(codec::row_bytes(dtype, settings.dim));
  spec.capacity = settings.capacity;
  spec.expire_after = settings.expire_after;
  if (!settings.default_row.is_none()) {
    const Rows<const std::byte> row =
        stored_rows_of(settings.default_row[py::make_tuple(py::none())], "default_row");
    spec.default_row.assign(row.data, row.data + row.width);
  }
  return spec;
}

TableHandle create_table(const SessionPointer& session, const NewTable& settings) {
  const pool::TableSpec spec = spec_of(settings);
  return released(session, [&](table::Tables& tables) {
    return handle_of(session, unwrap(tables.create_table(spec)));
  });
}

TableHandle find(const SessionPointer& session, const std::string& instance,
                 const std::string& name) {
  return released(session, [&](table::Tables& tables) {
    const table::TablePointer table = tables.find(instance, name);
    if (table == nullptr) table_not_found(tables, instance, name);
    return handle_of(session, table);
  });
}

base::Status table_id_unknown(uint32_t id) {
  return base::Status(base::Code::kNotFound, "the pool has no table with id " + std::to_string(id));
}

TableHandle find_id(const SessionPointer& session, uint32_t id) {
  return released(session, [&](table::Tables& tables) {
    const table::TablePointer table = tables.find(id);
    if (table == nullptr) {
      throw StatusError(table_id_unknown(id));
    }
    return handle_of(session, table);
  });
}

std::vector<TableHandle> all_tables(const SessionPointer& session) {
  return released(session, [&](table::Tables& tables) {
    std::vector<TableHandle> handles;
    for (const table::TablePointer& table : tables.tables())
      handles.push_back(handle_of(session, table));
    return handles;
  });
}

// Turn f(Tables&, arguments...) into a method that drops the GIL and keeps the pool open.
template <typename F, typename Result, typename... Arguments>
auto method(F f, Result (F::*)(table::Tables&, Arguments...) const) {
  return [f](const SessionPointer& session, Arguments... arguments) {
    return released(session, [&](table::Tables& open) { return f(open, arguments...); });
  };
}
template <typename F>
auto method(F f) {
  return method(f, &F::operator());
}

// Return the instance that each alias names (or named before), by the alias's name.
py::dict aliases_of(const SessionPointer& session, uint32_t pool::AliasRecord::*instance) {
  py::dict result;
  for (const pool::AliasRecord& alias :
       released(session, [](table::Tables& open) { return open.pool().aliases(); })) {
    if (alias.*instance != 0) result[py::str(alias.name)] = alias.*instance;
  }
  return result;
}

using TablesClass = py::class_<Session, SessionPointer>;

void bind_lifetime(TablesClass& tables) {
  tables.def_static("create", create, py::arg("path"), py::kw_only(),
                    py::arg("durability") = "power",
                    py::arg("unit_bytes") = pool::kDefaultUnitBytes, py::arg("background") = true,
                    py::arg("replace") = false);
  tables.def_static(
      "discard", [](const std::string& path) { check(media::Media::discard(path)); },
      py::arg("path"), py::call_guard<Released>());
  tables.def_static("open", open, py::arg("path"), py::kw_only(), py::arg("read_only") = false,
                    py::arg("allow_lost_power") = false, py::arg("accept_lost_power") = false,
                    py::arg("background") = true);
  tables.def("close", &Session::close, py::call_guard<Released>());
  tables.def_property_readonly("closed", &Session::closed);
  tables.def("info", method([](table::Tables& open) { return pool_info(open); }));
  tables.def("set_durability", method([](table::Tables& open, const std::string& name) {
               check(open.pool().set_durability(parse_durability(name)));
             }),
             py::arg("durability"));
}

void bind_catalogue(TablesClass& tables) {
  tables.def("create_instance",
             method([](table::Tables& open, const std::string& model, const std::string& name,
                       uint32_t partitions) {
               return unwrap(open.pool().create_instance(model, name, partitions));
             }),
             py::arg("model"), py::arg("name"), py::arg("partitions"));
  tables.def("instances", method([](table::Tables& open) { return open.pool().instances(); }));
  tables.def(
      "set_alias",
      method([](table::Tables& open, const std::string& alias, uint32_t instance,
                bool unless_frozen) { check(open.switch_alias(alias, instance, unless_frozen)); }),
      py::arg("alias"), py::arg("instance"), py::kw_only(), py::arg("unless_frozen") = false);
  tables.def("aliases", [](const SessionPointer& session) {
    return aliases_of(session, &pool::AliasRecord::instance);
  });
  tables.def("previous_of_aliases", [](const SessionPointer& session) {
    return aliases_of(session, &pool::AliasRecord::previous);
  });
  tables.def("drop_instance", method([](table::Tables& open, uint32_t instance) {
               check(open.drop_instance(instance));
             }),
             py::arg("instance"));
  tables.def("drop_table",
             method([](table::Tables& open, uint32_t table) { check(open.drop_table(table)); }),
             py::arg("table"));
  tables.def("resolve", method([](table::Tables& open, const std::string& model) {
               return unwrap(open.resolve(model));
             }),
             py::arg("model"));
  tables.def("set_feed", method([](table::Tables& open, uint32_t table, const std::string& name) {
               check(open.pool().set_feed(table, parse_feed(name)));
             }),
             py::arg("table"), py::arg("feed"));
}

table::WhenFull parse_when_full(const std::string& rule) {
  if (rule == "refuse") return table::WhenFull::kRefuse;
  if (rule == "evict_oldest") return table::WhenFull::kEvictOldest;
  if (rule == "evict_coldest") return table::WhenFull::kEvictColdest;
  throw StatusError(base::Status(base::Code::kInvalidArgument,
                                 "when_full '" + rule +
                                     "' is unknown; write 'refuse', 'evict_oldest' or "
                                     "'evict_coldest'"));
}

// An event time as Python has it: cell_ns, time_ns, version, bounds, shown_ns, debt_ns.
using ClockValues = std::tuple<uint64_t, uint64_t, uint64_t,
                               std::array<uint64_t, pool::kExpiryBounds>, uint64_t, uint64_t>;

// The shortest time between two calls of a caller's `progress`: each needs the GIL.
constexpr auto kProgressPause = std::chrono::milliseconds(50);

// A function of Python that says whether long work goes on. Its exception ends the work too.
class GoesOn {
 public:
  explicit GoesOn(const std::optional<py::function>& function) : function_(function) {}

  template <typename... Arguments>
  bool operator()(Arguments... arguments) {
    const auto now = std::chrono::steady_clock::now();
    if (!function_ || now < next_) return true;
    next_ = now + kProgressPause;
    const py::gil_scoped_acquire gil;
    try {
      const py::object answer = (*function_)(arguments...);
      return answer.is_none() || answer.cast<bool>();
    } catch (...) {
      raised_ = std::current_exception();
      return false;
    }
  }

  // Raise the exception again. Call it with the GIL.
  void rethrow() const {
    if (raised_ != nullptr) std::rethrow_exception(raised_);
  }

 private:
  const std::optional<py::function>& function_;
  std::chrono::steady_clock::time_point next_;
  std::exception_ptr raised_;
};

table::VerifyReport verify(const SessionPointer& session,
                           const std::optional<py::function>& goes_on) {
  GoesOn asked(goes_on);
  table::VerifyReport report =
      released(session, [&](table::Tables& open) { return open.verify([&] { return asked(); }); });
  asked.rethrow();
  return report;
}

void grow(const SessionPointer& session, uint32_t id, uint64_t capacity, bool paced,
          const std::optional<py::function>& progress) {
  GoesOn asked(progress);
  const table::GrowOptions options{
      capacity, paced, [&](uint64_t copied, uint64_t all) { return asked(copied, all); }};
  const base::Status status = released(session, [&](table::Tables& open) -> base::Status {
    const table::TablePointer table = open.find(id);
    if (table == nullptr) return table_id_unknown(id);
    return table->grow(options);
  });
  asked.rethrow();
  check(status);
}

uint64_t expire(const SessionPointer& session, uint32_t id, bool paced,
                const std::optional<py::function>& progress) {
  GoesOn asked(progress);
  const table::ExpireOptions options{paced,
                                     [&](uint64_t done, uint64_t all) { return asked(done, all); }};
  base::Result<uint64_t> rows =
      released(session, [&](table::Tables& open) -> base::Result<uint64_t> {
        const table::TablePointer table = open.find(id);
        if (table == nullptr) return table_id_unknown(id);
        return table->expire(options);
      });
  asked.rethrow();
  return unwrap(std::move(rows));
}

uint64_t shrink(const SessionPointer& session, const std::optional<py::function>& progress) {
  GoesOn asked(progress);
  base::Result<uint64_t> done = released(session, [&](table::Tables& open) {
    return open.shrink([&](uint64_t bytes, uint64_t all) { return asked(bytes, all); });
  });
  asked.rethrow();
  return unwrap(std::move(done));
}

void bind_tables_of_pool(TablesClass& tables) {
  tables.def("shrink", shrink, py::arg("progress") = py::none());
  tables.def("grow", grow, py::arg("table"), py::arg("capacity"), py::kw_only(),
             py::arg("paced") = true, py::arg("progress") = py::none());
  tables.def(
      "create_table",
      [](const SessionPointer& session, std::string name, uint32_t instance, uint32_t dim,
         std::string dtype, uint64_t capacity, std::string feed, py::object default_row,
         uint32_t expire_after) {
        return create_table(session, {std::move(name), instance, dim, std::move(dtype), capacity,
                                      std::move(feed), std::move(default_row), expire_after});
      },
      py::arg("name"), py::kw_only(), py::arg("instance"), py::arg("dim"), py::arg("dtype"),
      py::arg("capacity"), py::arg("feed") = "push", py::arg("default_row") = py::none(),
      py::arg("expire_after") = 0);
  tables.def("set_expiry", method([](table::Tables& open, uint32_t table, uint32_t seconds) {
               check(open.set_expiry(table, seconds));
             }),
             py::arg("table"), py::arg("seconds"));
  tables.def("tick", method([](table::Tables& open, uint32_t table, uint64_t now_ns) {
               check(open.tick(table, now_ns));
             }),
             py::arg("table"), py::arg("now_ns"));
  tables.def("set_when_full",
             method([](table::Tables& open, uint32_t table, const std::string& rule) {
               check(open.set_when_full(table, parse_when_full(rule)));
             }),
             py::arg("table"), py::arg("rule"));
  tables.def("clocks", method([](table::Tables& open, uint32_t table) {
               std::vector<ClockValues> all;
               for (const pool::EventClock& clock : open.pool().clocks(table))
                 all.emplace_back(clock.cell_ns, clock.time_ns, clock.version, clock.bounds,
                                  clock.shown_ns, clock.debt_ns);
               return all;
             }),
             py::arg("table"));
  tables.def("adopt_clock",
             method([](table::Tables& open, uint32_t table, uint32_t partition,
                       const ClockValues& values) {
               const auto& [cell_ns, time_ns, version, bounds, shown_ns, debt_ns] = values;
               check(open.adopt_clock(table, partition,
                                      {cell_ns, time_ns, version, bounds, shown_ns, debt_ns}));
             }),
             py::arg("table"), py::arg("partition"), py::arg("clock"));
  tables.def("expire", expire, py::arg("table"), py::kw_only(), py::arg("paced") = true,
             py::arg("progress") = py::none());
  tables.def("find", find, py::arg("instance"), py::arg("table"));
  tables.def("find_id", find_id, py::arg("table"));
  tables.def("tables", all_tables);
}

void bind_progress_and_upkeep(TablesClass& tables) {
  tables.def("record_progress", method([](table::Tables& open, const pool::Progress& progress) {
               check(open.record_progress(progress));
             }),
             py::arg("progress"));
  tables.def("record_all_progress",
             method([](table::Tables& open, const std::vector<pool::Progress>& all,
                       const std::vector<std::array<uint64_t, 4>>& commits) {
               std::vector<pool::Commit> counted;
               for (const auto& [instance, partition, version, time_ns] : commits) {
                 counted.push_back({static_cast<uint32_t>(instance),
                                    static_cast<uint32_t>(partition), version, time_ns});
               }
               check(open.record_progress(all, counted));
             }),
             py::arg("all"), py::arg("commits") = std::vector<std::array<uint64_t, 4>>{},
             "Record the progress of several partitions, each at most once, with one drain. "
             "commits: (instance, partition, version, time_ns) that it covers, in order.");
  tables.def("progress", method([](table::Tables& open, uint32_t instance, uint32_t partition) {
               return open.pool().read_progress(instance, partition);
             }),
             py::arg("instance"), py::arg("partition"));
  tables.def("all_progress",
             method([](table::Tables& open) { return open.pool().all_progress(); }));
  tables.def("applied_version", method([](table::Tables& open, uint32_t instance) {
               return open.applied_version(instance);
             }),
             py::arg("instance"));
  tables.def(
      "set_unread",
      method([](table::Tables& open, uint32_t instance, const std::vector<uint32_t>& partitions) {
        open.set_unread(instance, partition_set(partitions));
      }),
      py::arg("instance"), py::arg("partitions"));
  tables.def("walk", method([](table::Tables& open) { open.walk(); }));
  tables.def("walked", method([](table::Tables& open) { return open.walked(); }));
  tables.def("reclaim", method([](table::Tables& open) { return open.reclaim(); }));
  tables.def("verify", verify, py::arg("goes_on") = py::none());
}

}  // namespace

[[noreturn]] void table_not_found(table::Tables& tables, const std::string& instance,
                                  const std::string& name) {
  std::string known;
  for (const table::TablePointer& table : tables.tables()) {
    const pool::TableSpec& spec = table->record().spec;
    for (const pool::InstanceRecord& record : tables.pool().instances()) {
      if (record.id != spec.instance || record.name != instance) continue;
      known += (known.empty() ? "" : ", ") + spec.name;
    }
  }
  throw StatusError(
      base::Status(base::Code::kNotFound, "instance '" + instance + "' has no table '" + name +
                                              "'; it has " + (known.empty() ? "none yet" : known)));
}

void bind_tables(py::module_& module) {
  TablesClass tables(module, "Tables",
                     "One open pool: its tables, instances, aliases and progress.");
  bind_lifetime(tables);
  bind_catalogue(tables);
  bind_tables_of_pool(tables);
  bind_progress_and_upkeep(tables);
}

}  // namespace petps::bindings
