// lab_pool COMMAND PATH ...: operations on a pool whose file system fails. See commands.h.
#include <cstdio>
#include <cstdlib>

#include "commands.h"
#include "media/bus_error.h"

namespace {

using namespace petps::lab;

uint64_t number(const char* text) { return std::strtoull(text, nullptr, 10); }

int usage() {
  std::fputs(
      "lab_pool steps PATH power|process|changing SEED\n"
      "lab_pool check-steps PATH power|process|changing SEED ACKNOWLEDGED\n"
      "lab_pool make PATH power|process TABLES ROWS\n"
      "lab_pool write PATH ROWS FIRST LAST\n"
      "lab_pool grow PATH ROWS\n"
      "lab_pool write-until-refused PATH ROWS\n"
      "lab_pool check PATH ROWS ROUND...\n",
      stderr);
  return 2;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) return usage();
  petps::media::stop_on_lost_pool();
  const std::string command = arguments[1];
  petps::table::TablesOptions options;
  options.background = false;
  options.pool.media.path = arguments[2];
  options.pool.unit_bytes = petps::pool::kTestUnitBytes;
  const auto regime = petps::lab::regime_of(arguments[3]);
  if (regime == Regime::kProcess)
    options.pool.media.durability = petps::media::Durability::kProcess;
  if (command == "steps" && count == 5 && regime.has_value())
    return perform_steps(options, number(arguments[4]), *regime);
  if (command == "check-steps" && count == 6 && regime.has_value())
    return check_steps(options, number(arguments[4]), *regime, number(arguments[5]));
  if (command == "make" && count == 6 && regime.has_value())
    return make_rounds(options, number(arguments[4]), number(arguments[5]));
  if (command == "write" && count == 6)
    return write_rounds(options, number(arguments[3]), number(arguments[4]), number(arguments[5]));
  if (command == "grow" && count == 4) return grow_rounds(options, number(arguments[3]));
  if (command == "write-until-refused" && count == 4)
    return write_until_refused(options, number(arguments[3]));
  if (command != "check" || count < 5) return usage();
  std::vector<uint64_t> rounds;
  for (int i = 4; i < count; ++i) rounds.push_back(number(arguments[i]));
  return check_rounds(options, number(arguments[3]), rounds);
}
