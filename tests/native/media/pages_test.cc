// The sample of a mapping's pages. Does not cover: kernels before 6.7, where there is none.
#include "media/pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

#include "media/calls.h"

namespace petps::media {
namespace {

constexpr uint64_t kHugeBytes = uint64_t{2} << 20;
constexpr uint64_t kMapped = 80 * kHugeBytes;  // more than are sampled

class Pages : public testing::Test {
 protected:
  Pages() {
    at_ = ::mmap(nullptr, kMapped + kHugeBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                 -1, 0);
    const auto address = reinterpret_cast<uintptr_t>(at_);
    base_ = static_cast<std::byte*>(at_) + (kHugeBytes - address % kHugeBytes) % kHugeBytes;
  }
  ~Pages() override { ::munmap(at_, kMapped + kHugeBytes); }
  void SetUp() override {
    ASSERT_NE(at_, MAP_FAILED);
    if (!sample_pages(base_, kMapped).has_value()) GTEST_SKIP() << "this kernel cannot say";
  }
  MappedPages sample() const { return sample_pages(base_, kMapped).value(); }

  void* at_ = MAP_FAILED;
  std::byte* base_ = nullptr;
};

TEST_F(Pages, UntouchedMemoryHasNone) {
  EXPECT_EQ(sample().mapped, 0u);
  EXPECT_EQ(sample().huge, 0u);
}

TEST_F(Pages, SmallPagesAreNotHuge) {
  ASSERT_EQ(::madvise(base_, kMapped, MADV_NOHUGEPAGE), 0);
  for (uint64_t at = 0; at < kMapped; at += kHugeBytes) std::memset(base_ + at, 1, kHugeBytes / 2);
  const MappedPages pages = sample();
  EXPECT_EQ(pages.mapped, 16 * kHugeBytes / 2);
  EXPECT_EQ(pages.huge, 0u);
}

TEST_F(Pages, HugePagesAreFound) {
  ASSERT_EQ(::madvise(base_, kMapped / 2, MADV_HUGEPAGE), 0);
  ASSERT_EQ(::madvise(base_ + kMapped / 2, kMapped / 2, MADV_NOHUGEPAGE), 0);
  std::memset(base_, 1, kMapped);
  const MappedPages pages = sample();
  EXPECT_EQ(pages.mapped, 16 * kHugeBytes);
  if (pages.huge == 0) GTEST_SKIP() << "the kernel gave no huge pages";
  EXPECT_LE(pages.huge, pages.mapped / 2);
}

TEST_F(Pages, APartOfAPageAtTheEndIsCounted) {
  base_[0] = std::byte{1};
  EXPECT_GE(sample_pages(base_, 100).value().mapped, 4096u);
}

TEST_F(Pages, AKernelThatCannotSayIsNoError) {
  file_calls().before = [](Call call) { return call == Call::kControl ? ENOTTY : 0; };
  EXPECT_FALSE(sample_pages(base_, kMapped).has_value());
  file_calls().before = [](Call call) { return call == Call::kOpen ? EACCES : 0; };
  EXPECT_FALSE(sample_pages(base_, kMapped).has_value());
  file_calls() = system_file_calls();
}

}  // namespace
}  // namespace petps::media
