// Key routing of the training loop, over numpy arrays.
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/blocks.h"
#include "trainer/route/route.h"

namespace petps::bindings {

namespace {

py::tuple route_ask(const py::list& values, const py::object& block_of, uint32_t world,
                    uint32_t micros, uint32_t partitions, bool seen) {
  std::vector<std::span<const uint64_t>> parts;
  for (const py::handle part : values) {
    parts.push_back(keys_of(py::reinterpret_borrow<py::object>(part), "values"));
  }
  const route::Shape shape{world, micros, keys_of(block_of, "block_of")};
  route::Requested requested;
  {
    const Released released_gil;
    requested = unwrap(route::ask(parts, shape, partitions, seen));
  }
  const std::vector<py::ssize_t> cells{world, micros, static_cast<py::ssize_t>(shape.tables())};
  return py::make_tuple(array_of(std::move(requested.keys)), array_of(std::move(requested.seen)),
                        py::array_t<uint64_t>(cells, requested.counts.data()),
                        array_of(std::move(requested.position)));
}

py::tuple route_merge(const py::object& keys, const py::object& seen, const py::object& wanted,
                      const py::object& block_of, uint32_t world, uint32_t micros) {
  const std::span<const uint64_t> ids = keys_of(keys);
  const std::span<const uint64_t> times = keys_of(seen, "seen");
  const std::span<const uint64_t> counts = keys_of(wanted, "wanted");
  const route::Shape shape{world, micros, keys_of(block_of, "block_of")};
  route::Owned owned;
  {
    const Released released_gil;
    owned = unwrap(route::merge(ids, times, counts, shape));
  }
  return py::make_tuple(array_of(std::move(owned.keys)), array_of(std::move(owned.offsets)),
                        array_of(std::move(owned.seen)), array_of(std::move(owned.position)));
}

}  // namespace

void bind_route(py::module_& module) {
  module.def("route_ask", route_ask, py::arg("values"), py::arg("block_of"), py::kw_only(),
             py::arg("world"), py::arg("micros"), py::arg("partitions"), py::arg("seen"),
             "-> (keys uint64[n], seen uint64[n or 0], counts uint64[world, micros, tables], "
             "position uint32[all values]); see native/trainer/route/route.h.");
  module.def("route_merge", route_merge, py::arg("keys"), py::arg("seen"), py::arg("wanted"),
             py::arg("block_of"), py::kw_only(), py::arg("world"), py::arg("micros"),
             "-> (keys uint64[n], offsets uint64[tables + 1], seen uint64[n or 0], position "
             "int64[keys]); see native/trainer/route/route.h.");
}

}  // namespace petps::bindings
