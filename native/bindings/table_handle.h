// A table of an open pool as Python holds it: the session keeps the pool's memory, with() says when
// it is closed.
#pragma once

#include <memory>

#include "bindings/session.h"

namespace petps::bindings {

struct TableHandle {
  std::shared_ptr<Session> session;
  table::Table* table;       // valid inside session->with only
  pool::TableRecord record;  // a copy: readable after close
};

inline TableHandle handle_of(const std::shared_ptr<Session>& session, table::Table* table) {
  return {session, table, table->record()};
}

}  // namespace petps::bindings
