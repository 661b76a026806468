// A minimal JSON writer for the status: objects, arrays, escaped strings. Internal to server
// and router.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/printable.h"

namespace petps::server {

class JsonWriter {
 public:
  void begin_object(std::string_view key = {}) { open(key, '{'); }
  void end_object() { close('}'); }
  void begin_array(std::string_view key = {}) { open(key, '['); }
  void end_array() { close(']'); }

  void member(std::string_view key, std::string_view value) {
    start(key);
    quote(value);
  }
  void member(std::string_view key, const char* value) { member(key, std::string_view(value)); }
  template <typename T>
  requires std::is_arithmetic_v<T>
  void member(std::string_view key, T value) {
    start(key);
    if constexpr (std::is_same_v<T, bool>) {
      text_ += value ? "true" : "false";
    } else if constexpr (std::is_floating_point_v<T>) {
      char digits[32];
      std::snprintf(digits, sizeof(digits), "%.6g", static_cast<double>(value));
      text_ += digits;
    } else {
      text_ += std::to_string(value);
    }
  }
  void element(std::string_view value) { member({}, value); }
  // Write a member whose value `json` is already JSON.
  void raw(std::string_view key, std::string_view json) {
    start(key);
    text_ += json;
  }

  std::string take() { return std::move(text_); }

 private:
  void start(std::string_view key) {
    if (comma_) text_ += ',';
    comma_ = true;
    if (key.empty()) return;
    quote(key);
    text_ += ':';
  }
  void open(std::string_view key, char bracket) {
    start(key);
    text_ += bracket;
    comma_ = false;
  }
  void close(char bracket) {
    text_ += bracket;
    comma_ = true;
  }
  // A text may come from a peer. One byte that is no UTF-8 would make the whole status unreadable,
  // and a control character could change what a terminal shows, so both become '?'.
  void quote(std::string_view value) {
    text_ += '"';
    for (const char c : base::printable(value)) {
      if (c == '"' || c == '\\') text_ += '\\';
      text_ += c;
    }
    text_ += '"';
  }

  std::string text_;
  bool comma_ = false;
};

}  // namespace petps::server
