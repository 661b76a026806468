// Room bindings: petps._native, what Python sees of the native rooms.
//
// Owns:         the extension module, array checks, Status -> petps.errors, the guard that keeps a
//               pool open while a call uses it.
// Never does:   decide anything: a call is checked, the GIL dropped, one room asked, the answer
//               wrapped.
// Called by:    petps (Python).
// Invariants:   the GIL is held while Python objects are touched and dropped while a room works; a
//               Use (session.h) lives only while the GIL is dropped, so that a closer can never
//               wait for a caller who waits for the GIL.
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

// A Status on its way to Python; errors.cc turns it into the class of petps.errors.
class StatusError : public std::exception {
 public:
  explicit StatusError(base::Status status)
      : status_(std::make_shared<base::Status>(std::move(status))) {}
  const base::Status& status() const { return *status_; }
  const char* what() const noexcept override { return "petps status"; }

 private:
  std::shared_ptr<base::Status> status_;  // exceptions are copied, a Status need not be
};

inline void check(base::Status status) {
  if (!status.ok()) throw StatusError(std::move(status));
}

template <typename T>
T unwrap(base::Result<T> result) {
  if (!result.ok()) throw StatusError(result.status());
  return std::move(result).value();
}

// Drops the GIL for its lifetime. pybind11's own would end the process when a daemon thread comes back while the
// interpreter is being finalized: CPython then ends the thread by unwinding it, through a destructor that is noexcept.
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
void bind_table(py::module_& module);
void bind_tables(py::module_& module);
void bind_shard_map(py::module_& module);
void bind_live(py::module_& module);
void bind_calls(py::module_& module);
void bind_server(py::module_& module);

}  // namespace petps::bindings
