// Builds crash states of every step that a driver performs, reopens each, and checks it.
//
// One state: crash, or kill the process, at a point of the step, attach, verify and compare; walk, verify and compare; random further
// steps on the reopened pool, recorded; then two more states of that recording, reopened and compared in the same way.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "driver.h"

namespace petps::crash {

// Random further steps on a reopened pool: mostly rows, sometimes everything else.
void go_on(Driver* driver);

struct Budget {
  uint64_t states_per_step;  // crash states that every explored step gets, at least
};

class Explorer : public Listener {
 public:
  Explorer(Budget budget, uint64_t seed) : budget_(budget), random_(seed) {}

  // Steps before this are set-up and are not explored.
  void begin() { exploring_ = true; }
  void before_step(Driver& driver) override;
  void after_step(Driver& driver, const base::Status& status, const World& after) override;

  uint64_t states() const { return states_; }
  uint64_t steps() const { return steps_; }
  // What the first wrong state was, and how to come back to it; empty when every state was right.
  const std::string& problem() const { return problem_; }

 private:
  // A state that was opened again and written to.
  struct Life {
    World opened_before,
        opened_after;             // what the crash could leave: the choices of the first check
    std::vector<World> reverted;  // what an earlier kill of the live pool lets rows go back to
    bool killed = false;          // by a kill: undrained changes are seen, and may go yet
    size_t open_done = 0;         // events when attach had returned
    std::vector<std::pair<size_t, World>> acknowledged;
  };
  void explore(Driver& driver, const World& before, const World& after);
  void explore_exhaustively(Driver& driver, const World& before, const World& after,
                            uint64_t until);
  // The medium was just crashed, or the process killed: reopens, checks, goes on, crashes again. Undoes the crash.
  void try_state(Driver& driver, const World& before, const World& after, bool killed);
  void live_on(Driver* driver, Life* life, const std::string& where);
  void second_crash(CrashMedium& medium, const Life& life);
  std::unique_ptr<table::Tables> reopen(CrashMedium& medium);
  void report(const std::string& what, const CrashMedium& medium, const std::string& where);

  Budget budget_;
  std::mt19937_64 random_;
  bool exploring_ = false;
  uint64_t states_ = 0;
  uint64_t steps_ = 0;
  std::string problem_;
};

}  // namespace petps::crash
