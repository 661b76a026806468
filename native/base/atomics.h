// The only access to memory that threads share without a lock, for the rooms index and epoch.
//
// A normal build uses the plain operations below. The program tests/model compiles the same rooms
// a second time, with PETPS_MODEL_ATOMICS naming a header that defines the same names. There each
// access is a step of a deterministic scheduler, and a load may return any value that its memory
// order allows.
#pragma once

#ifdef PETPS_MODEL_ATOMICS
#include PETPS_MODEL_ATOMICS
#else

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "base/pause.h"

namespace petps::base {

template <typename T>
using Atomic = std::atomic<T>;
using Mutex = std::mutex;

// Access words and bytes of the pool. A load acquires, a store releases.
inline uint64_t load64(const uint64_t& at) {
  return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(at)).load(std::memory_order_acquire);
}
inline void store64(uint64_t& at, uint64_t value) {
  std::atomic_ref<uint64_t>(at).store(value, std::memory_order_release);
}
inline uint8_t load8(const uint8_t& at) {
  return std::atomic_ref<uint8_t>(const_cast<uint8_t&>(at)).load(std::memory_order_acquire);
}
inline void store8(uint8_t& at, uint8_t value) {
  std::atomic_ref<uint8_t>(at).store(value, std::memory_order_release);
}
// Store `value` and return true if `at` holds `expected`. Otherwise set `expected` to what `at`
// holds and return false. exchange8 may also fail spuriously; call it in a loop.
inline bool exchange64(uint64_t& at, uint64_t& expected, uint64_t value) {
  return std::atomic_ref<uint64_t>(at).compare_exchange_strong(
      expected, value, std::memory_order_acq_rel, std::memory_order_acquire);
}
inline bool exchange8(uint8_t& at, uint8_t& expected, uint8_t value) {
  return std::atomic_ref<uint8_t>(at).compare_exchange_weak(
      expected, value, std::memory_order_acq_rel, std::memory_order_acquire);
}

inline void fence_seq_cst() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// For a loop that waits for another thread: give up the time slice. See also base/pause.h.
inline void yield() { sched_yield(); }

}  // namespace petps::base
#endif
