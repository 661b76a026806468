// A block of memory handed to numpy, without a copy.
#pragma once

#include <pybind11/numpy.h>

#include <memory>
#include <utility>

#include "bindings/bindings.h"
#include "unique/pages.h"

namespace petps::bindings {

// The block's own memory as an array, which frees it.
template <typename T>
py::array_t<T> array_of(unique::Block<T> values) {
  auto owned = std::make_unique<unique::Block<T>>(std::move(values));
  const py::capsule owner(owned.get(), [](void* at) { delete static_cast<unique::Block<T>*>(at); });
  const unique::Block<T>& kept = *owned.release();
  return py::array_t<T>(static_cast<py::ssize_t>(kept.size()), kept.data(), owner);
}

}  // namespace petps::bindings
