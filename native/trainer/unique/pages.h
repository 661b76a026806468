// Memory for many ids. Large blocks have huge pages, no block is zeroed, and a block that is given
// back is kept for the next block of its size. Reason: a new page costs the kernel more than an id
// costs the search, and a routed batch takes hundreds of megabytes of new pages.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

namespace petps::unique {

// A huge page. Blocks of at least this size are kept.
inline constexpr size_t kLargeBytes = size_t{2} << 20;
// Kept by the whole process, at most.
inline constexpr size_t kKeptBytesMax = size_t{512} << 20;
// A kept block that this number of takes did not use is freed.
inline constexpr size_t kTakesKept = 64;

// Return at least `bytes` (>= kLargeBytes) of memory; null if there is no memory. Any thread may
// give it back, with the same `bytes`.
void* take_large(size_t bytes);
void give_back_large(void* at, size_t bytes);
// Return how many bytes are kept now.
size_t kept_bytes();

// The allocator of Block.
template <typename T>
struct Pages {
  using value_type = T;
  Pages() = default;
  template <typename U>
  explicit Pages(const Pages<U>&) {}

  T* allocate(size_t n) {
    const size_t bytes = n * sizeof(T);
    void* at = bytes >= kLargeBytes ? take_large(bytes) : std::malloc(bytes);
    if (at == nullptr && bytes > 0) throw std::bad_alloc();
    return static_cast<T*>(at);
  }
  void deallocate(T* at, size_t n) {
    if (n * sizeof(T) >= kLargeBytes) return give_back_large(at, n * sizeof(T));
    std::free(at);
  }

  template <typename U>
  void construct(U* at) {
    ::new (static_cast<void*>(at)) U;  // leaves numbers uninitialised
  }
  template <typename U, typename... Arguments>
  void construct(U* at, Arguments&&... arguments) {
    ::new (static_cast<void*>(at)) U(std::forward<Arguments>(arguments)...);
  }
  friend bool operator==(const Pages&, const Pages&) { return true; }
};

// A vector of numbers whose resize() leaves new elements uninitialised.
template <typename T>
using Block = std::vector<T, Pages<T>>;

}  // namespace petps::unique
