#include "tests/model/machine.h"

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <unordered_map>
#include <unordered_set>

namespace petps::model {
namespace {

constexpr size_t kLocations = 256;
constexpr size_t kTable = 1024;  // slots of the table of addresses; a power of two
constexpr size_t kMessages = 96;
constexpr size_t kThreads = 4;
constexpr size_t kStackBytes = 128 << 10;
constexpr uint64_t kMaxSteps = 20'000;  // of one run; a run with more is in an endless loop
constexpr uint32_t kMaxIdleRounds = 20;
constexpr int kProbes = 400;  // random runs that find the locations which threads share

[[noreturn]] void abort_for_lack_of(const char* resource) {
  std::fprintf(stderr, "the model has too few %s for this scenario\n", resource);
  std::abort();
}

// For each location, the oldest message that a thread may still see.
struct View {
  std::array<uint8_t, kLocations> oldest{};
  void join(const View& other, size_t locations) {
    for (size_t i = 0; i < locations; ++i) oldest[i] = std::max(oldest[i], other.oldest[i]);
  }
};

struct Message {
  uint64_t value;
  View view;
  bool has_view = false;
};

struct Location {
  uintptr_t address;
  size_t count = 0;
  std::vector<Message> messages = std::vector<Message>(kMessages);
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<std::byte[]> stack = std::make_unique<std::byte[]>(kStackBytes);
  const std::function<void()>* body = nullptr;
  View view;
  bool has_finished = false;
  bool is_waiting = false;
  std::string activity;
};

struct Site {
  std::string name;
  bool spoiled = false;
};

struct Choice {
  uint32_t taken;
  uint32_t count;
};

bool acquires(std::memory_order order) {
  return order == std::memory_order_acquire || order == std::memory_order_acq_rel ||
         order == std::memory_order_seq_cst;
}
bool releases(std::memory_order order) {
  return order == std::memory_order_release || order == std::memory_order_acq_rel ||
         order == std::memory_order_seq_cst;
}

// Return the ways to spoil a read-modify-write of this order.
std::vector<Spoil> spoils_of(std::memory_order order) {
  std::vector<Spoil> spoils;
  if (acquires(order)) spoils.push_back(Spoil::kNoAcquire);
  if (releases(order)) spoils.push_back(Spoil::kNoRelease);
  return spoils;
}

std::string site_name(const Where& where, const char* kind) {
  std::string file = where.file_name();
  file = file.substr(file.rfind('/') + 1);
  std::string function = where.function_name();
  function = function.substr(0, function.find('('));
  function = function.substr(function.rfind(':') + 1);
  function = function.substr(function.rfind(' ') + 1);
  return file + ":" + function + " line " + std::to_string(where.line()) + "." +
         std::to_string(where.column()) + " " + kind;
}

class Machine {
 public:
  Result explore(const Scenario& scenario, const Bounds& bounds,
                 const std::optional<Mutation>& mutation);

  uint64_t load(const void* at, size_t bytes, std::memory_order order, const Where& where);
  void store(void* at, size_t bytes, uint64_t value, std::memory_order order, const Where& where);
  bool exchange(void* at, size_t bytes, uint64_t* expected, uint64_t value, std::memory_order order,
                const Where& where);
  uint64_t add(void* at, uint64_t by, std::memory_order order, const Where& where);
  void fence(const Where& where);
  void wait();
  void fail(const std::string& problem);
  void note(const std::string& activity) {
    if (running_) threads_[current_].activity = activity;
  }
  bool running() const { return running_; }

 private:
  void run(const Scenario& scenario);
  static void enter();
  void finish_thread();
  uint32_t choose(uint32_t count);
  bool next_combination();
  void find_contended();
  void before_step(uintptr_t word, bool writes);
  void switch_to(size_t thread);
  void abandon(const std::string& problem);
  std::vector<size_t> runnable(bool others_only) const;
  void wake_waiting();
  Location& location(const void* at, size_t* number);
  const Message& load_newest(const void* at, std::memory_order order, const Site& here,
                             size_t* number);
  void append(size_t number, uint64_t value, bool release, const Message* replaced);
  const Site& site(const Where& where, const char* kind, std::vector<Spoil> spoils);
  bool spoiled(const Site& site, Spoil how) const {
    return site.spoiled && mutation_->spoil == how;
  }

