// Raises every StatusError as the class of petps_client.errors that has its code.
#include "bindings.h"

namespace petps::client::python {
namespace {

void raise_in_python(const base::Status& status) {
  const py::object kind =
      py::module_::import("petps_client.errors").attr("class_of")(static_cast<int>(status.code()));
  const std::string_view message = status.message();
  // A message may quote a server's bytes. Escape those that are not UTF-8, so that they cannot
  // cause a second error.
  const auto text = py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
      message.data(), static_cast<Py_ssize_t>(message.size()), "backslashreplace"));
  PyErr_SetObject(kind.ptr(), text.ptr());
}

}  // namespace

void bind_errors(py::module_&) {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const StatusError& error) {
      raise_in_python(error.status());
    }
  });
}

}  // namespace petps::client::python
