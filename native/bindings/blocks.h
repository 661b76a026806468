// A vector that becomes a numpy array without a copy.
#pragma once

#include <pybind11/numpy.h>

#include <memory>
#include <utility>
#include <vector>

#include "bindings/bindings.h"

namespace petps::bindings {

// Return an array over the memory of `vector` (std::vector or unique::Block); the array frees it.
// shape: of the array; by default [size].
template <typename Vector>
py::array_t<typename Vector::value_type> array_of(Vector vector,
                                                  std::vector<py::ssize_t> shape = {}) {
  if (shape.empty()) shape = {static_cast<py::ssize_t>(vector.size())};
  auto owned = std::make_unique<Vector>(std::move(vector));
  const auto* data = owned->data();
  const py::capsule owner(owned.get(), [](void* at) { delete static_cast<Vector*>(at); });
  owned.release();
  return py::array_t<typename Vector::value_type>(std::move(shape), data, owner);
}

}  // namespace petps::bindings
