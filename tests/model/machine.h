// A machine that runs a few threads step by step, in every order within given bounds, on memory
// that is as weak as C++ allows for release and acquire.
//
// Each access to shared memory is a step. Before a step the machine may preempt the thread. When a
// thread waits or terminates, any other thread may continue. A location keeps every value that was
// stored there, in order. The view of a thread says, for each location, which is the oldest value
// that the thread may still see: a load takes that value or any later one. A release store keeps
// the thread's view beside the value. An acquire load that takes the value adds that view to the
// view of its thread. A read-modify-write takes the newest value, and passes on the view of the
// value that it replaces. A seq_cst fence exchanges views with all earlier fences.
//
// explore() tries every combination of choices within the bounds: a number of preemptions, and a
// number of loads that take an old value. Not modelled: a store that comes earlier in the order of
// its location than a store already made (here a lock, a single writer or read-modify-writes order
// the stores of every location); a torn access of 8 bytes; a value out of thin air; a spurious
// failure of an exchange.
//
// Before and after the threads, in setup and check, the same calls act on plain memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

namespace petps::model {

using Where = std::source_location;
inline constexpr Where kNowhere{};  // marks an access of the test itself: never mutated

uint64_t load(const void* at, size_t bytes, std::memory_order order, const Where& where);
void store(void* at, size_t bytes, uint64_t value, std::memory_order order, const Where& where);
bool exchange(void* at, size_t bytes, uint64_t* expected, uint64_t value, std::memory_order order,
              const Where& where);
uint64_t add(void* at, uint64_t by, std::memory_order order, const Where& where);
void fence(const Where& where);
// Let another thread run. Call it in a loop that waits for another thread's store.
void wait();
// Record that this run is wrong, for the report of explore().
void fail(const std::string& problem);
// Record what this thread is doing, for the trace of a failure.
void note(const std::string& activity);

// Plain accesses of the test, like those to the bytes of a row.
inline uint64_t load_plain(const uint64_t& at) {
  return load(&at, 8, std::memory_order_relaxed, kNowhere);
}
inline void store_plain(uint64_t& at, uint64_t value) {
  store(&at, 8, value, std::memory_order_relaxed, kNowhere);
}

struct Bounds {
  uint32_t preemptions = 3;
  uint32_t old_loads = 2;
  uint64_t runs = UINT64_MAX;  // explore() stops, incomplete, after this number of runs
};

// The threads of a run, and the code before and after them. setup restores all memory that the
// threads change.
struct Scenario {
  std::string name;
  std::function<void()> setup;
  std::vector<std::function<void()>> threads;
  std::function<void()> check = [] {};  // runs after all threads have terminated; may call fail()
  // False: preempt before every step, not only before steps on contended locations.
  bool fixed_addresses = true;
};

// The ways to spoil a site: weaken its order, or leave out its store.
enum class Spoil : uint8_t { kNoAcquire, kNoRelease, kNoStore, kNoFence };
struct Mutation {
  std::string site;  // a name from Result::sites
  Spoil spoil;
};
std::string to_string(Spoil spoil);

struct Result {
  uint64_t runs = 0;
  bool complete = false;           // every combination within the bounds was tried
  std::string failure;             // of the first run that failed; empty: no run failed
  std::vector<std::string> trace;  // what each thread was doing at that failure
  // Every site that a run reached, with the ways to spoil it.
  std::map<std::string, std::vector<Spoil>> sites;
};

Result explore(const Scenario& scenario, const Bounds& bounds,
               const std::optional<Mutation>& mutation = std::nullopt);

}  // namespace petps::model
