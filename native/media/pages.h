// Which pages the kernel uses for a mapping: small ones cost a page walk for nearly every row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace petps::media {

// Pages of a sample of a mapping, in bytes. What no thread has touched yet is in neither.
struct MappedPages {
  uint64_t mapped = 0;
  uint64_t huge = 0;  // on pages of 2 MiB or more
};

// Sample [base, base + bytes). The cost does not depend on the size. Empty if the kernel cannot say
// (before Linux 6.7).
std::optional<MappedPages> sample_pages(const std::byte* base, uint64_t bytes);

}  // namespace petps::media