  // State of one exploration.
  Bounds bounds_;
  bool fixed_addresses_ = true;
  std::optional<Mutation> mutation_;
  Result* result_ = nullptr;
  std::unordered_map<uint64_t, Site> sites_;
  std::vector<Choice> trail_;
  std::mt19937_64* random_ = nullptr;  // makes the choices of the probing runs; else null
  struct Use {
    uint32_t readers = 0;  // one bit for each thread
    uint32_t writers = 0;
  };
  std::unordered_map<uintptr_t, Use> used_;
  std::unordered_set<uintptr_t> contended_;

  // State of one run.
  std::array<Thread, kThreads> threads_;
  size_t thread_count_ = 0;
  size_t current_ = 0;
  bool running_ = false;
  bool failed_ = false;
  size_t depth_ = 0;  // the next choice in trail_
  uint32_t preemptions_ = 0;
  uint32_t old_loads_ = 0;
  uint32_t idle_rounds_ = 0;
  uint64_t steps_ = 0;
  ucontext_t main_;
  std::vector<Location> locations_ = std::vector<Location>(kLocations);
  size_t location_count_ = 0;
  std::array<uint16_t, kTable> table_{};  // location number + 1; 0: free
  View fences_;
};

Machine g_machine;

// ---- the threads ----

void Machine::enter() {
  Thread& thread = g_machine.threads_[g_machine.current_];
  (*thread.body)();
  g_machine.finish_thread();
}

void Machine::finish_thread() {
  threads_[current_].has_finished = true;
  wake_waiting();
  const std::vector<size_t> next = runnable(true);
  if (next.empty()) {
    const bool all = std::all_of(threads_.begin(), threads_.begin() + thread_count_,
                                 [](const Thread& thread) { return thread.has_finished; });
    if (!all) abandon("no thread can continue");
    setcontext(&main_);
  }
  current_ = next[choose(static_cast<uint32_t>(next.size()))];
  setcontext(&threads_[current_].context);
}

std::vector<size_t> Machine::runnable(bool others_only) const {
  std::vector<size_t> result;
  for (size_t t = 0; t < thread_count_; ++t) {
    if (!threads_[t].has_finished && !threads_[t].is_waiting && !(others_only && t == current_))
      result.push_back(t);
  }
  return result;
}

void Machine::switch_to(size_t thread) {
  const size_t from = current_;
  current_ = thread;
  swapcontext(&threads_[from].context, &threads_[thread].context);
}

// Stop the run at once. The objects on the stacks of its threads are not destroyed.
void Machine::abandon(const std::string& problem) {
  fail(problem);
  setcontext(&main_);
}

void Machine::wake_waiting() {
  idle_rounds_ = 0;
  for (size_t t = 0; t < thread_count_; ++t) threads_[t].is_waiting = false;
}

void Machine::wait() {
  if (!running_) return;
  threads_[current_].is_waiting = true;
  std::vector<size_t> next = runnable(true);
  if (next.empty()) {
    // The waiting threads may have loaded old values: let them load again, a limited number of
    // times.
    if (++idle_rounds_ > kMaxIdleRounds) abandon("all threads wait for one another");
    for (size_t t = 0; t < thread_count_; ++t) threads_[t].is_waiting = false;
    next = runnable(false);
  }
  const size_t chosen = next[choose(static_cast<uint32_t>(next.size()))];
  if (chosen != current_) switch_to(chosen);
}

void Machine::before_step(uintptr_t word, bool writes) {
  if (++steps_ > kMaxSteps)
    abandon("a run of " + std::to_string(steps_) + " steps does not finish");
  Use& use = used_[word];
  (writes ? use.writers : use.readers) |= 1u << current_;
  if (preemptions_ >= bounds_.preemptions) return;
  if (random_ == nullptr && fixed_addresses_ && !contended_.contains(word)) return;
  const std::vector<size_t> others = runnable(true);
  if (others.empty()) return;
  const uint32_t choice = choose(1 + static_cast<uint32_t>(others.size()));
  if (choice == 0) return;
  preemptions_ += 1;
  switch_to(others[choice - 1]);
}

// ---- choices ----

uint32_t Machine::choose(uint32_t count) {
  if (count < 2) return 0;
  if (random_ != nullptr)
    return (*random_)() % 8 == 0 ? static_cast<uint32_t>((*random_)() % count) : 0;
  if (depth_ == trail_.size()) trail_.push_back({0, count});
  if (trail_[depth_].count != count) abort_for_lack_of("repeatable choices");
  return trail_[depth_++].taken;
}

bool Machine::next_combination() {
  while (!trail_.empty() && trail_.back().taken + 1 == trail_.back().count) trail_.pop_back();
  if (trail_.empty()) return false;
  trail_.back().taken += 1;
  return true;
}

void Machine::fail(const std::string& problem) {
  if (failed_) return;
  failed_ = true;
  result_->failure = problem;
  for (size_t t = 0; t < thread_count_; ++t)
    result_->trace.push_back("thread " + std::to_string(t) + ": " + threads_[t].activity);
}

// ---- memory ----

Location& Machine::location(const void* at, size_t* number) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(at) & ~uintptr_t{7};
  size_t slot = (address >> 3) * 0x9E3779B97F4A7C15 >> 54;
  while (table_[slot] != 0 && locations_[table_[slot] - 1].address != address)
    slot = (slot + 1) % kTable;
  if (table_[slot] == 0) {
    if (location_count_ == kLocations) abort_for_lack_of("locations");
    Location& fresh = locations_[location_count_++];
    table_[slot] = static_cast<uint16_t>(location_count_);
    fresh.address = address;
    fresh.count = 1;
    std::memcpy(&fresh.messages[0].value, reinterpret_cast<const void*>(address), 8);
    fresh.messages[0].has_view = false;
  }
  *number = table_[slot] - 1u;
  return locations_[*number];
}

// Return the `bytes` bytes of the word that `at` points to.
uint64_t read_part(uint64_t word, const void* at, size_t bytes) {
  const size_t shift = reinterpret_cast<uintptr_t>(at) % 8 * 8;
  return bytes == 8 ? word : (word >> shift) & 0xFF;
}
uint64_t merge(uint64_t word, const void* at, size_t bytes, uint64_t value) {
  const size_t shift = reinterpret_cast<uintptr_t>(at) % 8 * 8;
  return bytes == 8 ? value : (word & ~(uint64_t{0xFF} << shift)) | (value & 0xFF) << shift;
}

void Machine::append(size_t number, uint64_t value, bool release, const Message* replaced) {
  Location& at = locations_[number];
  if (at.count == kMessages) abort_for_lack_of("values of one location");
  Thread& thread = threads_[current_];
  Message& message = at.messages[at.count];
  message.value = value;
  message.has_view = release || (replaced != nullptr && replaced->has_view);
  if (message.has_view) {
    message.view = release ? thread.view : View{};
    if (replaced != nullptr && replaced->has_view)
      message.view.join(replaced->view, location_count_);
    message.view.oldest[number] = static_cast<uint8_t>(at.count);
  }
  thread.view.oldest[number] = static_cast<uint8_t>(at.count);
  at.count += 1;
  std::memcpy(reinterpret_cast<void*>(at.address), &value, 8);
  wake_waiting();
}

const Site& Machine::site(const Where& where, const char* kind, std::vector<Spoil> spoils) {
  const uint64_t id = reinterpret_cast<uintptr_t>(where.function_name()) * 31 +
                      where.line() * 4096u + where.column();
  auto [at, fresh] = sites_.try_emplace(id);
  if (fresh && where.line() != 0) {
    at->second.name = site_name(where, kind);
    at->second.spoiled = mutation_ && mutation_->site == at->second.name;
    result_->sites[at->second.name] = std::move(spoils);
  }
  return at->second;
}

uint64_t Machine::load(const void* at, size_t bytes, std::memory_order order, const Where& where) {
  before_step(reinterpret_cast<uintptr_t>(at) / 8, false);
  const Site& here =
      site(where, "load", acquires(order) ? std::vector{Spoil::kNoAcquire} : std::vector<Spoil>{});
  size_t number;
  const Location& from = location(at, &number);
  Thread& thread = threads_[current_];
  const size_t newest = from.count - 1;
  size_t taken = newest;
  const size_t older = newest - thread.view.oldest[number];
  if (older != 0 && old_loads_ < bounds_.old_loads) {
    const uint32_t back = choose(1 + static_cast<uint32_t>(older));
    if (back != 0) old_loads_ += 1;
    taken -= back;
  }
  const Message& message = from.messages[taken];
  thread.view.oldest[number] = static_cast<uint8_t>(taken);
  if (acquires(order) && message.has_view && !spoiled(here, Spoil::kNoAcquire))
    thread.view.join(message.view, location_count_);
  return read_part(message.value, at, bytes);
}

void Machine::store(void* at, size_t bytes, uint64_t value, std::memory_order order,
                    const Where& where) {
  before_step(reinterpret_cast<uintptr_t>(at) / 8, true);
  const Site& here = site(where, "store",
                          releases(order) ? std::vector{Spoil::kNoRelease, Spoil::kNoStore}
                                          : std::vector{Spoil::kNoStore});
  if (spoiled(here, Spoil::kNoStore)) return;
  size_t number;
  const Location& to = location(at, &number);
  const uint64_t word = to.messages[to.count - 1].value;
  append(number, merge(word, at, bytes, value),
         releases(order) && !spoiled(here, Spoil::kNoRelease), nullptr);
}

// Load the newest value of a location, as a read-modify-write does.
const Message& Machine::load_newest(const void* at, std::memory_order order, const Site& here,
                                    size_t* number) {
  const Location& from = location(at, number);
  const Message& newest = from.messages[from.count - 1];
  Thread& thread = threads_[current_];
  thread.view.oldest[*number] = static_cast<uint8_t>(from.count - 1);
  if (acquires(order) && newest.has_view && !spoiled(here, Spoil::kNoAcquire))
    thread.view.join(newest.view, location_count_);
  return newest;
}

bool Machine::exchange(void* at, size_t bytes, uint64_t* expected, uint64_t value,
                       std::memory_order order, const Where& where) {
  before_step(reinterpret_cast<uintptr_t>(at) / 8, true);
  const Site& here = site(where, "exchange", spoils_of(order));
  size_t number;
  const Message& newest = load_newest(at, order, here, &number);
  const uint64_t seen = read_part(newest.value, at, bytes);
  if (seen != *expected) {
    *expected = seen;
    return false;
  }
  append(number, merge(newest.value, at, bytes, value),
         releases(order) && !spoiled(here, Spoil::kNoRelease), &newest);
  return true;
}

uint64_t Machine::add(void* at, uint64_t by, std::memory_order order, const Where& where) {
  before_step(reinterpret_cast<uintptr_t>(at) / 8, true);
  const Site& here = site(where, "add", spoils_of(order));
  size_t number;
  const Message& newest = load_newest(at, order, here, &number);
  const uint64_t before = newest.value;
  append(number, before + by, releases(order) && !spoiled(here, Spoil::kNoRelease), &newest);
  return before;
}

void Machine::fence(const Where& where) {
  if (++steps_ > kMaxSteps) abandon("a run does not finish");
  const Site& here = site(where, "fence", {Spoil::kNoFence});
  if (spoiled(here, Spoil::kNoFence)) return;
  Thread& thread = threads_[current_];
  thread.view.join(fences_, location_count_);
  fences_ = thread.view;
}

// ---- exploration ----

void Machine::run(const Scenario& scenario) {
  scenario.setup();
  table_.fill(0);
  location_count_ = 0;
  fences_ = View{};
  preemptions_ = old_loads_ = idle_rounds_ = 0;
  steps_ = 0;
  depth_ = 0;
  failed_ = false;
  thread_count_ = scenario.threads.size();
  for (size_t t = 0; t < thread_count_; ++t) {
    Thread& thread = threads_[t];
    thread.body = &scenario.threads[t];
    thread.view = View{};
    thread.has_finished = thread.is_waiting = false;
    thread.activity.clear();
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, &Machine::enter, 0);
  }
  current_ = 0;
  running_ = true;
  current_ = choose(static_cast<uint32_t>(thread_count_));
  swapcontext(&main_, &threads_[current_].context);
  running_ = false;
  if (!failed_) scenario.check();
}

