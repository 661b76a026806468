// For a loop that waits for another thread: wait for a moment.
#pragma once

namespace petps::base {

inline void pause() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#else
  asm volatile("isb" ::: "memory");  // "yield" returns at once on most processors
#endif
}

}  // namespace petps::base
