// The explorer of the states that a kernel's write-back leaves of a pool with durability
// `process`. It opens each as the same boot (after a kill) or as another one (after a power loss),
// and checks what can be trusted.
//
// After a kill nothing acknowledged is lost. After a power loss, either the pool reports that it
// lost power, or it is as it was last closed. If it reports a power loss and verify finds no
// fault, it is accepted: then each row is one that was written for its key, and every progress
// needs a base.
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

  // Start exploring. Earlier steps are set-up.
  void begin() { exploring_ = true; }
  void before_step(Driver& driver) override;
  void after_step(Driver& driver, const base::Status& status, const World& after) override;

  struct Counts {
    uint64_t states = 0;
    uint64_t killed = 0;
    uint64_t trusted = 0;  // power losses after which the pool opened normally
    uint64_t faulty = 0;   // it reported a power loss, and verify found faults
    uint64_t accepted = 0;
  };
  const Counts& counts() const { return counts_; }
  uint64_t steps() const { return steps_; }
  const std::string& problem() const { return problem_; }

 private:
  void try_power_loss(Driver& live, size_t point, const World& before, const World& after);
  void try_kill(Driver& live, size_t point, const World& before, const World& after);
  // Open the crashed medium as the next boot, and check it.
  void judge(CrashMedium& medium, const Choices& choices, const History& history,
             const std::string& where);
  void accept(CrashMedium& medium, std::unique_ptr<pool::Pool> pool, const Choices& choices,
              const History& history, const std::string& where);
  void crash_accepting(CrashMedium& medium, size_t events, const Choices& choices,
                       const History& history, const std::string& where);
  void continue_life(Driver* driver, const std::string& where);
  void report(const std::string& problem, const std::string& where);

  Budget budget_;
  std::mt19937_64 random_;
  bool exploring_ = false;
  Counts counts_;
  uint64_t steps_ = 0;
  size_t first_ = 0;  // the first event of the explored step
  std::string problem_;
};

// The boot of the machine on which a pool is opened: each power loss leads to another boot.
class Boot {
 public:
  Boot();  // switches to a new boot; the destructor switches back
  ~Boot();
  Boot(const Boot&) = delete;
  Boot& operator=(const Boot&) = delete;

 private:
  uint64_t number_;
};

}  // namespace petps::crash
