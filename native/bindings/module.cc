// petps._native. The sign of this room is in bindings.h.
#include <unistd.h>

#include "bindings/bindings.h"
#include "bindings/software.h"

namespace petps::bindings {

namespace {

bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

}  // namespace

Released::~Released() noexcept(false) {
  // As in CPython 3.14 and later, a thread that returns too late sleeps until the process
  // terminates.
  while (interpreter_ends()) ::pause();
  PyEval_RestoreThread(state_);
}

}  // namespace petps::bindings

PYBIND11_MODULE(_native, module) {
  namespace bindings = petps::bindings;
  module.doc() = "The native rooms of petps (types in petps/_native.pyi).";
  module.attr("__version__") = PETPS_VERSION;
  module.attr("software") = bindings::software();
  bindings::bind_errors(module);
  bindings::bind_records(module);
  bindings::bind_base(module);
  bindings::bind_codec(module);
  bindings::bind_unique(module);
  bindings::bind_route(module);
  bindings::bind_buffer(module);
  bindings::bind_scan(module);
  bindings::bind_scrub_records(module);
  bindings::bind_table(module);
  bindings::bind_tables(module);
  bindings::bind_shard_map(module);
  bindings::bind_live(module);
  bindings::bind_calls(module);
  bindings::bind_access(module);
  bindings::bind_server(module);
  bindings::bind_router(module);
}
