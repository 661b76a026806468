// Checked views of numpy arrays: dtype, shape and contiguity are checked, nothing is converted or
// copied.
#pragma once

#include <pybind11/numpy.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "bindings/bindings.h"

namespace petps::bindings {

// `name` is the argument's name, for error texts. A view is valid as long as its Python object.
std::span<const uint64_t> keys_of(const py::object& object, const char* name = "keys");
// View uint32[n] with exactly n items.
std::span<uint32_t> writable_stamps_of(const py::object& object, const char* name, size_t n);
std::span<const uint32_t> stamps_of(const py::object& object, const char* name, size_t n);
// View bool[n] (or uint8[n]) with exactly n rows; empty for None.
std::span<const uint8_t> mask_of(const py::object& object, const char* name, size_t n);
std::span<uint8_t> writable_mask_of(const py::object& object, const char* name, size_t n);

// A two-dimensional block of rows.
template <typename T>
struct Rows {
  T* data = nullptr;
  size_t n = 0;
  size_t width = 0;
};
Rows<const float> floats_of(const py::object& object, const char* name);
Rows<float> writable_floats_of(const py::object& object, const char* name);
std::span<const int64_t> positions_of(const py::object& object, const char* name);
Rows<const std::byte> stored_rows_of(const py::object& object, const char* name);

// The caller's array that a pull fills: float32[n, dim] or uint8[n, row_bytes].
struct Out {
  void* data = nullptr;
  bool stored = false;  // uint8: the stored bytes, not float32
};
Out out_of(const py::object& object, size_t n, size_t dim, size_t row_bytes);

}  // namespace petps::bindings
