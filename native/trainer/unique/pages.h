// Memory for many ids. Large blocks use huge pages, no block is zeroed, and the process caches a
// returned block for the next one of its size. Reason: a new page costs the kernel more than an id
// costs the search, and a routed batch needs hundreds of megabytes.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

namespace petps::unique {

// The size of a huge page. Blocks of at least this size are cached.
inline constexpr size_t kLargeBytes = size_t{2} << 20;
// Bytes that the whole process caches, at most.
inline constexpr size_t kCachedBytesMax = size_t{512} << 20;
// The cache frees a block that this number of takes did not use.
inline constexpr size_t kUnusedTakesMax = 64;

// Return at least `bytes` (>= kLargeBytes) of memory, or null if there is no memory.
void* take_large(size_t bytes);
// Give back the memory of take_large(bytes). Any thread may call it.
void give_back_large(void* at, size_t bytes);
// Return how many bytes are cached now.
size_t cached_bytes();

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
