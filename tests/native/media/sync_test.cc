// Two threads that sync at once, and the page cache after a failed sync.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "media/file.h"
#include "media/media.h"
#include "small_disk.h"
#include "temporary_folder.h"

namespace petps::media {
namespace {

using base::Code;

constexpr uint64_t kBytes = 64 * 1024;

std::atomic<int> g_begun{0};    // number of syncs
std::atomic<int> g_waiting{0};  // number of calls that wait for another call's sync
std::atomic<bool> g_may_finish{true};

int count_waits(Call call) {
  if (call == Call::kAwaitSync) g_waiting += 1;
  return 0;
}

int sync_once_allowed(int) {
  g_begun += 1;
  while (!g_may_finish) std::this_thread::yield();
  return 0;
}

// Fail like Linux: one failed write-back loses the pages of both writers, and the descriptor
// reports it once. The first sync fails after the second writer is in its own sync, or waits for
// the first.
int fail_once_as_linux_does(int) {
  const bool is_first = g_begun.fetch_add(1) == 0;
  while (g_begun < 2 && g_waiting < 1) std::this_thread::yield();
  return is_first ? EIO : 0;
}

class Syncs : public testing::Test {
 protected:
  void SetUp() override {
    g_begun = 0;
    g_waiting = 0;
    g_may_finish = true;
  }
  void TearDown() override { file_calls() = system_file_calls(); }
  Options options(Access access = Access::kReadWrite) const {
    Options options;
    options.path = folder_.path("pool");
    options.access = access;
    options.reserve_bytes = uint64_t{64} << 20;
    return options;
  }
  std::unique_ptr<Media> make() {
    auto media = Media::create(options(), kBytes);
    EXPECT_TRUE(media.ok()) << media.status().to_string();
    return std::move(media).value();
  }
  static base::Status store_and_drain(Media& media, uint64_t at) {
    Flusher flusher(media);
    media.base()[at] = std::byte{1};
    flusher.flush(media.base() + at, 1, Site::kRow);
    return flusher.drain(Site::kFilled);
  }

