// A block of memory that becomes a numpy array without a copy.
#pragma once

#include <pybind11/numpy.h>

#include <memory>
#include <utility>

#include "bindings/bindings.h"
#include "trainer/unique/pages.h"

namespace petps::bindings {

// Return an array over the block's own memory; the array frees it.
template <typename T>
py::array_t<T> array_of(unique::Block<T> values) {
  auto owned = std::make_unique<unique::Block<T>>(std::move(values));
  const py::capsule owner(owned.get(), [](void* at) { delete static_cast<unique::Block<T>*>(at); });
  const unique::Block<T>& kept = *owned.release();
  return py::array_t<T>(static_cast<py::ssize_t>(kept.size()), kept.data(), owner);
}

}  // namespace petps::bindings
