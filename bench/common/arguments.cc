#include "bench/common/arguments.h"

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace petps::bench {

namespace {

[[noreturn]] void refuse(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::exit(2);
}

}  // namespace

Arguments::Arguments(int count, char** values) {
  for (int i = 1; i < count; ++i) {
    const std::string argument = values[i];
    const size_t equals = argument.find('=');
    if (argument.rfind("--", 0) != 0 || equals == std::string::npos) {
      refuse("'" + argument + "' must have the form --name=value");
    }
    given_[argument.substr(2, equals - 2)] = argument.substr(equals + 1);
  }
}

std::string Arguments::text(const std::string& name, const std::string& otherwise) {
  read_.insert(name);
  const auto argument = given_.find(name);
  return argument == given_.end() ? otherwise : argument->second;
}

uint64_t Arguments::number(const std::string& name, uint64_t otherwise) {
  const std::string value = text(name, "");
  if (value.empty()) return otherwise;
  uint64_t number = 0;
  const char* end = value.data() + value.size();
  const auto read = std::from_chars(value.data(), end, number);
  if (read.ec != std::errc() || read.ptr != end) {
    refuse("--" + name + "=" + value + " is not a whole number from 0 to 2^64 - 1");
  }
  return number;
}

uint32_t Arguments::small_number(const std::string& name, uint32_t otherwise) {
  const uint64_t value = number(name, otherwise);
  if (value > UINT32_MAX) refuse("--" + name + " must be below 2^32");
  return static_cast<uint32_t>(value);
}

void Arguments::finish() const {
  for (const auto& [name, value] : given_) {
    if (!read_.contains(name))
      refuse("--" + name + "=" + value + " is not an argument of this program");
  }
}

}  // namespace petps::bench
