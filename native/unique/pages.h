// Memory for many ids: large blocks have huge pages, nothing is written that the caller does not
// write, and what is given back is kept for the next block of its size. A new page costs the kernel
// more than an id costs the search, and a routed batch has hundreds of megabytes of them at a time.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

namespace petps::unique {

inline constexpr size_t kLargeBytes = size_t{2} << 20;  // a huge page; from here on blocks are kept
inline constexpr size_t kKeptBytesMax = size_t{512} << 20;  // of the process
inline constexpr size_t kTakesKept = 64;  // a block that so many takes did not want is freed

// At least `bytes` >= kLargeBytes of memory; null if there is none. Any thread may give it back,
// with the same `bytes`.
void* take_large(size_t bytes);
void give_back_large(void* at, size_t bytes);
// What is kept now.
size_t kept_bytes();

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
    ::new (static_cast<void*>(at)) U;  // not zeroed
  }
  template <typename U, typename... Arguments>
  void construct(U* at, Arguments&&... arguments) {
    ::new (static_cast<void*>(at)) U(std::forward<Arguments>(arguments)...);
  }
  friend bool operator==(const Pages&, const Pages&) { return true; }
};

template <typename T>
using Block = std::vector<T, Pages<T>>;

}  // namespace petps::unique