// Add the locations that at least two threads accessed and at least one of them wrote.
void Machine::find_contended() {
  for (const auto& [word, use] : used_) {
    const uint32_t all = use.readers | use.writers;
    if (use.writers != 0 && (all & (all - 1)) != 0) contended_.insert(word);
  }
}

Result Machine::explore(const Scenario& scenario, const Bounds& bounds,
                        const std::optional<Mutation>& mutation) {
  Result result;
  result_ = &result;
  bounds_ = bounds;
  mutation_ = mutation;
  fixed_addresses_ = scenario.fixed_addresses;
  sites_.clear();
  used_.clear();
  contended_.clear();
  // The machine must preempt a thread only before it accesses a contended location: one that at
  // least two threads access and at least one of them writes. Random runs find these locations. If
  // the exploration finds more of them, it starts again.
  std::mt19937_64 random(1);
  random_ = &random;
  for (int i = 0; i < kProbes && result.failure.empty(); ++i) {
    run(scenario);
    result.runs += 1;
  }
  random_ = nullptr;
  const bool reached = !mutation_ || result.sites.contains(mutation_->site);
  for (bool more = reached; more && result.failure.empty();) {
    find_contended();
    const size_t known = contended_.size();
    trail_.clear();
    do {
      run(scenario);
      result.runs += 1;
      if (!result.failure.empty() || result.runs >= bounds.runs) break;
    } while (next_combination());
    result.complete = trail_.empty();
    if (result.runs >= bounds.runs) break;
    find_contended();
    more = fixed_addresses_ && contended_.size() > known;
  }
  return result;
}

}  // namespace

