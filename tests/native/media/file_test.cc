// The errors of the file under a pool, and their messages.
#include "media/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "media/media.h"
#include "temporary_folder.h"

namespace petps::media {
namespace {

using base::Code;

constexpr uint64_t kBytes = 64 * 1024;

bool contains(const base::Status& status, std::string_view text) {
  return status.message().find(text) != std::string_view::npos;
}

class FileMedium : public testing::Test {
 protected:
  void TearDown() override { file_calls() = system_file_calls(); }
  Options options(Durability durability = Durability::kPower) const {
    Options options;
    options.path = path_;
    options.durability = durability;
    options.reserve_bytes = uint64_t{64} << 20;
    return options;
  }
  Options read_only() const {
    Options result = options();
    result.access = Access::kReadOnly;
    return result;
  }
  std::unique_ptr<Media> make(Durability durability = Durability::kPower) {
    auto media = Media::create(options(durability), kBytes);
    EXPECT_TRUE(media.ok()) << media.status().to_string();
    return media.ok() ? std::move(media).value() : nullptr;
  }
  bool exists() const { return access(path_.c_str(), F_OK) == 0; }

  testing_support::TemporaryFolder folder_;
  std::string path_ = folder_.path("pool");
};

int fail_for_full_disk(int, uint64_t, uint64_t) { return ENOSPC; }
int fail_for_quota(int, uint64_t, uint64_t) { return EDQUOT; }
int fail_sync(int) { return EIO; }
int g_syncs = 0;
int count_sync(int) {
  ++g_syncs;
  return 0;
}

TEST_F(FileMedium, CreateRefusesAnExistingPath) {
  make();
  const auto second = Media::create(options(), kBytes);
  EXPECT_EQ(second.status().code(), Code::kAlreadyExists);
  EXPECT_TRUE(contains(second.status(), path_)) << second.status().to_string();
  EXPECT_TRUE(exists());
}

TEST_F(FileMedium, OnlyItsUserAndGroupMayOpenANewPool) {
  const mode_t before = umask(0);
  const auto media = make();
  umask(before);
  struct stat facts {};
  ASSERT_EQ(stat(path_.c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 07777, 0640u);
}

TEST_F(FileMedium, CreateNamesAMissingFolder) {
  path_ = folder_.path("nowhere") + "/pool";
  const auto media = Media::create(options(), kBytes);
  EXPECT_EQ(media.status().code(), Code::kNotFound);
  EXPECT_TRUE(contains(media.status(), folder_.path("nowhere"))) << media.status().to_string();
}

TEST_F(FileMedium, CreateOfNothingIsRefused) {
  EXPECT_EQ(Media::create(options(), 0).status().code(), Code::kInvalidArgument);
  EXPECT_FALSE(exists());
}

TEST_F(FileMedium, OpenRefusesWhatIsNotAPoolAndSaysWhy) {
  EXPECT_EQ(Media::open(options()).status().code(), Code::kNotFound);
  path_ = folder_.path();
  EXPECT_TRUE(contains(Media::open(options()).status(), "folder"));
  EXPECT_TRUE(contains(Media::open(read_only()).status(), "folder"));
  path_ = folder_.path("pipe");
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  EXPECT_TRUE(contains(Media::open(options()).status(), "not a regular file"));
  EXPECT_TRUE(contains(Media::open(read_only()).status(), "not a regular file"))
      << "open does not wait for the pipe's other end";
  path_ = folder_.path("empty");
  std::ofstream(path_).close();
  const auto empty = Media::open(options());
  EXPECT_EQ(empty.status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(contains(empty.status(), "empty")) << empty.status().to_string();
  Options anonymous;
  EXPECT_EQ(Media::open(anonymous).status().code(), Code::kInvalidArgument);
}

TEST_F(FileMedium, AFileOfAnyLengthCanBeOpenedAndGrown) {
  std::ofstream(path_) << std::string(5000, 'x');
  auto media = Media::open(options());
  ASSERT_TRUE(media.ok()) << media.status().to_string();
  EXPECT_EQ(media.value()->size(), 5000u);
  EXPECT_EQ(media.value()->base()[4999], std::byte{'x'});
  ASSERT_TRUE(media.value()->grow(10000).ok());
  EXPECT_EQ(media.value()->base()[4999], std::byte{'x'});
  EXPECT_EQ(media.value()->base()[5000], std::byte{0});
}

TEST_F(FileMedium, ASecondWriterIsRefusedAlsoInAnotherProcess) {
  auto writer = make();
  const pid_t child = fork();
  if (child == 0) {  // a separate process, because the kernel holds the lock per process
    const auto second = Media::open(options());
    const auto reader = Media::open(read_only());
    const bool refused = second.status().code() == Code::kInUse &&
                         reader.status().code() == Code::kInUse &&
                         contains(second.status(), path_) &&
                         contains(reader.status(), "open for writing in another process");
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  writer.reset();
  EXPECT_TRUE(Media::open(options()).ok()) << "closing releases the lock";
}

TEST_F(FileMedium, AKilledWriterReleasesTheLock) {
  make();
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    auto media = Media::open(options());
    const char word = media.ok() ? 'y' : 'n';
    if (write(ready[1], &word, 1) != 1) _exit(1);
    pause();
  }
  char word = 0;
  ASSERT_EQ(read(ready[0], &word, 1), 1);
  EXPECT_EQ(word, 'y');
  EXPECT_EQ(Media::open(options()).status().code(), Code::kInUse);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(Media::open(options()).ok());
  close(ready[0]);
  close(ready[1]);
}

TEST_F(FileMedium, ReadersShareAndKeepWritersOut) {
  make();
  auto reader = Media::open(read_only());
  auto other = Media::open(read_only());
  ASSERT_TRUE(reader.ok());
  ASSERT_TRUE(other.ok());
  EXPECT_TRUE(reader.value()->read_only());
  EXPECT_EQ(Media::open(options()).status().code(), Code::kInUse);
  EXPECT_EQ(reader.value()->grow(2 * kBytes).code(), Code::kFailedPrecondition);
}

TEST_F(FileMedium, AReadOnlyFileCannotBeOpenedForWriting) {
  make();
  ASSERT_EQ(chmod(path_.c_str(), 0400), 0);
  EXPECT_TRUE(Media::open(read_only()).ok());
  if (geteuid() == 0) GTEST_SKIP() << "root may write every file";
  EXPECT_EQ(Media::open(options()).status().code(), Code::kPermissionDenied);
}

TEST_F(FileMedium, AFullDiskAtCreateLeavesNoFile) {
  file_calls().allocate = fail_for_full_disk;
  const auto media = Media::create(options(), kBytes);
  EXPECT_EQ(media.status().code(), Code::kResourceExhausted);
  EXPECT_TRUE(contains(media.status(), path_)) << media.status().to_string();
  EXPECT_TRUE(contains(media.status(), "wanted 65536 bytes")) << media.status().to_string();
  EXPECT_TRUE(contains(media.status(), "bytes free")) << media.status().to_string();
  EXPECT_FALSE(exists());
}

TEST_F(FileMedium, AFullDiskWhenGrowingChangesNothing) {
  auto media = make();
  media->base()[0] = std::byte{1};
  file_calls().allocate = fail_for_quota;
  const base::Status status = media->grow(2 * kBytes);
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_TRUE(contains(status, "quota")) << status.to_string();
  EXPECT_EQ(media->size(), kBytes);
  EXPECT_FALSE(media->failed()) << "a full disk loses nothing";
  file_calls() = system_file_calls();
  EXPECT_TRUE(media->grow(2 * kBytes).ok()) << "growing works once there is room";
  EXPECT_EQ(media->base()[0], std::byte{1});
}

// The disk is really full: a tmpfs of 1 MiB.
TEST_F(FileMedium, ARealFullDiskIsAnErrorAndNotASignal) {
  const std::string mount_point = folder_.path("small");
  ASSERT_EQ(mkdir(mount_point.c_str(), 0700), 0);
  if (mount("petps_test", mount_point.c_str(), "tmpfs", 0, "size=1m") != 0) {
    GTEST_SKIP() << "mounting a small tmpfs needs root: " << std::strerror(errno);
  }
  {
    path_ = mount_point + "/pool";
    const auto too_large = Media::create(options(), uint64_t{8} << 20);
    EXPECT_EQ(too_large.status().code(), Code::kResourceExhausted)
        << too_large.status().to_string();
    EXPECT_FALSE(exists());
    auto media = make();
    const base::Status status = media->grow(uint64_t{8} << 20);
    EXPECT_EQ(status.code(), Code::kResourceExhausted) << status.to_string();
    EXPECT_TRUE(contains(status, "disk full")) << status.to_string();
    struct stat about = {};
    ASSERT_EQ(stat(path_.c_str(), &about), 0);
    EXPECT_EQ(about.st_size, static_cast<off_t>(kBytes)) << "the new blocks are given back";
    ASSERT_TRUE(media->grow(kBytes * 8).ok());
    std::memset(media->base(), 0x33, media->size());  // every byte has a page: no SIGBUS
  }
  EXPECT_EQ(umount(mount_point.c_str()), 0);
}

TEST_F(FileMedium, UnderPowerADrainSyncsOnceAndOnlyIfSomethingWasFlushed) {
  auto media = make();
  file_calls().sync_data = count_sync;
  g_syncs = 0;
  Flusher flusher(*media);
  EXPECT_TRUE(flusher.drain(Site::kFilled).ok());
  EXPECT_EQ(g_syncs, 0);
  for (int i = 0; i < 10; ++i) flusher.flush(media->base() + i * 64, 64, Site::kRow);
  EXPECT_EQ(g_syncs, 0);
  EXPECT_TRUE(flusher.drain(Site::kFilled).ok());
  EXPECT_EQ(g_syncs, 1);
  EXPECT_TRUE(flusher.drain(Site::kPublished).ok());
  EXPECT_EQ(g_syncs, 1);
  std::vector<std::byte> row(512);
  flusher.copy(media->base(), row.data(), row.size(), Site::kRow);  // streamed copies count as well
  EXPECT_TRUE(flusher.drain(Site::kFilled).ok());
  EXPECT_EQ(g_syncs, 2);
  ASSERT_TRUE(media->grow(2 * kBytes).ok());
  EXPECT_EQ(g_syncs, 3) << "the new length is durable";
}

TEST_F(FileMedium, UnderProcessNoDrainSyncs) {
  auto media = make(Durability::kProcess);
  file_calls().sync_data = count_sync;
  g_syncs = 0;
  Flusher flusher(*media);
  flusher.flush(media->base(), 64, Site::kRow);
  EXPECT_TRUE(flusher.drain(Site::kFilled).ok());
  ASSERT_TRUE(media->grow(2 * kBytes).ok());
  EXPECT_EQ(g_syncs, 0);
  media->set_durability(Durability::kPower);
  EXPECT_EQ(g_syncs, 1) << "earlier stores are synced before the durability becomes power";
  flusher.flush(media->base(), 64, Site::kRow);
  EXPECT_TRUE(flusher.drain(Site::kFilled).ok());
  EXPECT_EQ(g_syncs, 2);
}

TEST_F(FileMedium, AfterAFailedSyncEveryDrainFailsAndNamesThePath) {
  auto media = make();
  file_calls().sync_data = fail_sync;
  Flusher flusher(*media);
  flusher.flush(media->base(), 64, Site::kRow);
  const base::Status status = flusher.drain(Site::kFilled);
  EXPECT_EQ(status.code(), Code::kIoError);
  EXPECT_TRUE(contains(status, path_)) << status.to_string();
  EXPECT_TRUE(contains(status, "errno 5")) << status.to_string();
  EXPECT_TRUE(contains(status, "read-only until it is reopened")) << status.to_string();
  EXPECT_TRUE(media->failed());
  file_calls() = system_file_calls();
  // Linux reports a lost write once. A later success must not hide it.
  Flusher other(*media);
  other.flush(media->base(), 64, Site::kRow);
  EXPECT_EQ(other.drain(Site::kFilled).code(), Code::kIoError);
  EXPECT_EQ(media->grow(2 * kBytes).code(), Code::kIoError);
  media.reset();
  EXPECT_TRUE(Media::open(options()).ok());
}

TEST_F(FileMedium, AFailedSyncWhileChangingTheDurabilityIsRemembered) {
  auto media = make(Durability::kProcess);
  file_calls().sync_data = fail_sync;
  media->set_durability(Durability::kPower);
  EXPECT_TRUE(media->failed());
}

TEST_F(FileMedium, AFailedSyncAtCreateRemovesTheFile) {
  file_calls().sync_data = fail_sync;
  EXPECT_EQ(Media::create(options(), kBytes).status().code(), Code::kIoError);
  EXPECT_FALSE(exists());
}

TEST_F(FileMedium, TooLittleAddressSpaceIsAnError) {
  Options huge = options();
  huge.reserve_bytes = uint64_t{1} << 60;
  const auto media = Media::create(huge, kBytes);
  EXPECT_EQ(media.status().code(), Code::kResourceExhausted);
  EXPECT_TRUE(contains(media.status(), "reserve_bytes")) << media.status().to_string();
  EXPECT_FALSE(exists());
}

TEST_F(FileMedium, TheDefaultReservationFitsSeveralPools) {
  std::vector<std::unique_ptr<Media>> all;
  for (int i = 0; i < 4; ++i) {
    Options plain;
    plain.path = folder_.path("pool" + std::to_string(i));
    auto media = Media::create(plain, kBytes);
    ASSERT_TRUE(media.ok()) << media.status().to_string();
    all.push_back(std::move(media).value());
  }
}

}  // namespace
}  // namespace petps::media
