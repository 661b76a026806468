// Registered memory for what the device cannot read where it lies: headers, and rows that are copied.
// Internal to transport/rdma; one an endpoint, one thread.
#pragma once

#include <memory>
#include <vector>

#include "transport/rdma/verbs.h"

namespace petps::transport {

// A header of 500 keys is 136 bytes, a copied reply of 500 rows of 512 bytes is 16 of these.
inline constexpr size_t kStageBlockBytes = size_t{16} << 10;
inline constexpr uint32_t kNoBlock = ~0u;

class Stage {
 public:
  explicit Stage(Verbs& verbs) : verbs_(verbs) {}

  // A free block, before `next` in its message's list; kNoBlock: all are in use, or the device registers
  // no more.
  uint32_t take(uint32_t next);
  // A message's blocks: the device has read them.
  void give_back(uint32_t first);
  std::byte* memory(uint32_t block) const {
    return slabs_[block / kSlabBlocks].memory.get() + block % kSlabBlocks * kStageBlockBytes;
  }
  uint32_t key(uint32_t block) const { return slabs_[block / kSlabBlocks].region->local_key; }

 private:
  static constexpr uint32_t kSlabBlocks = 64;
  // 64 MiB of an endpoint: every pin of a worker with a header of its own, and copies beside.
  static constexpr uint32_t kSlabsMax = 64;
  struct Slab {
    std::unique_ptr<std::byte[]> memory;
    std::unique_ptr<MemoryRegion> region;  // after the memory: goes first
  };
  bool grow();

  Verbs& verbs_;
  std::vector<Slab> slabs_;
  std::vector<uint32_t> next_;  // by block: the next of its message, or of the free ones
  uint32_t free_ = kNoBlock;
};

}  // namespace petps::transport
