// Room bindings: petps._native, the native rooms as Python sees them.
//
// Owns:         the extension module, array checks, Status -> petps.errors, the guard that keeps a
//               pool open while a call uses it.
// Never does:   decide anything. A binding checks its arguments, drops the GIL, calls one room and
//               wraps the result.
// Called by:    petps (Python).
// Invariants:   a thread holds the GIL while it touches Python objects and drops it while a room
//               works. Session::with (session.h) runs only with the GIL dropped, so a thread that
//               closes a pool never waits for a call that waits for the GIL.
// Threads:      any Python thread may call anything.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "base/status.h"

namespace petps::bindings {

namespace py = pybind11;

// A Status on its way to Python; bind_errors.cc turns it into the class of petps.errors.
class StatusError : public std::exception {
 public:
  explicit StatusError(base::Status status)
      : status_(std::make_shared<base::Status>(std::move(status))) {}
  const base::Status& status() const { return *status_; }
  const char* what() const noexcept override { return "petps status"; }

 private:
  std::shared_ptr<base::Status> status_;  // shared, because exceptions are copied
};

inline void check(base::Status status) {
  if (!status.ok()) throw StatusError(std::move(status));
}

template <typename T>
T unwrap(base::Result<T> result) {
  if (!result.ok()) throw StatusError(result.status());
  return std::move(result).value();
}

// A guard that drops the GIL for its lifetime. pybind11's own class would abort the process if a
// daemon thread returns while the interpreter is being finalized: CPython then terminates the
// thread by unwinding it through a noexcept destructor.
class Released {
 public:
  Released() : state_(PyEval_SaveThread()) {}
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;
  ~Released() noexcept(false);

 private:
  PyThreadState* state_;
};

[[noreturn]] inline void invalid(std::string message) {
  throw StatusError(base::Status(base::Code::kInvalidArgument, std::move(message)));
}

void bind_errors(py::module_& module);
void bind_records(py::module_& module);
void bind_codec(py::module_& module);
void bind_unique(py::module_& module);
void bind_route(py::module_& module);
void bind_buffer(py::module_& module);
void bind_base(py::module_& module);
void bind_scan(py::module_& module);
void bind_scrub_records(py::module_& module);
void bind_table(py::module_& module);
void bind_tables(py::module_& module);
void bind_shard_map(py::module_& module);
void bind_live(py::module_& module);
void bind_calls(py::module_& module);
void bind_access(py::module_& module);
void bind_server(py::module_& module);
void bind_router(py::module_& module);

}  // namespace petps::bindings
