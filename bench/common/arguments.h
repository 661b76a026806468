// --name=value arguments of a bench program; an unknown one is an error.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace petps::bench {

class Arguments {
 public:
  Arguments(int count, char** values);

  std::string text(const std::string& name, const std::string& otherwise);
  uint64_t number(const std::string& name, uint64_t otherwise);
  // Ends the program when an argument was given that nobody asked for.
  void finish() const;

 private:
  std::map<std::string, std::string> given_;
  std::map<std::string, bool> asked_;
};

}  // namespace petps::bench
