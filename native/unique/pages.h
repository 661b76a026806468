// Memory for many ids: large blocks ask for huge pages, and nothing is written that the caller does
// not write. A new page costs the kernel more than an id costs the search, and dividing a table
// jumps between a thousand places.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

namespace petps::unique {

template <typename T>
struct Pages {
  using value_type = T;
  Pages() = default;
  template <typename U>
  explicit Pages(const Pages<U>&) {}

  T* allocate(size_t n) {
    constexpr size_t kHuge = size_t{2} << 20;
    const bool large = n * sizeof(T) >= kHuge;
    const size_t align = large ? kHuge : alignof(std::max_align_t);
    const size_t bytes = (n * sizeof(T) + align - 1) / align * align;
    void* at = std::aligned_alloc(align, bytes);
    if (at == nullptr) throw std::bad_alloc();
    if (large) ::madvise(at, bytes, MADV_HUGEPAGE);  // small pages are as right, only slower
    return static_cast<T*>(at);
  }
  void deallocate(T* at, size_t) { std::free(at); }

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
