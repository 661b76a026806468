#include "bindings.h"

namespace petps::client::python {
namespace {

std::string shape_of(const py::array& array) {
  std::string text = py::str(py::object(array.attr("dtype"))).cast<std::string>() + "[";
  for (py::ssize_t axis = 0; axis < array.ndim(); ++axis) {
    text += (axis > 0 ? ", " : "") + std::to_string(array.shape(axis));
  }
  return text + "]";
}

// Check the type, dtype T, rank and layout of `object`, and return it as an array. `expected`
// describes these in messages, such as "float32[n, dim]".
template <typename T>
py::array check_array(const py::object& object, const std::string& name, const char* expected,
                      py::ssize_t rank) {
  if (!py::isinstance<py::array>(object)) {
    const auto type = py::str(py::type::of(object).attr("__name__")).cast<std::string>();
    throw_invalid(name + ": expected a numpy array " + expected + ", got " + type);
  }
  auto array = py::reinterpret_borrow<py::array>(object);
  if (!py::dtype::of<T>().equal(array.dtype()) || array.ndim() != rank) {
    throw_invalid(name + ": expected " + expected + ", got " + shape_of(array));
  }
  const int flags = array.flags();
  if ((flags & py::array::c_style) == 0 || (flags & py::detail::npy_api::NPY_ARRAY_ALIGNED_) == 0) {
    throw_invalid(name + ": expected a C-contiguous " + expected + ", got a strided view of " +
                  shape_of(array) + "; use a contiguous array (numpy.ascontiguousarray copies)");
  }
  return array;
}

void check_count(const py::array& array, const std::string& name, size_t n) {
  if (static_cast<size_t>(array.shape(0)) != n) {
    throw_invalid(name + ": " + shape_of(array) + " has another length than the " +
                  std::to_string(n) + " keys");
  }
}

void check_writable(const py::array& array, const std::string& name) {
  if (!array.writeable()) throw_invalid(name + ": the array is read-only, expected a writable one");
}

}  // namespace

std::span<const uint64_t> keys_of(const py::object& object) {
  const py::array array = check_array<uint64_t>(object, "keys", "uint64[n]", 1);
  return {static_cast<const uint64_t*>(array.data()), static_cast<size_t>(array.size())};
}

std::span<uint8_t> mask_of(const py::object& object, size_t n) {
  if (object.is_none()) return {};
  py::array array = check_array<bool>(object, "mask", "bool[n]", 1);
  check_count(array, "mask", n);
  check_writable(array, "mask");
  return {static_cast<uint8_t*>(array.mutable_data()), n};
}

std::span<std::byte> out_of(const py::object& object, size_t n, Form form) {
  py::array array = form == Form::kFloat32
                        ? check_array<float>(object, "out", "float32[n, dim]", 2)
                        : check_array<uint8_t>(object, "out", "uint8[n, row_bytes]", 2);
  check_count(array, "out", n);
  check_writable(array, "out");
  return {static_cast<std::byte*>(array.mutable_data()), static_cast<size_t>(array.nbytes())};
}

FloatRows rows_of(const py::object& object, size_t n) {
  const py::array array = check_array<float>(object, "rows", "float32[n, dim]", 2);
  check_count(array, "rows", n);
  return {{static_cast<const float*>(array.data()), static_cast<size_t>(array.size())},
          static_cast<uint32_t>(array.shape(1))};
}

std::span<const std::byte> stored_rows_of(const py::object& object, size_t n) {
  const py::array array = check_array<uint8_t>(object, "rows", "uint8[n, row_bytes]", 2);
  check_count(array, "rows", n);
  return {static_cast<const std::byte*>(array.data()), static_cast<size_t>(array.nbytes())};
}

}  // namespace petps::client::python
