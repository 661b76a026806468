// Registered memory for what the device cannot read in place: headers, and rows that are copied.
// Internal to transport/rdma; one per endpoint, one thread.
#pragma once

#include <memory>
#include <vector>

#include "transport/rdma/verbs.h"

namespace petps::transport {

// A header of 500 keys has 136 bytes; a copied reply of 500 rows of 512 bytes takes 16 blocks.
inline constexpr size_t kStageBlockBytes = size_t{16} << 10;
inline constexpr uint32_t kNoBlock = ~0u;

class Stage {
 public:
  explicit Stage(Verbs& verbs) : verbs_(verbs) {}

  // Take a free block and link it before `next` in its message's list. Return kNoBlock if all are
  // in use and the device registers no more.
  uint32_t take(uint32_t next);
  // Free a message's blocks, which the device has read.
  void give_back(uint32_t first);
  std::byte* memory(uint32_t block) const {
    return slabs_[block / kSlabBlocks].memory.get() + block % kSlabBlocks * kStageBlockBytes;
  }
  uint32_t key(uint32_t block) const { return slabs_[block / kSlabBlocks].region->local_key; }

 private:
  static constexpr uint32_t kSlabBlocks = 64;
  // 64 MiB per endpoint: a header for every pin of a worker, and copies as well.
  static constexpr uint32_t kSlabsMax = 64;
  struct Slab {
    std::unique_ptr<std::byte[]> memory;
    std::unique_ptr<MemoryRegion> region;  // after the memory: destroyed first
  };
  bool grow();

  Verbs& verbs_;
  std::vector<Slab> slabs_;
  std::vector<uint32_t> next_;  // per block: the next block of its message, or of the free list
  uint32_t free_ = kNoBlock;
};

}  // namespace petps::transport
