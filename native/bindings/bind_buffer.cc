// Rows of a training batch moved by position, over numpy arrays.
#include "bindings/arrays.h"
#include "bindings/blocks.h"
#include "trainer/buffer/buffer.h"

namespace petps::bindings {

namespace {

buffer::Block<const float> block_of(const py::object& object, const char* name) {
  const Rows<const float> rows = floats_of(object, name);
  return {rows.data, rows.n, rows.width};
}

buffer::Block<float> writable_block_of(const py::object& object, const char* name) {
  const Rows<float> rows = writable_floats_of(object, name);
  return {rows.data, rows.n, rows.width};
}

void gather_rows(const py::object& rows, const py::object& at, const py::object& out) {
  const buffer::Block<const float> block = block_of(rows, "rows");
  const buffer::Positions positions = positions_of(at, "at");
  const buffer::Block<float> into = writable_block_of(out, "out");
  const Released released_gil;
  check(buffer::gather(block, positions, into));
}

void add_rows(const py::object& into, const py::object& at, const py::object& rows) {
  const buffer::Block<float> sums = writable_block_of(into, "into");
  const buffer::Positions positions = positions_of(at, "at");
  const buffer::Block<const float> block = block_of(rows, "rows");
  const Released released_gil;
  check(buffer::add(sums, positions, block));
}

void copy_rows(const py::object& into, const py::object& to, const py::object& rows,
               const py::object& from) {
  const buffer::Block<float> target = writable_block_of(into, "into");
  const buffer::Positions to_positions = positions_of(to, "to");
  const buffer::Block<const float> block = block_of(rows, "rows");
  const buffer::Positions from_positions = positions_of(from, "from");
  const Released released_gil;
  check(buffer::copy(target, to_positions, block, from_positions));
}

py::tuple common_keys(const py::object& left, const py::object& right) {
  const std::span<const uint64_t> lefts = keys_of(left, "left");
  const std::span<const uint64_t> rights = keys_of(right, "right");
  std::pair<std::vector<int64_t>, std::vector<int64_t>> positions;
  {
    const Released released_gil;
    positions = buffer::common(lefts, rights);
  }
  return py::make_tuple(array_of(std::move(positions.first)),
                        array_of(std::move(positions.second)));
}

}  // namespace

void bind_buffer(py::module_& module) {
  module.def("gather_rows", gather_rows, py::arg("rows"), py::arg("at"), py::arg("out"),
             "Set out[i] to the first values of rows[at[i]]: float32[n, width], int64[m], "
             "float32[m, dim].");
  module.def("add_rows", add_rows, py::arg("into"), py::arg("at"), py::arg("rows"),
             "Add rows[i] to into[at[i]], in order: float32[n, dim], int64[m], float32[m, dim].");
  module.def("copy_rows", copy_rows, py::arg("into"), py::arg("to"), py::arg("rows"),
             py::arg("from_"), "Set into[to[i]] to rows[from_[i]]: float32 rows of one width.");
  module.def(
      "common_keys", common_keys, py::arg("left"), py::arg("right"),
      "Return the positions (int64[k], int64[k]) of the keys that are in both lists: ascending "
      "uint64[n], uint64[m].");
}

}  // namespace petps::bindings