  testing_support::TemporaryFolder folder_;
};

TEST_F(Syncs, AFailureThatTheKernelReportsOnceReachesEveryWriter) {
  auto media = make();
  file_calls().before = count_waits;
  file_calls().sync_data = fail_once_as_linux_does;
  std::array<base::Status, 2> drained;
  std::thread other([&] { drained[1] = store_and_drain(*media, 8192); });
  drained[0] = store_and_drain(*media, 0);
  other.join();
  EXPECT_EQ(drained[0].code(), Code::kIoError) << drained[0].to_string();
  EXPECT_EQ(drained[1].code(), Code::kIoError) << drained[1].to_string();
  EXPECT_TRUE(media->failed());
}

TEST_F(Syncs, GrowFailsAfterAFailureThatTheKernelReportedToAWriter) {
  auto media = make();
  file_calls().before = count_waits;
  file_calls().sync_data = fail_once_as_linux_does;
  base::Status drained;
  std::thread other([&] { drained = store_and_drain(*media, 8192); });
  const base::Status grown = media->grow(2 * kBytes);
  other.join();
  EXPECT_FALSE(grown.ok());
  EXPECT_FALSE(drained.ok());
  EXPECT_EQ(media->size(), kBytes);
}

// The running sync may have passed their pages already, so they need a second sync. One serves
// all of them.
TEST_F(Syncs, WritersThatWaitShareTheNextSync) {
  constexpr int kWriters = 6;
  auto media = make();
  file_calls().before = count_waits;
  file_calls().sync_data = sync_once_allowed;
  g_may_finish = false;
  std::vector<std::thread> writers;
  std::atomic<int> good{0};
  const auto write = [&](int i) { good += store_and_drain(*media, i * 4096).ok() ? 1 : 0; };
  writers.emplace_back(write, 0);
  while (g_begun < 1) std::this_thread::yield();
  for (int i = 1; i <= kWriters; ++i) writers.emplace_back(write, i);
  while (g_waiting < kWriters) std::this_thread::yield();
  EXPECT_EQ(good, 0) << "none is served by a sync that began before its store";
  EXPECT_EQ(g_begun, 1) << "one at a time";
  g_may_finish = true;
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(good, kWriters + 1);
  EXPECT_EQ(g_begun, 2);
}

std::vector<Call> g_syncs;
bool g_disk_fails = false;

int note_syncs(Call call) {
  if (call == Call::kSyncData || call == Call::kSyncRange || call == Call::kSyncFileSystem)
    g_syncs.push_back(call);
  return call == Call::kSyncFileSystem && g_disk_fails ? EIO : 0;
}

// As on ext4 without a journal, and ext2, on Linux 5.5 to 6.4; `make lab` cuts the power there.
TEST_F(Syncs, WhereASyncMaySkipTheFlushOfTheDiskTheFileSystemIsSyncedToo) {
  file_calls().may_skip_flush = [](int) { return true; };
  g_disk_fails = false;
  auto media = make();
  file_calls().before = note_syncs;
  g_syncs.clear();
  EXPECT_TRUE(store_and_drain(*media, 0).ok());
  EXPECT_EQ(g_syncs, (std::vector<Call>{Call::kSyncData, Call::kSyncFileSystem}));
  media->set_durability(Durability::kProcess);
  g_syncs.clear();
  EXPECT_TRUE(media->sync_range(media->base(), 8, Site::kSuperblockSync).ok());
  EXPECT_EQ(g_syncs, (std::vector<Call>{Call::kSyncRange, Call::kSyncFileSystem}));
  g_disk_fails = true;
  EXPECT_EQ(media->sync_range(media->base(), 8, Site::kSuperblockSync).code(), Code::kIoError);
  EXPECT_TRUE(media->failed());
}

int fail_sync(int) { return EIO; }

bool has_mark(const std::string& path) {
  char value = 0;
  return getxattr(path.c_str(), "user.petps.failed_sync", &value, 1) >= 0;
}

// Linux drops no page that a process maps: a reader would pass the lost pages to the next writer.
TEST_F(Syncs, PagesThatAReaderMapsKeepThePoolClosedAfterAFailedSync) {
  auto media = make();
  auto reader = Media::open(options(Access::kReadBeside));
  ASSERT_TRUE(reader.ok());
  file_calls().sync_data = fail_sync;
  EXPECT_FALSE(store_and_drain(*media, 0).ok());
  file_calls() = system_file_calls();
  if (!has_mark(options().path))
    GTEST_SKIP() << "no user attributes (or a tmpfs) in " << folder_.path();
  EXPECT_EQ(std::to_integer<int>(reader.value()->base()[0]), 1) << "the reader maps the page";
  media.reset();
  for (const Access access : {Access::kReadWrite, Access::kReadOnly}) {
    const auto refused = Media::open(options(access));
    ASSERT_EQ(refused.status().code(), Code::kFailedPrecondition) << refused.status().to_string();
    EXPECT_NE(refused.status().message().find("stop what reads the pool"), std::string::npos);
  }
  EXPECT_TRUE(has_mark(options().path));
  reader.value().reset();
  const auto opened = Media::open(options());
  EXPECT_TRUE(opened.ok()) << opened.status().to_string();
  EXPECT_FALSE(has_mark(options().path));
}

int g_advice_left_out = 0;

int leave_out_advice(Call call) {
  return call == Call::kAdviseFile && g_advice_left_out-- > 0 ? EINVAL : 0;
}

// The kernel itself may hold a page that it should drop: seen once on a busy machine.
TEST_F(Syncs, APageThatIsInUseForAMomentDoesNotKeepThePoolClosedAfterAFailedSync) {
  auto media = make();
  file_calls().sync_data = fail_sync;
  EXPECT_FALSE(store_and_drain(*media, 0).ok());
  file_calls() = system_file_calls();
  if (!has_mark(options().path))
    GTEST_SKIP() << "no user attributes (or a tmpfs) in " << folder_.path();
  g_advice_left_out = 6;
  file_calls().before = leave_out_advice;
  media.reset();
  const auto opened = Media::open(options());
  EXPECT_TRUE(opened.ok()) << opened.status().to_string();
  EXPECT_LT(g_advice_left_out, 0) << "the page was dropped in the end";
}

// A killed writer drops no pages.
TEST_F(Syncs, AFailedSyncOfAKilledWriterIsFoundByTheNextOpen) {
  make();
  const pid_t child = fork();
  if (child == 0) {
    auto media = Media::open(options());
    file_calls().sync_data = fail_sync;
    _exit(media.ok() && !store_and_drain(*media.value(), 0).ok() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  if (!has_mark(options().path))
    GTEST_SKIP() << "no user attributes (or a tmpfs) in " << folder_.path();
  file_calls().sync_data = fail_sync;
  const auto still_failing = Media::open(options());
  EXPECT_EQ(still_failing.status().code(), Code::kIoError) << still_failing.status().to_string();
  EXPECT_TRUE(has_mark(options().path));
  file_calls() = system_file_calls();
  EXPECT_TRUE(Media::open(options()).ok());
  EXPECT_FALSE(has_mark(options().path));
}

// A real disk that loses pages: an image with holes, on a file system that becomes full.
TEST_F(Syncs, AfterTheNextOpenNoLostPageIsRead) {
  const testing_support::SmallDisk backing("tmpfs", uint64_t{8} << 20);
  if (!backing.missing().empty()) GTEST_SKIP() << backing.missing();
  // Without a journal, the file system itself continues after the error.
  const testing_support::SmallDisk disk("ext4 -O ^has_journal", uint64_t{64} << 20,
                                        backing.path("image"));
  ASSERT_EQ(disk.missing(), "");
  Options on_disk = options();
  on_disk.path = disk.path("pool");
  auto media = Media::create(on_disk, kBytes);
  ASSERT_TRUE(media.ok()) << media.status().to_string();
  std::memset(media.value()->base(), 7, kBytes);
  ASSERT_TRUE(store_and_drain(*media.value(), 0).ok());
  // The image has these blocks. The blocks of what the pool grows by are only promised.
  ASSERT_TRUE(media.value()->grow(uint64_t{32} << 20).ok());
  backing.fill();
  Options beside = on_disk;
  beside.access = Access::kReadBeside;
  auto reader = Media::open(beside);
  ASSERT_TRUE(reader.ok());
  media.value()->base()[4096] = std::byte{42};
  std::memset(media.value()->base() + kBytes, 9, (uint64_t{32} << 20) - kBytes);
  EXPECT_FALSE(store_and_drain(*media.value(), 4096).ok()) << "the disk is full";
  EXPECT_TRUE(media.value()->failed());
  EXPECT_TRUE(has_mark(on_disk.path));
  EXPECT_EQ(std::to_integer<int>(reader.value()->base()[kBytes]), 9) << "still shown";
  media.value().reset();
  backing.empty();
  const auto refused = Media::open(on_disk);
  EXPECT_EQ(refused.status().code(), Code::kFailedPrecondition) << refused.status().to_string();
  reader.value().reset();
  const auto opened = Media::open(on_disk);
  ASSERT_TRUE(opened.ok()) << opened.status().to_string();
  EXPECT_EQ(std::to_integer<int>(opened.value()->base()[kBytes]), 0) << "what the disk has";
}

}  // namespace
}  // namespace petps::media
