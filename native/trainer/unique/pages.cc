#include "trainer/unique/pages.h"

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

// Round up to one of four sizes between two powers of two, because batches differ by a few ids. The
// unused part of a block has no pages.
size_t rounded(size_t bytes) {
  const size_t step = std::max(std::bit_floor(bytes) / 4, kLargeBytes);
  return (bytes + step - 1) / step * step;
}

// The blocks that the process keeps for reuse.
class Kept {
 public:
  // Return a kept block of that size; null if none is kept or another thread holds the mutex. No
  // thread waits for the mutex: in a child that was forked while a thread held it, the wait would
  // never end.
  void* take(size_t bytes) {
    std::list<Block> unwanted;
    void* found = nullptr;
    {
      const std::unique_lock lock(mutex_, std::try_to_lock);
      if (!lock) return nullptr;
      ++takes_;
      for (auto next = blocks_.begin(); next != blocks_.end();) {
        const auto at = next++;
        if (found == nullptr && at->bytes == bytes) {
          found = at->at;
          bytes_ -= at->bytes;
          blocks_.erase(at);
        } else if (takes_ - at->since > kTakesKept) {
          bytes_ -= at->bytes;
          unwanted.splice(unwanted.end(), blocks_, at);
        }
      }
    }
    for (const Block& each : unwanted) std::free(each.at);
    return found;
  }

  // Keep the block; return false if it cannot be kept.
  bool keep(void* at, size_t bytes) {
    std::list<Block> one;
    try {
      one.push_back({at, bytes, 0});
    } catch (const std::bad_alloc&) {
      return false;
    }
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || bytes > kKeptBytesMax - bytes_) return false;
    one.front().since = takes_;
    blocks_.splice(blocks_.begin(), one);  // take() finds it first: it may still be in a cache
    bytes_ += bytes;
    return true;
  }

  void free_all() {
    std::list<Block> all;
    {
      const std::unique_lock lock(mutex_, std::try_to_lock);
      if (!lock) return;
      all.swap(blocks_);
      bytes_ = 0;
    }
    for (const Block& each : all) std::free(each.at);
  }

  size_t bytes() {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }

 private:
  struct Block {
    void* at;
    size_t bytes;
    size_t since;  // takes_ when the block was kept
  };

  std::mutex mutex_;
  std::list<Block> blocks_;
  size_t bytes_ = 0;
  size_t takes_ = 0;
};

// Never destroyed: arrays may be given back after static objects are destroyed.
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
  if (at == nullptr) {
    kept().free_all();
    at = std::aligned_alloc(kLargeBytes, size);
  }
  if (at != nullptr) ::madvise(at, size, MADV_HUGEPAGE);  // may fail: small pages are only slower
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
