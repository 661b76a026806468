// Builds the states that a kernel's write-back leaves of a pool with durability `process`, opens each as
// the same boot (after a kill) or as another one (after a power loss), and checks what may be believed.
//
// After a kill nothing acknowledged is gone. After a power loss the pool says that it lost power, or it
// is as it was last closed. If it says so and verify finds it clean, it is accepted: then each row is one
// that was written for its key, and every progress needs a base.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>

#include "explorer.h"

namespace petps::crash {

class WritebackExplorer : public Listener {
 public:
  WritebackExplorer(Budget budget, uint64_t seed) : budget_(budget), random_(seed) {}

  // Steps before this are set-up and are not explored.
  void begin() { exploring_ = true; }
  void before_step(Driver& driver) override;
  void after_step(Driver& driver, const base::Status& status, const World& after) override;

  struct Counts {
    uint64_t states = 0;
    uint64_t killed = 0;
    uint64_t believed = 0;  // power losses after which the pool was opened as it is
    uint64_t faulty = 0;    // it said that it lost power, and verify found faults
    uint64_t accepted = 0;
  };
  const Counts& counts() const { return counts_; }
  uint64_t steps() const { return steps_; }
  const std::string& problem() const { return problem_; }

 private:
  void try_power_loss(Driver& live, size_t point, const World& before, const World& after);
  void try_kill(Driver& live, size_t point, const World& before, const World& after);
  // Opens the crashed medium as the next boot, and judges it.
  void judge(CrashMedium& medium, const Choices& choices, const History& history,
             const std::string& where);
  void accept(CrashMedium& medium, std::unique_ptr<pool::Pool> pool, const Choices& choices,
              const History& history, const std::string& where);
  void crash_accepting(CrashMedium& medium, size_t events, const Choices& choices,
                       const History& history, const std::string& where);
  void live_on(Driver* driver, const std::string& where);
  void report(const std::string& what, const std::string& where);

  Budget budget_;
  std::mt19937_64 random_;
  bool exploring_ = false;
  Counts counts_;
  uint64_t steps_ = 0;
  size_t first_ = 0;  // event of the step that is explored
  std::string problem_;
};

// The machine that a pool is opened on: each power loss brings another boot.
class Boot {
 public:
  Boot();  // as the boot of the first
  ~Boot();
  Boot(const Boot&) = delete;
  Boot& operator=(const Boot&) = delete;

 private:
  uint64_t number_;
};

}  // namespace petps::crash
