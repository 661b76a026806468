// A C++ struct as a read-only Python record: attributes, as_dict() in field order, and a repr.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/bindings.h"

namespace petps::bindings {

template <typename T>
class Record {
 public:
  Record(py::module_& module, const char* name, const char* doc)
      : class_(module, name, doc), fields_(std::make_shared<Fields>()) {
    class_.def(
        "as_dict", [fields = fields_](const T& record) { return as_dict(*fields, record); },
        "The fields by name, in order; plain numbers, texts and lists.");
    class_.def("__repr__", [fields = fields_, title = std::string(name)](const T& record) {
      return repr(title, *fields, record);
    });
  }

  // Add a field. `value` is a pointer to member, or a function of const T&.
  template <typename Value>
  Record& field(const char* name, Value value) {
    auto read = [value](const T& record) -> py::object {
      using Result = std::decay_t<decltype(std::invoke(value, record))>;
      if constexpr (std::is_base_of_v<py::object, Result>) {
        return std::invoke(value, record);
      } else {
        return py::cast(std::invoke(value, record));
      }
    };
    class_.def_property_readonly(name, read);
    fields_->emplace_back(name, read);
    return *this;
  }

  py::class_<T>& python_class() { return class_; }

 private:
  using Fields = std::vector<std::pair<std::string, std::function<py::object(const T&)>>>;

  static py::dict as_dict(const Fields& fields, const T& record) {
    py::dict result;
    for (const auto& [name, read] : fields) result[py::str(name)] = read(record);
    return result;
  }

  static std::string repr(const std::string& title, const Fields& fields, const T& record) {
    std::string text = title + "(";
    for (const auto& [name, read] : fields) {
      if (text.back() != '(') text += ", ";
      text += name + "=" + std::string(py::str(py::repr(read(record))));
    }
    return text + ")";
  }

  py::class_<T> class_;
  std::shared_ptr<Fields> fields_;
};

}  // namespace petps::bindings