uint64_t load(const void* at, size_t bytes, std::memory_order order, const Where& where) {
  if (g_machine.running()) return g_machine.load(at, bytes, order, where);
  uint64_t value = 0;
  std::memcpy(&value, at, bytes);
  return value;
}

void store(void* at, size_t bytes, uint64_t value, std::memory_order order, const Where& where) {
  if (g_machine.running()) return g_machine.store(at, bytes, value, order, where);
  std::memcpy(at, &value, bytes);
}

bool exchange(void* at, size_t bytes, uint64_t* expected, uint64_t value, std::memory_order order,
              const Where& where) {
  if (g_machine.running()) return g_machine.exchange(at, bytes, expected, value, order, where);
  uint64_t seen = 0;
  std::memcpy(&seen, at, bytes);
  const bool same = seen == *expected;
  *expected = seen;
  if (same) std::memcpy(at, &value, bytes);
  return same;
}

uint64_t add(void* at, uint64_t by, std::memory_order order, const Where& where) {
  if (g_machine.running()) return g_machine.add(at, by, order, where);
  uint64_t value;
  std::memcpy(&value, at, 8);
  const uint64_t sum = value + by;
  std::memcpy(at, &sum, 8);
  return value;
}

void fence(const Where& where) {
  if (g_machine.running()) g_machine.fence(where);
}
void wait() { g_machine.wait(); }
void fail(const std::string& problem) { g_machine.fail(problem); }
void note(const std::string& activity) { g_machine.note(activity); }

std::string to_string(Spoil spoil) {
  switch (spoil) {
    case Spoil::kNoAcquire:
      return "does not acquire";
    case Spoil::kNoRelease:
      return "does not release";
    case Spoil::kNoStore:
      return "is left out";
    default:
      return "is no fence";
  }
}

Result explore(const Scenario& scenario, const Bounds& bounds,
               const std::optional<Mutation>& mutation) {
  return g_machine.explore(scenario, bounds, mutation);
}

}  // namespace petps::model
