// One store past the cache. Part of room media.
#pragma once

#ifdef __x86_64__
#include <emmintrin.h>
#else
#include <cstring>
#endif

namespace petps::media {

// Copy 16 bytes past the cache. ASSUMPTION: `to` is 16-byte aligned. aarch64 has only a hint for
// such stores, which no C++ intrinsic gives: there this is a plain copy.
inline void copy_16_past_cache(void* to, const void* from) {
#ifdef __x86_64__
  _mm_stream_si128(static_cast<__m128i*>(to), _mm_loadu_si128(static_cast<const __m128i*>(from)));
#else
  std::memcpy(to, from, 16);
#endif
}

}  // namespace petps::media
