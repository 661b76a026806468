// Memory for the limits that petps is compared with. It is pre-faulted and uses huge pages if the
// kernel grants them, so that no limit is slow for a reason that does not apply to petps.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>

namespace petps::bench {

class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_((bytes + kHuge - 1) / kHuge * kHuge + kHuge) {
    void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
      std::perror("mmap");
      std::exit(1);
    }
    start_ = at;
    const auto address = reinterpret_cast<size_t>(at);
    at_ = reinterpret_cast<std::byte*>((address + kHuge - 1) / kHuge * kHuge);
    madvise(at_, bytes_ - kHuge, MADV_HUGEPAGE);
    for (size_t i = 0; i < bytes_ - kHuge; i += 4096) at_[i] = std::byte{0};
  }
  ~Memory() { munmap(start_, bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* at() const { return at_; }
  size_t bytes() const { return bytes_ - kHuge; }

 private:
  static constexpr size_t kHuge = size_t{2} << 20;
  size_t bytes_;
  void* start_ = nullptr;
  std::byte* at_ = nullptr;
};

}  // namespace petps::bench
