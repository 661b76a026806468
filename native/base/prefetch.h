// Prefetch: load memory into the cache before it is needed.
#pragma once

#include <cstddef>

namespace petps::base {

inline constexpr size_t kCacheLineBytes = 64;

// Prefetch the cache lines of [at, at + bytes).
inline void prefetch(const void* at, size_t bytes) {
  const auto* byte = static_cast<const char*>(at);
  for (size_t i = 0; i < bytes; i += kCacheLineBytes) __builtin_prefetch(byte + i);
}

// Prefetch the line of `at` in order to change it. Does nothing on a processor without the
// instruction.
inline void prefetch_for_write(const void* at) {
#ifdef __x86_64__
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(at)));
#else
  __builtin_prefetch(at, 1);
#endif
}

}  // namespace petps::base
