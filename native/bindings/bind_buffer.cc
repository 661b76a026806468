// Rows of a training batch moved by position, over numpy arrays.
#include <cstring>

#include "bindings/arrays.h"
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
  const buffer::Block<const float> of = block_of(rows, "rows");
  const buffer::Positions positions = positions_of(at, "at");
  const buffer::Block<float> into = writable_block_of(out, "out");
  const Released released_gil;
  check(buffer::gather(of, positions, into));
}

void add_rows(const py::object& into, const py::object& at, const py::object& rows) {
  const buffer::Block<float> sums = writable_block_of(into, "into");
  const buffer::Positions positions = positions_of(at, "at");
  const buffer::Block<const float> of = block_of(rows, "rows");
  const Released released_gil;
  check(buffer::add(sums, positions, of));
}

void copy_rows(const py::object& into, const py::object& to, const py::object& rows,
               const py::object& from) {
  const buffer::Block<float> block = writable_block_of(into, "into");
  const buffer::Positions tos = positions_of(to, "to");
  const buffer::Block<const float> of = block_of(rows, "rows");
  const buffer::Positions froms = positions_of(from, "from");
  const Released released_gil;
  check(buffer::copy(block, tos, of, froms));
}

py::tuple common_keys(const py::object& left, const py::object& right) {
  const std::span<const uint64_t> lefts = keys_of(left, "left");
  const std::span<const uint64_t> rights = keys_of(right, "right");
  std::pair<std::vector<int64_t>, std::vector<int64_t>> found;
  {
    const Released released_gil;
    found = buffer::common(lefts, rights);
  }
  const auto array = [](const std::vector<int64_t>& of) {
    return py::array_t<int64_t>(static_cast<py::ssize_t>(of.size()), of.data());
  };
  return py::make_tuple(array(found.first), array(found.second));
}

}  // namespace

void bind_buffer(py::module_& module) {
  module.def("gather_rows", gather_rows, py::arg("rows"), py::arg("at"), py::arg("out"),
             "out[i] = the first values of rows[at[i]]: float32[n, width], int64[m], "
             "float32[m, dim].");
  module.def("add_rows", add_rows, py::arg("into"), py::arg("at"), py::arg("rows"),
             "into[at[i]] += rows[i], in order: float32[n, dim], int64[m], float32[m, dim].");
  module.def("copy_rows", copy_rows, py::arg("into"), py::arg("to"), py::arg("rows"),
             py::arg("from_"), "into[to[i]] = rows[from_[i]]: float32 rows of one width.");
  module.def("common_keys", common_keys, py::arg("left"), py::arg("right"),
             "Positions (int64[k], int64[k]) of the keys of both: ascending uint64[n], uint64[m].");
}

}  // namespace petps::bindings
