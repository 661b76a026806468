// A machine that runs a few threads step by step, in every order that a bound allows, on memory that
// is as weak as C++ allows release and acquire to be.
//
// Each access to shared memory is a step. Before a step the machine may preempt the thread; a thread
// that waits or ends lets any other go on. A location keeps every value that was stored there, in
// order. A thread's view says, for each location, the oldest value that it may still see: a load takes
// that one or any later one. A release store keeps the thread's view beside the value; an acquire load
// that takes it adds that view to its own. A read-modify-write takes the newest value, and passes on
// the view of the one that it replaces. A seq_cst fence exchanges views with all earlier ones.
//
// explore() tries every combination of choices with at most so many preemptions and at most so many
// loads that take an old value. Not modelled: a store that is ordered before one that was made earlier
// (every location here has its stores ordered by a lock, by one writer, or by read-modify-writes), an
// access of 8 bytes that is torn, a value out of thin air, spurious failure of an exchange.
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
inline constexpr Where kNowhere{};  // an access of the harness: never mutated

uint64_t load(const void* at, size_t bytes, std::memory_order order, const Where& where);
void store(void* at, size_t bytes, uint64_t value, std::memory_order order, const Where& where);
bool exchange(void* at, size_t bytes, uint64_t* expected, uint64_t value, std::memory_order order,
              const Where& where);
uint64_t add(void* at, uint64_t by, std::memory_order order, const Where& where);
void fence(const Where& where);
void wait();  // in a loop that needs another thread to store something
// Records what is wrong in this run, for the report of explore().
void fail(const std::string& what);
// What this thread is doing, for the trace of a failure.
void note(const std::string& what);

// Plain accesses of a harness: what a row's bytes are to readers.
inline uint64_t load_plain(const uint64_t& at) {
  return load(&at, 8, std::memory_order_relaxed, kNowhere);
}
inline void store_plain(uint64_t& at, uint64_t value) {
  store(&at, 8, value, std::memory_order_relaxed, kNowhere);
}

struct Bounds {
  uint32_t preemptions = 3;
  uint32_t old_loads = 2;
  uint64_t runs = UINT64_MAX;  // stops, incomplete, after so many
};

// What one run of the threads is made of. setup restores all memory that they change.
struct Scenario {
  std::string name;
  std::function<void()> setup;
  std::vector<std::function<void()>> threads;
  std::function<void()> check = [] {};  // after all have ended; may fail()
  bool fixed_addresses = true;  // false: preempt before every step, not only before contended ones
};

// How a site is spoiled: its order weakened, or its store left out.
enum class Spoil : uint8_t { kNoAcquire, kNoRelease, kNoStore, kNoFence };
struct Mutation {
  std::string site;  // as Result::sites names it
  Spoil spoil;
};
std::string to_string(Spoil spoil);

struct Result {
  uint64_t runs = 0;
  bool complete = false;           // every combination within the bounds was tried
  std::string failure;             // of the first run that failed; empty: none did
  std::vector<std::string> trace;  // its switches and loads of old values
  // Every site that was reached, with the ways to spoil it.
  std::map<std::string, std::vector<Spoil>> sites;
};

Result explore(const Scenario& scenario, const Bounds& bounds,
               const std::optional<Mutation>& mutation = std::nullopt);

}  // namespace petps::model
