// Room epoch: decides when the slot of a replaced row may be used again.
//
// Owns:         the global epoch, every reader's epoch list, Pin, the queue of retired items, the
//               file that shares epoch and pins with other processes.
// Never does:   know what an item is; free anything that a live Pin may still read; assert on a
//               full list.
// Called by:    table and server (they take pins); table (retires and reclaims); transport (drops
//               pins on completion).
// Invariants:   A Pin is taken before the first index read. It is dropped when nothing reads the
//               rows any more, in any order and on any thread. retire(x) is called after x has left
//               the index. x is reclaimed only when every live pin's epoch is greater than x's.
// Threads:      one thread at a time calls a Reader's pin(); any thread may drop a Pin; all threads
//               share the Domain.
//
// EPOCH.md gives the proof, the costs and the rejected alternatives. READERS.md describes the pins
// of other processes.
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

// One read in progress. Move-only; drop() is one store.
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
  // Return false if the list was full: retry later.
  explicit operator bool() const { return place_ != nullptr; }
  void drop() {
    if (place_ != nullptr) std::exchange(place_, nullptr)->store(0, std::memory_order_release);
  }

 private:
  base::Atomic<uint64_t>* place_ = nullptr;
};

class Domain;

// The epoch list of one reader thread.
class Reader {
 public:
  // Return a Pin at the current epoch; an empty one if kPinsPerReader are live.
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
  size_t next_ = 0;              // the place that pin() tries first
  std::unique_ptr<Places> own_;  // null: the list is in the readers file
  Places* places_;
};

// The owner of retired items: it receives the items that no thread can read any more. The thread
// that calls Domain::reclaim() calls reclaim() here, with no Domain lock held. If two threads call
// Domain::reclaim(), two calls may run at once, with different items.
class Reclaimer {
 public:
  virtual ~Reclaimer() = default;
  virtual void reclaim(std::span<const uint64_t> items) = 0;
};

class Domain {
 public:
  Domain();
  // The caller has dropped all Pins and uses no Reader any more. Items still in the queue are lost,
  // as after a crash.
  ~Domain();
  Domain(const Domain&) = delete;
  Domain& operator=(const Domain&) = delete;

  // Share the epoch with other processes. Call it before the first lease. From then on the server
  // side respects the pins of the other processes, and the reader side leases lists that the server
  // sees.
  void share(std::unique_ptr<ReadersFile> file);
  ReadersFile* shared() const { return file_.get(); }
  // Server side: return true if another process holds a pin; for earlier_pins, a pin from before
  // share(). Such a pin may protect rows that are in no index any more.
  bool outside_pins() { return oldest_outside() != ~uint64_t{0}; }
  bool earlier_pins() { return oldest_outside() <= shared_at_; }

  // Return a Reader for a thread or a caller; null if kMaxReaders lists exist and none can be
  // leased, or if the readers file has no free record. release() does not wait for pins:
  // completions may drop them later. A list with live pins is still scanned, and is not leased
  // again until it is empty.
  Reader* lease();
  void release(Reader* reader);

  // Queue items that have left the index. Each call steps the epoch once.
  void retire(Reclaimer& owner, std::span<const uint64_t> items);
  // Hand the items whose epoch is smaller than that of every live pin to their owners. Return how
  // many items.
  size_t reclaim();

  uint64_t current() const { return global_->load(std::memory_order_acquire); }
  // Return the smallest live epoch, or current() + 1 if no pin is live.
  uint64_t oldest() const;
  // Return how many items are in the queue.
  uint64_t retired_items() const;
  // Make every Pin protect nothing. For tests: it shows that the concurrency suites see the fault.
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
  uint64_t shared_at_ = 0;        // the epoch at share()
  uint64_t dead_checked_ns_ = 0;  // time of the last drop_dead(); guarded by mutex_
  base::Atomic<bool> pins_disabled_{false};
  mutable base::Mutex mutex_;  // guards queue_ (ordered by epoch), readers_ and their leases
  std::deque<Batch> queue_;
  std::vector<std::unique_ptr<Reader>> readers_;
};

}  // namespace petps::epoch
