// A table of an open pool as Python sees it. The session keeps the pool's memory; its with()
// reports whether the pool is closed.
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
    table::TablePointer found = table.lock();
    if (found == nullptr) {
      throw StatusError(
          base::Status(base::Code::kNotFound,
                       "table '" + record.spec.name + "' has been dropped; find it again"));
    }
    return found;
  }
};

inline TableHandle handle_of(const std::shared_ptr<Session>& session,
                             const table::TablePointer& table) {
  return {session, table, table->record()};
}

}  // namespace petps::bindings
