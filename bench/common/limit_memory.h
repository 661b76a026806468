// The memory of a limit, on the same medium as the table that it is compared with: anonymous memory
// on huge pages, or a file that Media creates and maps as it does a pool's, so that both have the
// same page sizes. It is pre-faulted.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <string>

#include "bench/common/loaded_table.h"
#include "bench/common/memory.h"
#include "media/media.h"

namespace petps::bench {

class LimitMemory {
 public:
  LimitMemory(const TableShape& shape, size_t bytes) {
    if (shape.medium == "dram") {
      memory_ = std::make_unique<Memory>(bytes);
      return;
    }
    media::Options options;
    options.path = shape.folder + "/bench-limit-" + std::to_string(getpid()) + ".pool";
    options.durability = media::Durability::kProcess;
    file_ = value_of(media::Media::create(options, bytes));
    std::memset(file_->base(), 0, bytes);
    unlink(options.path.c_str());  // it is mapped, and disappears with this object
  }

  std::byte* at() const { return memory_ != nullptr ? memory_->at() : file_->base(); }
  size_t bytes() const { return memory_ != nullptr ? memory_->bytes() : file_->size(); }

 private:
  std::unique_ptr<Memory> memory_;
  std::unique_ptr<media::Media> file_;
};

// The allocator of a container with a single allocation, which is the LimitMemory.
template <typename T>
struct LimitAllocator {
  using value_type = T;
  explicit LimitAllocator(LimitMemory& from) : memory(&from) {}
  template <typename U>
  explicit LimitAllocator(const LimitAllocator<U>& other) : memory(other.memory) {}
  T* allocate(size_t n) {
    if (n * sizeof(T) > memory->bytes()) fail("the limit's container needs more memory");
    return reinterpret_cast<T*>(memory->at());
  }
  void deallocate(T*, size_t) {}
  friend bool operator==(const LimitAllocator& a, const LimitAllocator& b) {
    return a.memory == b.memory;
  }
  LimitMemory* memory;
};

}  // namespace petps::bench
