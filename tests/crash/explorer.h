// The explorer: builds crash states of every step that a driver performs, reopens each, and
// checks it.
//
// One state: crash, or kill the process, at a point of the step; attach, verify and compare;
// walk, verify and compare; perform random further steps on the reopened pool, recorded. Then
// reopen and compare two more crash states of that recording in the same way.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "driver.h"

namespace petps::crash {

// Perform random further steps on a reopened pool: mostly on rows, sometimes any other kind.
void perform_random_steps(Driver* driver);

struct Budget {
  uint64_t states_per_step;  // the least number of crash states for every explored step
};

class Explorer : public Listener {
 public:
  Explorer(Budget budget, uint64_t seed) : budget_(budget), random_(seed) {}

  // Start exploring. Earlier steps are set-up.
  void begin() { exploring_ = true; }
  void before_step(Driver& driver) override;
  void after_step(Driver& driver, const base::Status& status, const World& after) override;

  uint64_t states() const { return states_; }
  uint64_t steps() const { return steps_; }
  // Return the first wrong state and how to reproduce it; empty if every state was right.
  const std::string& problem() const { return problem_; }

 private:
  // The life of a state that was reopened and written to.
  struct Life {
    // What the crash could leave: the choices of the first check.
    World opened_before, opened_after;
    std::vector<World> reverted;  // what rows may revert to after a kill of the live pool
    bool killed = false;          // by a kill: undrained changes are visible and may still vanish
    size_t open_done = 0;         // number of events when attach returned
    std::vector<std::pair<size_t, World>> acknowledged;
  };
  void explore(Driver& driver, const World& before, const World& after);
  void explore_exhaustively(Driver& driver, const World& before, const World& after,
                            uint64_t until);
  // The medium was just crashed, or the process killed: reopen, check, perform further steps,
  // crash again. Finally undo the crash.
  void try_state(Driver& driver, const World& before, const World& after, bool killed);
  void continue_life(Driver* driver, Life* life, const std::string& where);
  void second_crash(CrashMedium& medium, const Life& life);
  std::unique_ptr<table::Tables> reopen(CrashMedium& medium);
  void report(const std::string& problem, const CrashMedium& medium, const std::string& where);

  Budget budget_;
  std::mt19937_64 random_;
  bool exploring_ = false;
  uint64_t states_ = 0;
  uint64_t steps_ = 0;
  std::string problem_;
};

}  // namespace petps::crash
