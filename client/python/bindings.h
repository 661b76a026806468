// petps_client._native: the C++ client for Python. It checks arrays, releases the GIL during calls
// and raises errors as Python exceptions.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <exception>
#include <memory>
#include <string>

#include "petps_client/client.h"

namespace petps::client::python {

namespace py = pybind11;

// Carries a Status to the translator in bind_errors.cc.
class StatusError : public std::exception {
 public:
  explicit StatusError(base::Status status)
      : status_(std::move(status)), text_(status_.to_string()) {}
  const base::Status& status() const { return status_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  base::Status status_;
  std::string text_;
};

[[noreturn]] inline void throw_invalid(std::string message) {
  throw StatusError(base::Status(base::Code::kInvalidArgument, std::move(message)));
}

// The functions below return views of arrays after checking dtype, rank and layout; they convert
// nothing. A view is valid as long as its Python object.
std::span<const uint64_t> keys_of(const py::object& object);
// Return a writable bool[n]; empty for None.
std::span<uint8_t> mask_of(const py::object& object, size_t n);
// Return a writable float32[n, dim] or uint8[n, row_bytes], by `form`. The C++ client checks the
// width.
std::span<std::byte> out_of(const py::object& object, size_t n, Form form);
struct FloatRows {
  std::span<const float> values;
  uint32_t dim = 0;
};
FloatRows rows_of(const py::object& object, size_t n);
std::span<const std::byte> stored_rows_of(const py::object& object, size_t n);

void bind_errors(py::module_& module);
void bind_client(py::module_& module);

}  // namespace petps::client::python
