// Turns each StatusError into the class of petps.errors that has its code.
#include "bindings/bindings.h"

namespace petps::bindings {

namespace {

void raise_in_python(const base::Status& status) {
  py::object kind =
      py::module_::import("petps.errors").attr("class_of")(static_cast<int>(status.code()));
  const std::string_view message = status.message();
  // A message may quote bytes of a file. Escape bytes that are not UTF-8 instead of raising a
  // second error.
  py::object text = py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
      message.data(), static_cast<Py_ssize_t>(message.size()), "backslashreplace"));
  PyErr_SetObject(kind.ptr(), text.ptr());
}

}  // namespace

void bind_errors(py::module_& module) {
  (void)module;
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const StatusError& error) {
      raise_in_python(error.status());
    }
  });
}

}  // namespace petps::bindings
