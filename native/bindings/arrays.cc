#include "bindings/arrays.h"

#include <vector>

namespace petps::bindings {

namespace {

std::string shape_of(const py::array& array) {
  std::string text = py::str(py::object(array.attr("dtype"))).cast<std::string>() + "[";
  for (py::ssize_t axis = 0; axis < array.ndim(); ++axis) {
    if (axis > 0) text += ", ";
    text += std::to_string(array.shape(axis));
  }
  return text + "]";
}

// Return the object as a C-contiguous, aligned array of this dtype and rank. Otherwise raise an
// error that describes the object.
template <typename T>
py::array check_array(const py::object& object, const char* name, const char* expected,
                      py::ssize_t rank) {
  if (!py::isinstance<py::array>(object)) {
    invalid(std::string(name) + ": expected a numpy array " + expected + ", got " +
            py::str(py::type::of(object).attr("__name__")).cast<std::string>());
  }
  auto array = py::reinterpret_borrow<py::array>(object);
  if (!py::dtype::of<T>().equal(array.dtype()) || array.ndim() != rank) {
    invalid(std::string(name) + ": expected " + expected + ", got " + shape_of(array) +
            "; convert it with numpy.ascontiguousarray");
  }
  if ((array.flags() & py::array::c_style) == 0 ||
      (array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_) == 0) {
    invalid(std::string(name) + ": expected a C-contiguous, aligned " + expected +
            ", got a strided view of " + shape_of(array) +
            "; copy it with numpy.ascontiguousarray");
  }
  return array;
}

void require_writable(const py::array& array, const char* name) {
  if (!array.writeable())
    invalid(std::string(name) + ": the array is read-only, so nothing can be written to it");
}

py::array mask_array(const py::object& object, const char* name, size_t n) {
  py::array array = check_array<bool>(object, name, "bool[n]", 1);
  if (static_cast<size_t>(array.size()) != n) {
    invalid(std::string(name) + ": expected bool[" + std::to_string(n) + "], one per key, got " +
            shape_of(array));
  }
  return array;
}

}  // namespace

std::span<const uint64_t> keys_of(const py::object& object, const char* name) {
  py::array array = check_array<uint64_t>(object, name, "uint64[n]", 1);
  return {static_cast<const uint64_t*>(array.data()), static_cast<size_t>(array.size())};
}

std::span<const uint32_t> stamps_of(const py::object& object, const char* name, size_t n) {
  py::array array = check_array<uint32_t>(object, name, "uint32[n]", 1);
  if (static_cast<size_t>(array.size()) != n) {
    invalid(std::string(name) + " must be one number or uint32[" + std::to_string(n) +
            "], one per key; got uint32[" + std::to_string(array.size()) + "]");
  }
  return {static_cast<const uint32_t*>(array.data()), n};
}

std::span<uint32_t> writable_stamps_of(const py::object& object, const char* name, size_t n) {
  if (object.is_none()) return {};
  const std::span<const uint32_t> stamps = stamps_of(object, name, n);
  py::array array = check_array<uint32_t>(object, name, "uint32[n]", 1);
  require_writable(array, name);
  return {static_cast<uint32_t*>(array.mutable_data()), stamps.size()};
}

std::span<const uint8_t> mask_of(const py::object& object, const char* name, size_t n) {
  if (object.is_none()) return {};
  return {static_cast<const uint8_t*>(mask_array(object, name, n).data()), n};
}

std::span<uint8_t> writable_mask_of(const py::object& object, const char* name, size_t n) {
  if (object.is_none()) return {};
  py::array array = mask_array(object, name, n);
  require_writable(array, name);
  return {static_cast<uint8_t*>(array.mutable_data()), n};
}

Rows<const float> floats_of(const py::object& object, const char* name) {
  py::array array = check_array<float>(object, name, "float32[n, dim]", 2);
  return {static_cast<const float*>(array.data()), static_cast<size_t>(array.shape(0)),
          static_cast<size_t>(array.shape(1))};
}

Rows<float> writable_floats_of(const py::object& object, const char* name) {
  py::array array = check_array<float>(object, name, "float32[n, dim]", 2);
  require_writable(array, name);
  return {static_cast<float*>(array.mutable_data()), static_cast<size_t>(array.shape(0)),
          static_cast<size_t>(array.shape(1))};
}

std::span<const int64_t> positions_of(const py::object& object, const char* name) {
  py::array array = check_array<int64_t>(object, name, "int64[n]", 1);
  return {static_cast<const int64_t*>(array.data()), static_cast<size_t>(array.size())};
}

Rows<const std::byte> stored_rows_of(const py::object& object, const char* name) {
  py::array array = check_array<uint8_t>(object, name, "uint8[n, row_bytes]", 2);
  return {static_cast<const std::byte*>(array.data()), static_cast<size_t>(array.shape(0)),
          static_cast<size_t>(array.shape(1))};
}

Out out_of(const py::object& object, size_t n, size_t dim, size_t row_bytes) {
  const bool stored =
      py::isinstance<py::array>(object) &&
      py::dtype::of<uint8_t>().equal(py::reinterpret_borrow<py::array>(object).dtype());
  py::array array = stored ? check_array<uint8_t>(object, "out", "uint8[n, row_bytes]", 2)
                           : check_array<float>(object, "out", "float32[n, dim]", 2);
  const size_t width = stored ? row_bytes : dim;
  if (static_cast<size_t>(array.shape(0)) != n || static_cast<size_t>(array.shape(1)) != width) {
    invalid("out: expected " + std::string(stored ? "uint8[" : "float32[") + std::to_string(n) +
            ", " + std::to_string(width) + "], got " + shape_of(array));
  }
  require_writable(array, "out");
  return {array.mutable_data(), stored};
}

}  // namespace petps::bindings
