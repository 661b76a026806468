// The replacement of base/atomics.h in the program tests/model: each access is a step of the
// Machine. A site is the place in the source that makes the access; `where` identifies it.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <source_location>

#include "tests/model/machine.h"

namespace petps::base {

using Where = std::source_location;

inline uint64_t load64(const uint64_t& at, Where where = Where::current()) {
  return model::load(&at, 8, std::memory_order_acquire, where);
}
inline void store64(uint64_t& at, uint64_t value, Where where = Where::current()) {
  model::store(&at, 8, value, std::memory_order_release, where);
}
inline uint8_t load8(const uint8_t& at, Where where = Where::current()) {
  return static_cast<uint8_t>(model::load(&at, 1, std::memory_order_acquire, where));
}
inline void store8(uint8_t& at, uint8_t value, Where where = Where::current()) {
  model::store(&at, 1, value, std::memory_order_release, where);
}
inline bool exchange64(uint64_t& at, uint64_t& expected, uint64_t value,
                       Where where = Where::current()) {
  return model::exchange(&at, 8, &expected, value, std::memory_order_acq_rel, where);
}
inline bool exchange8(uint8_t& at, uint8_t& expected, uint8_t value,
                      Where where = Where::current()) {
  uint64_t wide = expected;
  const bool stored = model::exchange(&at, 1, &wide, value, std::memory_order_acq_rel, where);
  expected = static_cast<uint8_t>(wide);
  return stored;
}

inline void fence_seq_cst(Where where = Where::current()) { model::fence(where); }
inline void pause() { model::wait(); }
inline void yield() { model::wait(); }

// A replacement of std::atomic for types of up to eight bytes; each object has a word of its own.
template <typename T>
class Atomic {
 public:
  static constexpr bool is_always_lock_free = true;
  Atomic() = default;
  Atomic(T value) : value_(static_cast<uint64_t>(value)) {}  // implicit, as in std::atomic
  Atomic(const Atomic&) = delete;
  Atomic& operator=(const Atomic&) = delete;

  T load(std::memory_order order = std::memory_order_seq_cst,
         Where where = Where::current()) const {
    return static_cast<T>(model::load(&value_, 8, order, where));
  }
  void store(T value, std::memory_order order = std::memory_order_seq_cst,
             Where where = Where::current()) {
    model::store(&value_, 8, static_cast<uint64_t>(value), order, where);
  }
  T fetch_add(T by, std::memory_order order = std::memory_order_seq_cst,
              Where where = Where::current()) {
    return static_cast<T>(model::add(&value_, static_cast<uint64_t>(by), order, where));
  }
  T fetch_sub(T by, std::memory_order order = std::memory_order_seq_cst,
              Where where = Where::current()) {
    return static_cast<T>(model::add(&value_, ~static_cast<uint64_t>(by) + 1, order, where));
  }
  bool compare_exchange_weak(T& expected, T value,
                             std::memory_order order = std::memory_order_seq_cst,
                             Where where = Where::current()) {
    uint64_t wide = static_cast<uint64_t>(expected);
    const bool stored =
        model::exchange(&value_, 8, &wide, static_cast<uint64_t>(value), order, where);
    expected = static_cast<T>(wide);
    return stored;
  }

 private:
  uint64_t value_ = 0;
};

class Mutex {
 public:
  void lock() {
    uint64_t free = 0;
    while (!model::exchange(&held_, 8, &free, 1, std::memory_order_acquire, model::kNowhere)) {
      free = 0;
      model::wait();
    }
  }
  void unlock() { model::store(&held_, 8, 0, std::memory_order_release, model::kNowhere); }

 private:
  uint64_t held_ = 0;
};

}  // namespace petps::base
