#include "unique/pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <list>
#include <mutex>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#endif

namespace petps::unique {
namespace {

// Four sizes from one power of two to the next: batches differ by a few ids. What is not used of a
// block has no pages.
size_t rounded(size_t bytes) {
  const size_t step = std::max(std::bit_floor(bytes) / 4, kLargeBytes);
  return (bytes + step - 1) / step * step;
}

class Kept {
 public:
  void* take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    ++takes_;
    void* found = nullptr;
    for (auto at = blocks_.begin(); at != blocks_.end();) {
      const bool fits = found == nullptr && at->bytes == bytes;
      if (fits) found = at->at;
      if (!fits && takes_ - at->since > kTakesKept) std::free(at->at);
      if (fits || takes_ - at->since > kTakesKept) {
        bytes_ -= at->bytes;
        at = blocks_.erase(at);
      } else {
        ++at;
      }
    }
    return found;
  }

  // Whether it is kept.
  bool keep(void* at, size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (bytes > kKeptBytesMax - bytes_) return false;
    blocks_.push_front({at, bytes, takes_});  // the next to be taken: it may still be in a cache
    bytes_ += bytes;
    return true;
  }

  size_t bytes() {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }

 private:
  struct Block {
    void* at;
    size_t bytes;
    size_t since;  // how many takes there had been
  };

  std::mutex mutex_;
  std::list<Block> blocks_;
  size_t bytes_ = 0;
  size_t takes_ = 0;
};

// Never destroyed: arrays may outlive everything else of the process.
Kept& kept() {
  static Kept& one = *new Kept;
  return one;
}

}  // namespace

void* take_large(size_t bytes) {
  const size_t size = rounded(bytes);
  void* at = kept().take(size);
  if (at != nullptr) {
    ASAN_UNPOISON_MEMORY_REGION(at, size);
    return at;
  }
  at = std::aligned_alloc(kLargeBytes, size);
  if (at != nullptr) ::madvise(at, size, MADV_HUGEPAGE);  // small pages are as right, only slower
  return at;
}

void give_back_large(void* at, size_t bytes) {
  const size_t size = rounded(bytes);
  ASAN_POISON_MEMORY_REGION(at, size);
  if (kept().keep(at, size)) return;
  ASAN_UNPOISON_MEMORY_REGION(at, size);
  std::free(at);
}

size_t kept_bytes() { return kept().bytes(); }

}  // namespace petps::unique
