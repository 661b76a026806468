// The --name=value arguments of a bench program. Every error prints a message and exits with status
// 2: an argument of another form, a value that is no number or too large, an unknown name.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace petps::bench {

class Arguments {
 public:
  Arguments(int count, char** values);

  // Return the value of argument `name`, or `otherwise` if it was not given.
  std::string text(const std::string& name, const std::string& otherwise);
  uint64_t number(const std::string& name, uint64_t otherwise);
  uint32_t small_number(const std::string& name, uint32_t otherwise);
  // Exit the program if the command line has an argument that text() and number() never read.
  void finish() const;

 private:
  std::map<std::string, std::string> given_;
  std::set<std::string> read_;
};

}  // namespace petps::bench
