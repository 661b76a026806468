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

// Round up to one of four sizes between two powers of two, so that batches of nearly equal size use
// the same blocks. The unused part of a block has no pages.
size_t round_up(size_t bytes) {
  const size_t step = std::max(std::bit_floor(bytes) / 4, kLargeBytes);
  return (bytes + step - 1) / step * step;
}

// The blocks that the process keeps for reuse.
class BlockCache {
 public:
  // Return a cached block of this size, or null if there is none or another thread holds the mutex.
  // No thread waits for the mutex: after a fork while a thread held it, a wait would never end.
  void* take(size_t bytes) {
    std::list<Block> unused;
    void* memory = nullptr;
    {
      const std::unique_lock lock(mutex_, std::try_to_lock);
      if (!lock) return nullptr;
      ++takes_;
      for (auto next = blocks_.begin(); next != blocks_.end();) {
        const auto at = next++;
        if (memory == nullptr && at->bytes == bytes) {
          memory = at->memory;
          bytes_ -= at->bytes;
          blocks_.erase(at);
        } else if (takes_ - at->cached_at > kUnusedTakesMax) {
          bytes_ -= at->bytes;
          unused.splice(unused.end(), blocks_, at);
        }
      }
    }
    free_blocks(unused);
    return memory;
  }

  // Cache the block. Return false if it cannot be cached.
  bool put(void* memory, size_t bytes) {
    std::list<Block> block;
    try {
      block.push_back({memory, bytes, 0});
    } catch (const std::bad_alloc&) {
      return false;
    }
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || bytes > kCachedBytesMax - bytes_) return false;
    block.front().cached_at = takes_;
    blocks_.splice(blocks_.begin(), block);  // take() prefers it: a processor may still cache it
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
    free_blocks(all);
  }

  size_t bytes() {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }

 private:
  struct Block {
    void* memory;
    size_t bytes;
    size_t cached_at;  // takes_ when the block was cached
  };
  static void free_blocks(const std::list<Block>& blocks) {
    for (const Block& block : blocks) std::free(block.memory);
  }

  std::mutex mutex_;
  std::list<Block> blocks_;
  size_t bytes_ = 0;
  size_t takes_ = 0;
};

// Never destroyed: arrays may be given back after static objects are destroyed.
BlockCache& cache() {
  static BlockCache& blocks = *new BlockCache;
  return blocks;
}

}  // namespace

void* take_large(size_t bytes) {
  const size_t size = round_up(bytes);
  void* at = cache().take(size);
  if (at != nullptr) {
    ASAN_UNPOISON_MEMORY_REGION(at, size);
    return at;
  }
  at = std::aligned_alloc(kLargeBytes, size);
  if (at == nullptr) {
    cache().free_all();
    at = std::aligned_alloc(kLargeBytes, size);
  }
  if (at != nullptr) ::madvise(at, size, MADV_HUGEPAGE);  // may fail: small pages are only slower
  return at;
}

void give_back_large(void* at, size_t bytes) {
  const size_t size = round_up(bytes);
  ASAN_POISON_MEMORY_REGION(at, size);
  if (cache().put(at, size)) return;
  ASAN_UNPOISON_MEMORY_REGION(at, size);
  std::free(at);
}

size_t cached_bytes() { return cache().bytes(); }

}  // namespace petps::unique
