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
      refuse("'" + argument + "' is no --name=value");
    }
    given_[argument.substr(2, equals - 2)] = argument.substr(equals + 1);
  }
}

std::string Arguments::text(const std::string& name, const std::string& otherwise) {
  asked_[name] = true;
  const auto found = given_.find(name);
  return found == given_.end() ? otherwise : found->second;
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

void Arguments::finish() const {
  for (const auto& [name, value] : given_) {
    if (!asked_.contains(name))
      refuse("--" + name + "=" + value + " is not an argument of this program");
  }
}

}  // namespace petps::bench
