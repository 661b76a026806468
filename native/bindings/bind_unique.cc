// The distinct ids of many tables, over numpy arrays.
#include <utility>

#include "bindings/arrays.h"
#include "bindings/blocks.h"
#include "trainer/unique/unique.h"

namespace petps::bindings {

namespace {

py::tuple jagged_unique(const py::object& values, const py::object& offsets, bool ascending,
                        bool inverse, bool counts) {
  const std::span<const uint64_t> ids = keys_of(values, "values");
  const std::span<const uint64_t> ends = keys_of(offsets, "offsets");
  const auto order = ascending ? unique::Order::kAscending : unique::Order::kAny;
  unique::Distinct found;
  {
    const Released released_gil;
    found = unwrap(unique::jagged_unique(ids, ends, {order, inverse, counts}));
  }
  py::object no_inverse = py::none();
  py::object no_counts = py::none();
  return py::make_tuple(array_of(std::move(found.ids)), array_of(std::move(found.offsets)),
                        inverse ? py::object(array_of(std::move(found.inverse))) : no_inverse,
                        counts ? py::object(array_of(std::move(found.counts))) : no_counts);
}

}  // namespace

void bind_unique(py::module_& module) {
  module.def("jagged_unique", jagged_unique, py::arg("values"), py::arg("offsets"), py::kw_only(),
             py::arg("ascending") = false, py::arg("inverse") = false, py::arg("counts") = false,
             "values: uint64[n], offsets: uint64[tables + 1] -> (ids uint64[m], offsets "
             "uint64[tables + 1], inverse uint32[n] or None, counts uint64[m] or None).");
}

}  // namespace petps::bindings
