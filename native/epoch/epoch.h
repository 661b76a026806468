// Room epoch: when may a replaced row's slot be used again.
//
// Owns:         the global epoch, every reader's epoch list, Pin, the queue of retired items, the
//               file that shares epoch and pins with other processes.
// Never does:   know what an item is; free anything that a live Pin may still read; assert on a
//               full list.
// Called by:    table and server take pins; table retires and reclaims; transport drops pins by
//               completion.
// Invariants:   a Pin is taken before the first index read and dropped when nothing reads the rows
//               any more, in any order, on any thread; retire(x) comes after x left the index; x is
//               reclaimed only when every live pin's epoch is greater than x's.
// Threads:      a Reader's pin() is called by one thread at a time; Pins may be dropped by any
//               thread; Domain is shared.
//
// EPOCH.md beside this file is the essay: why it is right, what it costs, what was rejected.
// READERS.md: pins of other processes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/atomics.h"
#include "epoch/readers_file.h"

namespace petps::epoch {

inline constexpr size_t kMaxReaders = 1024;  // worker threads and in-process callers of one pool

// One read in progress. Move-only; dropping it is one store.
class Pin {
 public:
  Pin() = default;
  explicit Pin(base::Atomic<uint64_t>* place) : place_(place) {}
  Pin(Pin&& other) noexcept : place_(std::exchange(other.place_, nullptr)) {}
  Pin& operator=(Pin&& other) noexcept {
    if (this != &other) {
      drop();
      place_ = std::exchange(other.place_, nullptr);
    }
    return *this;
  }
  ~Pin() { drop(); }
  explicit operator bool() const {
    return place_ != nullptr;
  }  // false: the list was full, try again later
  void drop() {
    if (place_ != nullptr) std::exchange(place_, nullptr)->store(0, std::memory_order_release);
  }

 private:
  base::Atomic<uint64_t>* place_ = nullptr;
};

class Domain;

// One reader thread's epoch list.
class Reader {
 public:
  // A Pin at the current epoch; an empty one when kPinsPerReader are live.
  Pin pin();
  size_t live() const;

 private:
  friend class Domain;
  Reader(const Domain& domain, std::unique_ptr<Places> own)
      : domain_(&domain), own_(std::move(own)), places_(own_.get()) {}
  Reader(const Domain& domain, Places* outside) : domain_(&domain), places_(outside) {}
  Pin claim(size_t place);

  const Domain* domain_;
  bool leased_ = false;          // guarded by Domain::mutex_
  size_t next_ = 0;              // where pin() looks first
  std::unique_ptr<Places> own_;  // null: the list stands in the readers file
  Places* places_;
};

// Receives what nobody can read any more. Called with no Domain lock held, by whichever thread
// calls Domain::reclaim(): by two at once, with different items, when two do.
class Reclaimer {
 public:
  virtual ~Reclaimer() = default;
  virtual void reclaim(std::span<const uint64_t> items) = 0;
};

class Domain {
 public:
  Domain();
  // Readers and Pins must be gone. What is still queued is forgotten, as after a crash.
  ~Domain();
  Domain(const Domain&) = delete;
  Domain& operator=(const Domain&) = delete;

  // Shares the epoch with other processes. Before the first lease. A server's side then heeds their
  // pins, a reader's side leases lists that the server sees.
  void share(std::unique_ptr<ReadersFile> file);
  ReadersFile* shared() const { return file_.get(); }
  // Server's side: whether another process holds a pin; one that is older than share(): that may
  // read what no index has any more.
  bool outside_pins() { return oldest_outside() != ~uint64_t{0}; }
  bool earlier_pins() { return oldest_outside() <= shared_at_; }

  // A Reader for a thread or a caller; null when kMaxReaders are leased. Its list may outlive the
  // lease's end only empty: release() waits for no pin, so drop pins first or let completions do
  // it; a list with live pins is not reused.
  Reader* lease();
  void release(Reader* reader);

  // Queues items that have left the index. One epoch step per call.
  void retire(Reclaimer& owner, std::span<const uint64_t> items);
  // Hands to their owners the items that every live pin is newer than. Returns how many.
  size_t reclaim();

  uint64_t current() const { return global_->load(std::memory_order_acquire); }
  uint64_t oldest() const;         // smallest live epoch, or current() + 1 when there is none
  uint64_t retired_items() const;  // waiting
  // Test-only: makes every Pin empty of protection, to show that the concurrency suites see the
  // fault.
  void disable_pins_for_test();

 private:
  friend class Reader;
  struct Batch {
    uint64_t epoch;
    Reclaimer* owner;
    std::vector<uint64_t> items;
  };
  uint64_t oldest_locked() const;
  uint64_t oldest_outside();

  std::unique_ptr<ReadersFile> file_;  // null: no other process
  base::Atomic<uint64_t> own_global_{1};
  base::Atomic<uint64_t>* global_ = &own_global_;
  uint64_t shared_at_ = 0;       // the epoch of share()
  uint64_t dead_looked_ns_ = 0;  // guarded by mutex_
  base::Atomic<bool> pins_disabled_{false};
  mutable base::Mutex mutex_;  // guards queue_ (ordered by epoch), readers_ and their leases
  std::deque<Batch> queue_;
  std::vector<std::unique_ptr<Reader>> readers_;
};

}  // namespace petps::epoch
