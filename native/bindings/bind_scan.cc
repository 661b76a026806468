// petps._native.Scan: the pages of a table, copied out under a pin.
#include "bindings/blocks.h"
#include "bindings/scan.h"

namespace petps::bindings {

namespace {

py::tuple next_page(Scan& scan) {
  std::optional<Page> next;
  {
    const Released released_gil;
    next = scan.page();
  }
  if (!next.has_value()) throw py::stop_iteration();
  Page& page = *next;
  const auto n = static_cast<py::ssize_t>(page.keys.size());
  return py::make_tuple(
      array_of(std::move(page.keys)),
      array_of(std::move(page.rows), {n, static_cast<py::ssize_t>(scan.row_bytes())}));
}

}  // namespace

void bind_scan(py::module_& module) {
  py::class_<Scan> scan(module, "Scan",
                        "Pages of a table. Migration waits until the scan is closed or exhausted.");
  scan.def("__iter__", [](py::object self) { return self; });
  scan.def("__next__", next_page);
  scan.def("__enter__", [](py::object self) { return self; });
  scan.def("__exit__", [](Scan& self, const py::args&) {
    const Released released_gil;
    self.close();
  });
  scan.def("close", &Scan::close, py::call_guard<Released>());
  scan.def_property_readonly("buckets_done", &Scan::buckets_done);
  scan.def_property_readonly("buckets", &Scan::buckets);
}

}  // namespace petps::bindings
