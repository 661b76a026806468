// Opens files that lack blocks of their own (a sparse copy, a reflink), on real file systems and
// with failing system calls. Opening never changes a byte or the length.
#include "media/blocks.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "media/file.h"
#include "media/media.h"
#include "small_disk.h"

namespace petps::media {
namespace {

using base::Code;
using testing_support::SmallDisk;
using testing_support::TemporaryFolder;

constexpr uint64_t kPage = 4096;
constexpr uint64_t kPoolBytes = uint64_t{4} << 20;

Options options_of(const std::string& path) {
  Options options;
  options.path = path;
  options.reserve_bytes = uint64_t{64} << 20;
  return options;
}

std::string content_of(const std::string& path) {
  std::string content(std::filesystem::file_size(path), '\0');
  std::ifstream(path, std::ios::binary)
      .read(content.data(), static_cast<std::streamsize>(content.size()));
  return content;
}

uint64_t allocated(const std::string& path) {
  struct stat about = {};
  EXPECT_EQ(stat(path.c_str(), &about), 0);
  return static_cast<uint64_t>(about.st_blocks) * 512;
}

// Write data in three places, the last bytes included, with holes between them: a `cp --sparse`
// copy.
std::string make_sparse(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  EXPECT_EQ(ftruncate(file, kPoolBytes), 0);
  const std::string data(3 * kPage, 'd');
  for (const uint64_t at : {uint64_t{0}, kPoolBytes / 2, kPoolBytes - data.size()})
    EXPECT_EQ(pwrite(file, data.data(), data.size(), static_cast<off_t>(at)),
              static_cast<ssize_t>(data.size()));
  EXPECT_EQ(fsync(file), 0);
  close(file);
  return content_of(path);
}

// Create a pool whose every byte is written.
void make_full_pool(const std::string& path) {
  auto media = Media::create(options_of(path), kPoolBytes);
  ASSERT_TRUE(media.ok()) << media.status().to_string();
  std::memset(media.value()->base(), 0x11, kPoolBytes);
}

// Store into every page of the pool in a child process. Return 0 if it survived, 2 if the pool
// did not open, 3 if the drain failed, 128 + n if signal n killed it.
int store_into_every_page(const std::string& path) {
  const pid_t child = fork();
  if (child == 0) {
    auto media = Media::open(options_of(path));
    if (!media.ok()) _exit(2);
    std::memset(media.value()->base(), 0x5a, media.value()->size());
    Flusher flusher(*media.value());
    flusher.flush(media.value()->base(), 8, Site::kRow);
    _exit(flusher.drain(Site::kFilled).ok() ? 0 : 3);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Which call inject_failure() makes fail, and how.
struct Failure {
  Call call = Call::kCount;
  int error_number = 0;
  int at = 0;  // 0: every call
  int seen = 0;
};
Failure g_failure;
Call g_unsupported[3] = {Call::kCount, Call::kCount, Call::kCount};

int inject_failure(Call call) {
  for (const Call unsupported : g_unsupported) {
    if (call == unsupported) return EOPNOTSUPP;
  }
  if (call != g_failure.call) return 0;
  g_failure.seen += 1;
  return g_failure.at == 0 || g_failure.seen == g_failure.at ? g_failure.error_number : 0;
}

class Blocks : public testing::Test {
 protected:
  void SetUp() override {
    g_failure = Failure();
    for (Call& call : g_unsupported) call = Call::kCount;
  }
  void TearDown() override { file_calls() = system_file_calls(); }
};

class BlocksOn : public Blocks, public testing::WithParamInterface<const char*> {};

uint64_t disk_bytes(const std::string& kind) {
  const uint64_t mib = kind == "xfs" ? 320 : kind == "btrfs" ? 128 : 32;  // mkfs takes no less
  return mib << 20;
}

TEST_P(BlocksOn, OpeningASparseCopyOnAFullDiskChangesNothing) {
  const SmallDisk disk(GetParam(), disk_bytes(GetParam()));
  if (!disk.missing().empty()) GTEST_SKIP() << disk.missing();
  const std::string path = disk.path("pool");
  const std::string before = make_sparse(path);
  disk.fill();
  const auto full = Media::open(options_of(path));
  ASSERT_EQ(full.status().code(), Code::kResourceExhausted) << full.status().to_string();
  EXPECT_NE(full.status().message().find(path), std::string::npos);
  EXPECT_NE(full.status().message().find("bytes free"), std::string::npos);
  EXPECT_TRUE(content_of(path) == before) << "the bytes and the length are what they were";
  disk.empty();
  {
    const auto media = Media::open(options_of(path));
    ASSERT_TRUE(media.ok()) << media.status().to_string();
  }
  EXPECT_TRUE(content_of(path) == before);
  EXPECT_GE(allocated(path), kPoolBytes);
  disk.fill();
  EXPECT_EQ(store_into_every_page(path), 0) << "every byte has a block";
}

INSTANTIATE_TEST_SUITE_P(FileSystems, BlocksOn, testing::Values("tmpfs", "ext2", "ext4", "xfs"),
                         [](const auto& kind) { return std::string(kind.param); });

// The file has more blocks than bytes, and still a hole, so counting blocks does not find the
// hole.
TEST_F(Blocks, AHoleBesideBlocksBehindTheEndIsFilled) {
  const SmallDisk disk("ext4", disk_bytes("ext4"));
  if (!disk.missing().empty()) GTEST_SKIP() << disk.missing();
  const std::string path = disk.path("pool");
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT, 0600);
  ASSERT_EQ(fallocate(file, 0, 0, kPoolBytes), 0);
  ASSERT_EQ(fallocate(file, FALLOC_FL_KEEP_SIZE, kPoolBytes, kPoolBytes), 0);
  ASSERT_EQ(fallocate(file, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, kPage * 7, kPage), 0);
  close(file);
  ASSERT_GT(allocated(path), kPoolBytes);
  const uint64_t before = allocated(path);
  ASSERT_TRUE(Media::open(options_of(path)).ok());
  EXPECT_EQ(allocated(path), before + kPage);
}

// Like NFS 4.2 and FUSE: SEEK_HOLE, but neither FIEMAP nor fallocate. Every call of four kinds
// fails once in each of four ways.
TEST_F(Blocks, FillingHolesByWritingKeepsEveryByteWhateverFails) {
  const TemporaryFolder folder;
  const std::string path = folder.path("pool");
  g_unsupported[0] = Call::kControl;
  g_unsupported[1] = Call::kAllocate;
  file_calls().before = inject_failure;
  int failures = 0;
  for (const Call call : {Call::kWrite, Call::kRead, Call::kSyncData, Call::kSeek}) {
    for (const int error_number : {ENOSPC, EIO, EINTR, kHalf}) {
      for (int at = 1;; ++at) {
        const std::string before = make_sparse(path);
        g_failure = {call, error_number, at, 0};
        const auto media = Media::open(options_of(path));
        const std::string fault = std::string(call_name(call)) + " " + std::to_string(at) +
                                  " returns " + std::to_string(error_number);
        ASSERT_TRUE(content_of(path) == before) << fault;
        if (g_failure.seen < at) break;  // every call has failed once
        failures += 1;
        if (error_number == EINTR || error_number == kHalf)
          EXPECT_TRUE(media.ok()) << fault << ": " << media.status().to_string();
        else
          EXPECT_FALSE(media.ok()) << fault;
        if (media.ok()) {
          EXPECT_GE(allocated(path), kPoolBytes) << fault;
        }
      }
    }
  }
  EXPECT_GE(failures, 40);
}

// The file system knows nothing of pages that a killed process left dirty.
TEST_F(Blocks, AHoleThatHoldsDataIsNotOverwritten) {
  static std::string path;
  const TemporaryFolder folder;
  path = folder.path("pool");
  std::string expected = make_sparse(path);
  expected.replace(kPage * 10, 4, "data");
  file_calls().before = [](Call call) {
    if (call == Call::kControl || call == Call::kAllocate) return EOPNOTSUPP;
    if (call != Call::kRead) return 0;
    const int file = ::open(path.c_str(), O_WRONLY);
    EXPECT_EQ(::pwrite(file, "data", 4, kPage * 10), 4);
    ::close(file);
    return 0;
  };
  ASSERT_TRUE(Media::open(options_of(path)).ok());
  EXPECT_TRUE(content_of(path) == expected);
}

// Like ext2's own driver and NFS 3: nothing reports where the holes are.
TEST_F(Blocks, NothingIsWrittenWhereNothingReportsHoles) {
  const TemporaryFolder folder;
  const std::string path = folder.path("pool");
  const std::string before = make_sparse(path);
  g_unsupported[0] = Call::kControl;
  g_unsupported[1] = Call::kAllocate;
  g_unsupported[2] = Call::kSeek;
  file_calls().before = [](Call call) {
    EXPECT_NE(call, Call::kWrite);
    return inject_failure(call);
  };
  ASSERT_TRUE(Media::open(options_of(path)).ok());
  EXPECT_TRUE(content_of(path) == before);
}

TEST_F(Blocks, AReflinkIsUnsharedOrRefused) {
  const SmallDisk disk("xfs", disk_bytes("xfs"));
  if (!disk.missing().empty()) GTEST_SKIP() << disk.missing();
  const std::string path = disk.path("pool");
  const std::string copy = disk.path("copy");
  make_full_pool(path);
  const std::string before = content_of(path);
  ASSERT_TRUE(SmallDisk::run("cp --reflink=always " + path + " " + copy));
  disk.fill();
  const auto full = Media::open(options_of(copy));
  EXPECT_EQ(full.status().code(), Code::kResourceExhausted) << full.status().to_string();
  EXPECT_TRUE(content_of(copy) == before);
  disk.empty();
  ASSERT_TRUE(Media::open(options_of(copy)).ok());
  disk.fill();
  EXPECT_EQ(store_into_every_page(copy), 0) << "no block is shared any more";
  EXPECT_TRUE(content_of(path) == before) << "the original is another file";
}

TEST_F(Blocks, ABtrfsPoolIsCreatedWithoutCopyOnWriteAndRefusedWithIt) {
  const SmallDisk disk("btrfs", disk_bytes("btrfs"));
  if (!disk.missing().empty()) GTEST_SKIP() << disk.missing();
  const std::string path = disk.path("pool");
  const std::string copy = disk.path("copy");
  make_full_pool(path);
  ASSERT_TRUE(SmallDisk::run("cp --reflink=never " + path + " " + copy));
  const auto copied = Media::open(options_of(copy));
  EXPECT_EQ(copied.status().code(), Code::kFailedPrecondition) << copied.status().to_string();
  EXPECT_NE(copied.status().message().find("chattr +C"), std::string::npos);
  const std::string snapshot = disk.path("snapshot");
  ASSERT_TRUE(SmallDisk::run("touch " + snapshot + " && chattr +C " + snapshot +
                             " && cp --reflink=always " + path + " " + snapshot));
  const auto shared = Media::open(options_of(snapshot));
  EXPECT_EQ(shared.status().code(), Code::kFailedPrecondition) << shared.status().to_string();
  EXPECT_NE(shared.status().message().find("shares"), std::string::npos);
  // Apply the remedy of both messages.
  const std::string repaired = disk.path("repaired");
  ASSERT_TRUE(SmallDisk::run("touch " + repaired + " && chattr +C " + repaired + " && cat " + copy +
                             " > " + repaired + " && rm " + snapshot + " && sync"));
  disk.fill();
  EXPECT_EQ(store_into_every_page(path), 0);
  EXPECT_EQ(store_into_every_page(repaired), 0);
}

}  // namespace
}  // namespace petps::media
