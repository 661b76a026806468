// Locks of a table's writers, by ranges of keys. Part of room table.
//
// Keys are divided by ranges of their home buckets. From plan to second drain, the keys of a
// range have one writer. Otherwise a key that one batch erased but not yet drained could come
// back beside its new entry after a power cut. A single writer takes all ranges at once. Beside
// other writers it takes one range at a time, whichever is free, so that batches are applied in
// parallel.
#pragma once

#include <atomic>
#include <bit>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <shared_mutex>

#include "base/pause.h"

namespace petps::table {

inline constexpr size_t kRanges = 4;  // petps/config/schema.py MAX_APPLY_THREADS
inline constexpr uint32_t kAllRanges = (1u << kRanges) - 1;

class RangeLocks {
  struct Nothing {
    void operator()() const {}
  };

 public:
  // Count a writer in, before its first take; leave() counts it out, after its last give. Return
  // its number among the present writers.
  uint32_t enter() { return writers_.fetch_add(1, std::memory_order_relaxed); }
  void leave() { writers_.fetch_sub(1, std::memory_order_relaxed); }
  bool alone() const { return writers_.load(std::memory_order_relaxed) == 1; }

  // If the caller must sleep, call before_sleep() first, without a lock: a holder of a range may
  // wait for what the caller keeps.
  template <typename BeforeSleep = Nothing>
  void take_all(const BeforeSleep& before_sleep = {}) {
    const auto free = [this] { return busy_.load(std::memory_order_relaxed) == 0; };
    spin(free);
    std::unique_lock lock(mutex_);
    all_wanted_ += 1;
    wait(lock, free, before_sleep);
    all_wanted_ -= 1;
    busy_.store(kAllRanges, std::memory_order_relaxed);
  }
  // Take one of the `wanted` ranges, as soon as one is free, and return it. Writers with odd
  // numbers begin at the other end, so that two of them rarely want the same range. A writer that
  // waits for all ranges goes first. before_sleep: see take_all.
  template <typename BeforeSleep = Nothing>
  size_t take_one(uint32_t wanted, uint32_t writer, const BeforeSleep& before_sleep = {}) {
    const auto open = [&] { return wanted & ~busy_.load(std::memory_order_relaxed); };
    spin([&] { return open() != 0; });
    std::unique_lock lock(mutex_);
    wait(
        lock, [&] { return all_wanted_ == 0 && open() != 0; }, before_sleep);
    const int range = writer % 2 == 0 ? std::countr_zero(open()) : 31 - std::countl_zero(open());
    busy_.fetch_or(1u << range, std::memory_order_relaxed);
    return static_cast<size_t>(range);
  }
  void give(uint32_t ranges) {
    std::lock_guard lock(mutex_);
    busy_.fetch_and(~ranges, std::memory_order_relaxed);
    if (waiting_ != 0) given_.notify_all();
  }

 private:
  // Spin before sleeping: a range is held for about 30 us, as long as a sleep and a wake-up take.
  template <typename Free>
  static void spin(Free is_free) {
    constexpr int kSpins = 2000;
    for (int i = 0; i < kSpins && !is_free(); ++i) base::pause();
  }

  template <typename Ready, typename BeforeSleep>
  void wait(std::unique_lock<std::mutex>& lock, const Ready& ready,
            const BeforeSleep& before_sleep) {
    if (ready()) return;
    lock.unlock();
    before_sleep();
    lock.lock();
    waiting_ += 1;
    given_.wait(lock, ready);
    waiting_ -= 1;
  }

  std::mutex mutex_;  // orders what successive holders of a range do
  std::condition_variable given_;
  std::atomic<uint32_t> writers_{0};
  std::atomic<uint32_t> busy_{0};  // changes under mutex_
  uint32_t waiting_ = 0;
  uint32_t all_wanted_ = 0;
};

// Turns of the writers that take one range at a time. Only as many have a turn at once as can run,
// and as there are ranges: more would sleep and wake each other at every range. In order of
// arrival.
class Turns {
 public:
  explicit Turns(uint32_t most) : left_(most) {}
  void lock() {
    std::unique_lock lock(mutex_);
    if (left_ > 0) {
      left_ -= 1;
      return;
    }
    Waiting me;
    waiting_.push_back(&me);
    me.given.wait(lock, [&] { return me.has_turn; });
  }
  void unlock() {
    std::lock_guard lock(mutex_);
    if (waiting_.empty()) {
      left_ += 1;
      return;
    }
    Waiting& next = *waiting_.front();
    waiting_.pop_front();
    next.has_turn = true;
    next.given.notify_one();
  }
  size_t waiting() {
    std::lock_guard lock(mutex_);
    return waiting_.size();
  }

 private:
  struct Waiting {
    std::condition_variable given;
    bool has_turn = false;
  };
  std::mutex mutex_;
  std::deque<Waiting*> waiting_;
  uint32_t left_;
};

// A shared_mutex whose exclusive side is not starved by an endless chain of overlapping shared
// holders.
class Gate {
 public:
  void lock() {
    std::lock_guard first(turnstile_);
    mutex_.lock();
  }
  void unlock() { mutex_.unlock(); }
  void lock_shared() {
    { std::lock_guard first(turnstile_); }
    mutex_.lock_shared();
  }
  void unlock_shared() { mutex_.unlock_shared(); }

 private:
  std::mutex turnstile_;
  std::shared_mutex mutex_;
};

// A gate between moves of entries and the batches and scans. A move waits for the batches in
// flight; a batch and a scan wait for the move in progress. No move waits for a scan: the scanning
// thread may wait for a batch, and that batch would wait for the move.
class MovesGate {
 public:
  // Begin a move. Return false while a scan is open.
  bool try_lock() {
    std::lock_guard first(mutex_);
    if (scans_ != 0) return false;
    gate_.lock();
    return true;
  }
  void unlock() { gate_.unlock(); }
  bool has_scan() {
    std::lock_guard lock(mutex_);
    return scans_ != 0;
  }

  // Begin a batch, from search to publish.
  void lock_shared() { gate_.lock_shared(); }
  void unlock_shared() { gate_.unlock_shared(); }

  // Begin a scan. Another thread may end it.
  void begin_scan() {
    std::lock_guard first(mutex_);
    scans_ += 1;
    std::shared_lock wait_for_move(gate_);
  }
  void end_scan() {
    std::lock_guard first(mutex_);
    scans_ -= 1;
  }

 private:
  std::mutex mutex_;
  uint64_t scans_ = 0;
  Gate gate_;
};

}  // namespace petps::table
