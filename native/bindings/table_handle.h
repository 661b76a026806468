// A table of an open pool as Python sees it. The session keeps the pool's memory, and its with()
// raises an error if the pool is closed.
#pragma once

#include <memory>

#include "bindings/session.h"

namespace petps::bindings {

struct TableHandle {
  std::shared_ptr<Session> session;
  std::weak_ptr<table::Table> table;  // weak: a handle must not keep a dropped table's space
  pool::TableRecord record;           // a copy, readable after close

  // Return the table. Call it inside session->with. Raise kNotFound if the table has been dropped.
  table::TablePointer open() const {
    table::TablePointer pointer = table.lock();
    if (pointer == nullptr) {
      throw StatusError(
          base::Status(base::Code::kNotFound,
                       "table '" + record.spec.name + "' has been dropped; find it again"));
    }
    return pointer;
  }
};

// Add the scrubber's methods (bind_scrub.cc).
void bind_scrub(pybind11::class_<TableHandle>& table);

// Raise the kNotFound error for a table of an instance, which lists the tables that exist.
[[noreturn]] void table_not_found(table::Tables& tables, const std::string& instance,
                                  const std::string& name);

// Call f(Table&) with the GIL dropped and the pool kept open.
template <typename F>
auto with_table(const TableHandle& handle, F&& f) {
  return released(handle.session, [&](table::Tables&) { return f(*handle.open()); });
}

inline TableHandle handle_of(const std::shared_ptr<Session>& session,
                             const table::TablePointer& table) {
  return {session, table, table->record_now()};
}

}  // namespace petps::bindings
