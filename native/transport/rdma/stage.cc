#include "transport/rdma/stage.h"

namespace petps::transport {

bool Stage::grow() {
  if (slabs_.size() == kSlabsMax) return false;
  Slab slab;
  const size_t bytes = kSlabBlocks * kStageBlockBytes;
  slab.memory = std::make_unique<std::byte[]>(bytes);
  auto region = verbs_.register_memory(slab.memory.get(), bytes, IBV_ACCESS_LOCAL_WRITE);
  if (!region.ok()) return false;
  slab.region = std::move(region.value());
  const auto first = static_cast<uint32_t>(slabs_.size()) * kSlabBlocks;
  slabs_.push_back(std::move(slab));
  next_.resize(first + kSlabBlocks);
  for (uint32_t i = 0; i < kSlabBlocks; ++i)
    next_[first + i] = i + 1 < kSlabBlocks ? first + i + 1 : free_;
  free_ = first;
  return true;
}

uint32_t Stage::take(uint32_t next) {
  if (free_ == kNoBlock && !grow()) return kNoBlock;
  const uint32_t block = free_;
  free_ = next_[block];
  next_[block] = next;
  return block;
}

void Stage::give_back(uint32_t first) {
  while (first != kNoBlock) {
    const uint32_t next = next_[first];
    next_[first] = free_;
    free_ = first;
    first = next;
  }
}

}  // namespace petps::transport
