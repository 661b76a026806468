#include "media/pages.h"

#include <linux/types.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <span>

#include "media/calls.h"

namespace petps::media {

namespace {

constexpr uint64_t kHugeBytes = uint64_t{2} << 20;
constexpr uint64_t kSamples = 16;  // 7 us each, which pulls of the same worker wait for

// PAGEMAP_SCAN of linux/fs.h, which older headers do not have.
struct Region {
  __u64 start, end, categories;
};
struct Scan {
  __u64 size, flags, start, end, walk_end, vec, vec_len, max_pages, category_inverted,
      category_mask, category_anyof_mask, return_mask;
};
constexpr unsigned long kScan = _IOWR('f', 16, Scan);
constexpr __u64 kPresent = 1 << 3;
constexpr __u64 kHuge = 1 << 6;

bool scan(int file, uint64_t from, uint64_t to, MappedPages& pages) {
  std::array<Region, 64> regions;
  while (from < to) {
    Scan scan{};
    scan.size = sizeof scan;
    scan.start = from;
    scan.end = to;
    scan.vec = reinterpret_cast<uintptr_t>(regions.data());
    scan.vec_len = regions.size();
    scan.category_mask = kPresent;
    scan.return_mask = kPresent | kHuge;
    const int count = calls::ioctl(file, kScan, &scan);
    if (count < 0) return false;
    for (const Region& region : std::span(regions).first(static_cast<size_t>(count))) {
      pages.mapped += region.end - region.start;
      if ((region.categories & kHuge) != 0) pages.huge += region.end - region.start;
    }
    from = scan.walk_end;
  }
  return true;
}

}  // namespace

std::optional<MappedPages> sample_pages(const std::byte* base, uint64_t bytes) {
  const int file = calls::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (file < 0) return std::nullopt;
  MappedPages pages;
  const auto first = reinterpret_cast<uintptr_t>(base);
  const uint64_t parts = (bytes + kHugeBytes - 1) / kHugeBytes;
  const uint64_t samples = std::min(parts, kSamples);
  bool is_known = true;
  for (uint64_t i = 0; i < samples && is_known; ++i) {
    const uint64_t part = i * parts / samples * kHugeBytes;
    is_known = scan(file, first + part, first + std::min(part + kHugeBytes, bytes), pages);
  }
  calls::close(file);
  if (!is_known) return std::nullopt;
  return pages;
}

}  // namespace petps::media
