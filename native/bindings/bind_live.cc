// petps._native.LiveReader: pulls from a pool beside the server that writes it.
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <shared_mutex>
#include <thread>

#include "bindings/arrays.h"
#include "bindings/pull_rows.h"
#include "bindings/table_handle.h"
#include "table/live.h"

namespace petps::bindings {

namespace {

using base::Code;
using base::Status;
using View = std::shared_ptr<table::Tables>;

class Live {
 public:
  explicit Live(const std::string& path)
      : reader_(unwrap(table::LiveReader::open(path))), path_(path) {}

  void close() {
    const std::unique_lock lock(mutex_);
    lists_.clear();
    held_ = {};
    reader_.reset();
  }
  bool closed() {
    const std::shared_lock lock(mutex_);
    return reader_ == nullptr;
  }
  const std::string& path() const { return path_; }

  // Call f(tables) under a pin.
  template <typename F>
  auto with(F&& f) {
    const std::shared_lock lock(mutex_);
    check_open();
    List list(*this);
    const epoch::Pin pin = list.pin();
    const View view = unwrap(reader_->view());
    return std::forward<F>(f)(*view);
  }

  void disable_pins() {
    const std::shared_lock lock(mutex_);
    check_open();
    reader_->epochs().disable_pins_for_test();
  }
  void hold_pin() {
    const std::unique_lock lock(mutex_);
    check_open();
    held_ = reader_->epochs().lease()->pin();
  }

 private:
  // The caller must hold mutex_.
  void check_open() const {
    if (reader_ != nullptr) return;
    throw StatusError(Status(Code::kFailedPrecondition,
                             "pool " + path_ + " is closed; open it again with petps.open_live"));
  }

  // An epoch list for one call. A process has few, because calls are short.
  class List {
   public:
    explicit List(Live& live) : live_(live) {
      const std::lock_guard lock(live.lists_mutex_);
      if (!live.lists_.empty()) {
        reader_ = live.lists_.back();
        live.lists_.pop_back();
        return;
      }
      reader_ = live.reader_->epochs().lease();
      if (reader_ == nullptr) {
        throw StatusError(Status(Code::kResourceExhausted,
                                 "pool " + live.path_ + ": " +
                                     std::to_string(epoch::kMaxOutsideReaders) +
                                     " calls of all processes already read it; use fewer threads"));
      }
    }
    ~List() {
      const std::lock_guard lock(live_.lists_mutex_);
      live_.lists_.push_back(reader_);
    }
    List(const List&) = delete;
    List& operator=(const List&) = delete;
    epoch::Pin pin() { return reader_->pin(); }  // one at a time, so the list is never full

   private:
    Live& live_;
    epoch::Reader* reader_;
  };

  std::shared_mutex mutex_;  // shared: a call; exclusive: close
  std::unique_ptr<table::LiveReader> reader_;
  const std::string path_;
  std::mutex lists_mutex_;
  std::vector<epoch::Reader*> lists_;
  epoch::Pin held_;
};

// Return the records of tables of one instance. The model is resolved once, so a caller that uses
// the records cannot mix in another instance.
std::vector<pool::TableRecord> find_all(Live& live, const std::string& model,
                                        const std::vector<std::string>& names) {
  const Released released_gil;
  return live.with([&](table::Tables& tables) {
    const pool::InstanceRecord instance = unwrap(tables.resolve(model));
    std::vector<pool::TableRecord> records;
    for (const std::string& name : names) {
      const table::TablePointer table = tables.find(instance.name, name);
      if (table == nullptr) table_not_found(tables, instance.name, name);
      records.push_back(table->record());
    }
    return records;
  });
}

// Pull from the table that find_all() returned, whatever its instance is called now. Return
// nothing if the table was dropped before the last key was pulled.
std::optional<uint64_t> pull(Live& live, const pool::TableRecord& record, const py::object& keys,
                             const py::object& out, const py::object& mask) {
  const pool::TableSpec& spec = record.spec;
  const std::span<const uint64_t> key_list = keys_of(keys);
  const Out target = out_of(out, key_list.size(), spec.dim, spec.row_bytes);
  const std::span<uint8_t> found_mask = writable_mask_of(mask, "mask", key_list.size());
  const size_t out_bytes = target.stored ? spec.row_bytes : spec.dim * sizeof(float);
  const Released released_gil;
  uint64_t found = 0;
  // One pin per batch, so that no call delays the server's reclaim for long. Between two batches
  // the table may be dropped, so each batch finds its id again: ids are never reused.
  for (size_t from = 0; from < key_list.size(); from += kPullBatch) {
    const size_t n = std::min(kPullBatch, key_list.size() - from);
    const bool exists = live.with([&](table::Tables& tables) {
      const table::TablePointer table = tables.find(record.id);
      if (table == nullptr) return false;
      const pool::TableSpec& now = table->record().spec;
      if (now.dim != spec.dim || now.row_bytes != spec.row_bytes)
        invalid("table '" + spec.name + "' does not belong to pool " + live.path());
      const PullTarget part{static_cast<std::byte*>(target.data) + from * out_bytes, target.stored,
                            found_mask.empty() ? found_mask : found_mask.subspan(from, n)};
      found += pull_rows([] { return epoch::Pin(); }, *table, key_list.subspan(from, n), part);
      return true;
    });
    if (!exists) return std::nullopt;
  }
  return found;
}

std::vector<std::pair<std::string, pool::TableRecord>> tables_of(Live& live) {
  const Released released_gil;
  return live.with([](table::Tables& tables) {
    std::vector<std::pair<std::string, pool::TableRecord>> all;
    for (const table::TablePointer& table : tables.tables()) {
      for (const pool::InstanceRecord& instance : tables.pool().instances()) {
        if (instance.id == table->record().spec.instance)
          all.emplace_back(instance.name, table->record());
      }
    }
    return all;
  });
}

}  // namespace

void bind_live(py::module_& module) {
  py::class_<Live> live(module, "LiveReader",
                        "A pool read in this process while a server writes it.");
  live.def_static(
      "open",
      [](const std::string& path) {
        const Released released_gil;
        return std::make_unique<Live>(path);
      },
      py::arg("path"));
  live.def("close", &Live::close, py::call_guard<Released>());
  live.def_property_readonly("closed", &Live::closed);
  live.def_property_readonly("path", &Live::path);
  live.def("tables", tables_of);
  live.def(
      "instances",
      [](Live& self) {
        return self.with([](table::Tables& tables) { return tables.pool().instances(); });
      },
      py::call_guard<Released>());
  live.def(
      "resolve",
      [](Live& self, const std::string& model) {
        return self.with([&](table::Tables& tables) { return unwrap(tables.resolve(model)); });
      },
      py::arg("model"), py::call_guard<Released>());
  live.def("find", find_all, py::arg("model"), py::arg("tables"));
  live.def("pull", pull, py::arg("table"), py::arg("keys"), py::arg("out"),
           py::arg("mask") = py::none());
  live.def("hold_pin_for_test", &Live::hold_pin, py::call_guard<Released>());
  live.def("disable_pins_for_test", &Live::disable_pins, py::call_guard<Released>());
}

}  // namespace petps::bindings
