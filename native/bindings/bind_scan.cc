// petps._native.Scan: the pages of a table, copied out under a pin.
#include <pybind11/numpy.h>

#include <cstring>

#include "bindings/scan.h"

namespace petps::bindings {

namespace {

template <typename T>
py::array owned(std::vector<T> values, std::vector<py::ssize_t> shape) {
  auto* kept = new std::vector<T>(std::move(values));
  py::capsule owner(kept, [](void* pointer) { delete static_cast<std::vector<T>*>(pointer); });
  return py::array_t<T>(std::move(shape), kept->data(), owner);
}

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
      owned(std::move(page.keys), {n}),
      owned(std::move(page.rows), {n, static_cast<py::ssize_t>(scan.row_bytes())}));
}

}  // namespace

void bind_scan(py::module_& module) {
  py::class_<Scan> scan(module, "Scan",
                        "Pages of a table; holds off migration until closed or exhausted.");
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
