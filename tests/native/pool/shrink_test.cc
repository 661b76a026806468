// Free space gives its disk blocks back, and gets blocks again before it is used.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "media/file.h"
#include "memory_pool.h"
#include "pool/pool.h"
#include "tests/native/media/small_disk.h"

namespace petps::pool {
namespace {

using base::Code;
using petps::testing_support::SmallDisk;
using petps::testing_support::TemporaryFolder;

constexpr uint64_t kCapacity = 50'000;  // rows of an index of about a MiB
// What a file system takes for the map of a file in several pieces.
constexpr uint64_t kMapBytes = uint64_t{1} << 16;

uint64_t on_disk(const std::string& path) {
  struct stat about = {};
  EXPECT_EQ(stat(path.c_str(), &about), 0);
  return static_cast<uint64_t>(about.st_blocks) * 512;
}

Options options_of(const std::string& path) {
  Options options;
  options.media.path = path;
  options.media.reserve_bytes = uint64_t{1} << 30;
  options.unit_bytes = kTestUnitBytes;
  return options;
}

// A pool with table 1, and behind it an array of buckets that is not free yet.
struct Shrinking {
  explicit Shrinking(std::string at) : path(std::move(at)) {
    pool = std::move(Pool::create(options_of(path)).value());
    EXPECT_TRUE(pool->create_instance("model", "model@1", 2).ok());
    EXPECT_TRUE(pool->create_table(testing_support::spec("t", 100)).ok());
    array = pool->reserve_buckets(1, kCapacity).value();
    std::memset(pool->at(array.offset), 7, array.count * 256);
  }
  void free_it() { pool->free_buckets(array); }
  void reopen() {
    pool.reset();
    auto opened = Pool::open(options_of(path));
    ASSERT_TRUE(opened.ok()) << opened.status().to_string();
    pool = std::move(opened).value();
    ASSERT_TRUE(pool->begin_writing().ok());
  }
  base::Result<uint64_t> shrink() { return pool->shrink(nullptr); }

  std::string path;
  std::unique_ptr<Pool> pool;
  BucketArray array;
};

class Shrink : public testing::Test {
 protected:
  ~Shrink() override { media::file_calls() = media::system_file_calls(); }
};

TEST_F(Shrink, FreeSpaceTakesNoDiskAlsoAfterAnOpen) {
  const TemporaryFolder folder;
  Shrinking s(folder.path("pool"));
  const uint64_t before = on_disk(s.path);
  const uint64_t size = s.pool->medium().size();
  EXPECT_EQ(s.shrink().value(), 0u) << "nothing is free yet";
  EXPECT_EQ(on_disk(s.path), before);
  s.free_it();
  const uint64_t free = s.pool->free_bytes();
  ASSERT_GE(free, s.array.count * 256);
  EXPECT_EQ(s.shrink().value(), free);
  EXPECT_LE(on_disk(s.path), before - free + kMapBytes);
  EXPECT_EQ(s.pool->medium().allocated_bytes(), on_disk(s.path));
  EXPECT_EQ(std::filesystem::file_size(s.path), size);
  EXPECT_EQ(s.pool->free_bytes(), free);
  s.reopen();
  EXPECT_LE(on_disk(s.path), before - free + kMapBytes) << "an open leaves the holes of free space";
  EXPECT_EQ(s.shrink().value(), free) << "again";
}

TEST_F(Shrink, AnOpenGivesBlocksToASparseCopyButNotToItsFreeSpace) {
  const TemporaryFolder folder;
  Shrinking s(folder.path("pool"));
  const uint64_t size = s.pool->medium().size();
  s.free_it();
  const uint64_t free = s.shrink().value();
  s.pool.reset();
  const std::string copy = folder.path("copy");
  ASSERT_TRUE(SmallDisk::run("cp --sparse=always " + s.path + " " + copy));
  ASSERT_LT(on_disk(copy), size - free) << "the copy has holes in used space";
  s.path = copy;
  s.reopen();
  EXPECT_GE(on_disk(copy), size - free);
  EXPECT_LT(on_disk(copy), size - free / 2);
}

TEST_F(Shrink, AHoleGetsBlocksBeforeItIsUsed) {
  const TemporaryFolder folder;
  Shrinking s(folder.path("pool"));
  const uint64_t before = on_disk(s.path);
  s.free_it();
  ASSERT_TRUE(s.shrink().ok());
  s.reopen();
  const BucketArray again = s.pool->reserve_buckets(1, kCapacity).value();
  EXPECT_EQ(again.offset, s.array.offset);
  EXPECT_GE(on_disk(s.path), before);
  const std::byte* const at = s.pool->at(again.offset);
  EXPECT_TRUE(
      std::all_of(at, at + again.count * 256, [](std::byte b) { return b == std::byte{}; }));
}

class ShrinkOn : public testing::TestWithParam<const char*> {};

TEST_P(ShrinkOn, AFullDiskAHoleIsAnErrorAndStaysFree) {
  const std::string kind = GetParam();
  const SmallDisk disk(kind, (kind == "xfs" ? uint64_t{320} : uint64_t{48}) << 20);
  if (!disk.missing().empty()) GTEST_SKIP() << disk.missing();
  Shrinking s(disk.path("pool"));
  s.free_it();
  const uint64_t free = s.shrink().value();
  disk.fill();
  s.reopen();
  const auto full = s.pool->reserve_buckets(1, kCapacity);
  EXPECT_EQ(full.status().code(), Code::kResourceExhausted) << full.status().to_string();
  EXPECT_EQ(s.pool->free_bytes(), free);
  disk.empty();
  const BucketArray again = s.pool->reserve_buckets(1, kCapacity).value();
  EXPECT_EQ(again.offset, s.array.offset);
  disk.fill();
  for (uint64_t at = 0; at < again.count * 256; at += 4096)  // else a SIGBUS
    *s.pool->at(again.offset + at) = std::byte{1};
  s.pool.reset();
}

INSTANTIATE_TEST_SUITE_P(FileSystems, ShrinkOn, testing::Values("ext4", "xfs", "tmpfs"),
                         [](const auto& tested) { return std::string(tested.param); });

TEST_F(Shrink, SpaceThatIsBeingGivenBackIsNotUsed) {
  const TemporaryFolder folder;
  Shrinking s(folder.path("pool"));
  s.free_it();
  int calls = 0;
  const auto done = s.pool->shrink([&](uint64_t bytes, uint64_t all) {
    calls += 1;
    EXPECT_LE(bytes, all);
    EXPECT_NE(s.pool->reserve_buckets(1, kCapacity).value().offset, s.array.offset);
    return true;
  });
  EXPECT_TRUE(done.ok());
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(s.pool->reserve_buckets(1, kCapacity).value().offset, s.array.offset);
}

TEST_F(Shrink, EndsWhenItIsToldTo) {
  const TemporaryFolder folder;
  Shrinking s(folder.path("pool"));
  const BucketArray second = s.pool->reserve_buckets(1, kCapacity).value();
  s.free_it();
  s.pool->free_buckets(second);
  const uint64_t free = s.pool->free_bytes();
  const auto done = s.pool->shrink([](uint64_t, uint64_t) { return false; });
  EXPECT_EQ(done.value(), free / 2) << "the first extent is done, the second is not";
  EXPECT_EQ(s.shrink().value(), free);
}

TEST_F(Shrink, RefusesWhatItCannotDo) {
  const TemporaryFolder folder;
  Shrinking s(folder.path("pool"));
  s.free_it();
  const uint64_t before = on_disk(s.path);
  s.pool->hold_free_extents(true);
  EXPECT_EQ(s.shrink().status().code(), Code::kFailedPrecondition);
  s.pool->hold_free_extents(false);
  media::file_calls().before = [](media::Call call) {
    return call == media::Call::kAllocate ? EOPNOTSUPP : 0;
  };
  const auto unable = s.shrink();
  EXPECT_EQ(unable.status().code(), Code::kUnimplemented) << unable.status().to_string();
  EXPECT_NE(unable.status().message().find("petps export"), std::string_view::npos);
  media::file_calls().before = [](media::Call call) {
    return call == media::Call::kAllocate ? EIO : 0;
  };
  EXPECT_EQ(s.shrink().status().code(), Code::kIoError);
  media::file_calls() = media::system_file_calls();
  EXPECT_EQ(on_disk(s.path), before);
  s.pool->keep_blocks();
  const auto kept = s.shrink();
  EXPECT_EQ(kept.status().code(), Code::kFailedPrecondition);
  EXPECT_NE(kept.status().message().find("server.rdma"), std::string_view::npos);
  EXPECT_EQ(s.pool->reserve_buckets(1, kCapacity).value().offset, s.array.offset)
      << "what failed is free again";
}

// The disk may name what a failed change of the catalogue set free.
TEST_F(Shrink, APoolThatFailsWhileItShrinksGivesNothingMoreBack) {
  const TemporaryFolder folder;
  Shrinking s(folder.path("pool"));
  const BucketArray second = s.pool->reserve_buckets(1, kCapacity).value();
  *s.pool->at(second.offset) = std::byte{7};
  s.free_it();
  const auto result = s.pool->shrink([&](uint64_t, uint64_t) {
    media::file_calls().sync_data = [](int) { return EIO; };
    EXPECT_FALSE(s.pool->medium().sync_all(media::Site::kCloseSync).ok());
    media::file_calls() = media::system_file_calls();
    s.pool->free_buckets(second);
    return true;
  });
  EXPECT_EQ(result.status().code(), Code::kFailedPrecondition) << result.status().to_string();
  EXPECT_EQ(*s.pool->at(s.array.offset), std::byte{0});
  EXPECT_EQ(*s.pool->at(second.offset), std::byte{7});
}

TEST_F(Shrink, OnAFullDiskAnExtentWithBlocksIsTakenBeforeAHole) {
  const SmallDisk disk("tmpfs", uint64_t{48} << 20);
  if (!disk.missing().empty()) GTEST_SKIP() << disk.missing();
  Shrinking s(disk.path("pool"));
  const BucketArray second = s.pool->reserve_buckets(1, kCapacity).value();
  s.free_it();
  ASSERT_TRUE(s.shrink().ok());
  disk.fill();
  s.reopen();  // `second` is free, and has blocks: the superblock never named it
  EXPECT_EQ(s.pool->reserve_buckets(1, kCapacity).value().offset, second.offset);
  EXPECT_EQ(s.pool->reserve_buckets(1, kCapacity).status().code(), Code::kResourceExhausted);
}

TEST_F(Shrink, AReadOnlyPoolIsLeftAlone) {
  const TemporaryFolder folder;
  Shrinking s(folder.path("pool"));
  s.pool.reset();
  Options options = options_of(s.path);
  options.media.access = media::Access::kReadOnly;
  const auto pool = Pool::open(options);
  EXPECT_EQ(pool.value()->shrink(nullptr).status().code(), Code::kFailedPrecondition);
}

TEST_F(Shrink, MemoryIsGivenBackToo) {
  Options options;
  options.unit_bytes = kTestUnitBytes;
  options.media.reserve_bytes = uint64_t{1} << 30;
  const auto pool = std::move(Pool::create(options).value());
  ASSERT_TRUE(pool->create_instance("model", "model@1", 2).ok());
  ASSERT_TRUE(pool->create_table(testing_support::spec("t", 100)).ok());
  const BucketArray array = pool->reserve_buckets(1, kCapacity).value();
  std::memset(pool->at(array.offset), 7, array.count * 256);
  pool->free_buckets(array);
  EXPECT_EQ(pool->shrink(nullptr).value(), pool->free_bytes());
  EXPECT_EQ(*pool->at(array.offset), std::byte{0});
}

}  // namespace
}  // namespace petps::pool
