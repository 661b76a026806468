// If the kernel cannot provide a page of a pool, the process stops with a message and its own
// status. Every other SIGBUS goes to the previous handler.
#include "media/bus_error.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <vector>

#include "media/media.h"
#include "small_disk.h"
#include "temporary_folder.h"

namespace petps::media {
namespace {

using testing::ExitedWithCode;
using testing::KilledBySignal;

constexpr uint64_t kBytes = 64 * 1024;
constexpr int kPreviousStatus = 33;

class BusError : public testing::Test {
 protected:
  Options options(const std::string& name = "pool") const {
    Options options;
    options.path = folder_.path(name);
    options.reserve_bytes = uint64_t{64} << 20;
    return options;
  }
  std::unique_ptr<Media> make(const std::string& name = "pool") const {
    auto media = Media::create(options(name), kBytes);
    EXPECT_TRUE(media.ok()) << media.status().to_string();
    return std::move(media).value();
  }
  // Map a page, at `place` if that is given, that belongs to no pool and that the kernel cannot
  // provide.
  volatile char* foreign_page(void* place = nullptr) const {
    const int file = ::open(folder_.path("foreign").c_str(), O_RDWR | O_CREAT, 0600);
    const int flags = MAP_SHARED | (place == nullptr ? 0 : MAP_FIXED);
    void* const page = mmap(place, 4096, PROT_READ | PROT_WRITE, flags, file, 0);
    ::close(file);
    return static_cast<volatile char*>(page);
  }
  void truncate_pool(off_t bytes) const {
    if (truncate(options().path.c_str(), bytes) != 0) _exit(1);
  }

  testing_support::TemporaryFolder folder_;
};
using BusErrorDeathTest = BusError;

TEST_F(BusErrorDeathTest, ATruncatedPoolIsNamed) {
  auto other = make("other");
  auto media = make();
  const auto touch = [&] {
    stop_on_lost_pool();
    truncate_pool(8192);
    media->base()[12345] = std::byte{1};
  };
  EXPECT_EXIT(touch(), ExitedWithCode(kLostPoolExitStatus),
              "petps: SIGBUS at byte 12345 of the pool " + options().path +
                  ": the file has only 8192 bytes: it was truncated while it was open\\. "
                  "Look at `dmesg`.* exit status 74");
}

TEST_F(BusErrorDeathTest, ATruncatedPoolIsNamedByItsSecondMapping) {
  auto media = make();
  const SecondMapping second(*media, 2 * kBytes);
  ASSERT_EQ(kBytes, second.bytes().size());
  media->base()[12345] = std::byte{7};
  EXPECT_EQ(std::byte{7}, second.bytes()[12345]);
  const auto touch = [&] {
    stop_on_lost_pool();
    truncate_pool(8192);
    _exit(static_cast<int>(second.bytes()[12345]));
  };
  EXPECT_EXIT(touch(), ExitedWithCode(kLostPoolExitStatus),
              "petps: SIGBUS at byte 12345 of the pool " + options().path + ": the file has only");
}

TEST_F(BusErrorDeathTest, ASecondPoolAtTheSamePlaceIsNamedByItsOwnPath) {
  for (int i = 0; i < 3; ++i) make("gone" + std::to_string(i));
  auto media = make();
  const auto touch = [&] {
    stop_on_lost_pool();
    truncate_pool(0);
    media->base()[0] = std::byte{1};
  };
  EXPECT_EXIT(touch(), ExitedWithCode(kLostPoolExitStatus), "of the pool " + options().path + ":");
}

TEST_F(BusErrorDeathTest, AReflinkOfAnOpenPoolOnAFullDiskIsNamed) {
  const testing_support::SmallDisk disk("xfs", uint64_t{320} << 20);
  if (!disk.missing().empty()) GTEST_SKIP() << disk.missing();
  Options on_disk = options();
  on_disk.path = disk.path("pool");
  const auto touch = [&] {
    stop_on_lost_pool();
    auto media = Media::create(on_disk, uint64_t{8} << 20);
    if (!media.ok()) _exit(1);
    std::memset(media.value()->base(), 1, media.value()->size());
    Flusher flusher(*media.value());
    flusher.flush(media.value()->base(), 1, Site::kRow);
    if (!flusher.drain(Site::kFilled).ok()) _exit(1);
    testing_support::SmallDisk::run("cp --reflink=always " + on_disk.path + " " +
                                    disk.path("copy"));
    disk.fill();
    std::memset(media.value()->base(), 2, media.value()->size());
  };
  EXPECT_EXIT(touch(), ExitedWithCode(kLostPoolExitStatus), "its disk is full and the page has no");
}

TEST_F(BusErrorDeathTest, AFaultElsewhereGoesToThePreviousHandler) {
  auto media = make();
  const auto touch = [&] {
    signal(SIGBUS, [](int) { _exit(kPreviousStatus); });
    stop_on_lost_pool();
    *foreign_page() = 1;
  };
  EXPECT_EXIT(touch(), ExitedWithCode(kPreviousStatus), "");
  const auto touch_with_address = [&] {
    struct sigaction previous = {};
    previous.sa_flags = SA_SIGINFO;
    previous.sa_sigaction = [](int, siginfo_t* about, void*) {
      _exit(about->si_addr != nullptr ? kPreviousStatus : 1);
    };
    sigaction(SIGBUS, &previous, nullptr);
    stop_on_lost_pool();
    *foreign_page() = 1;
  };
  EXPECT_EXIT(touch_with_address(), ExitedWithCode(kPreviousStatus), "");
}

TEST_F(BusErrorDeathTest, AFaultElsewhereWithoutAHandlerKillsAsBefore) {
  auto media = make();
  const auto touch = [&] {
    signal(SIGBUS, SIG_DFL);
    stop_on_lost_pool();
    *foreign_page() = 1;
  };
  EXPECT_EXIT(touch(), KilledBySignal(SIGBUS), "");
}

TEST_F(BusErrorDeathTest, ASignalFromKillIsNotTreatedAsAFault) {
  auto media = make();
  const auto send = [] {
    signal(SIGBUS, SIG_DFL);
    stop_on_lost_pool();
    kill(getpid(), SIGBUS);
    pause();
  };
  EXPECT_EXIT(send(), KilledBySignal(SIGBUS), "");
}

TEST_F(BusErrorDeathTest, AClosedPoolIsNoLongerAPool) {
  auto media = make();
  std::byte* const base = media->base();
  media.reset();
  const auto touch = [&] {
    signal(SIGBUS, [](int) { _exit(kPreviousStatus); });
    stop_on_lost_pool();
    *foreign_page(base) = 1;
  };
  EXPECT_EXIT(touch(), ExitedWithCode(kPreviousStatus), "");
}

TEST_F(BusErrorDeathTest, WithoutStopOnLostPoolTheProgramsOwnHandlerRuns) {
  auto media = make();
  const auto touch = [&] {
    signal(SIGBUS, [](int) { _exit(kPreviousStatus); });
    truncate_pool(0);
    media->base()[0] = std::byte{1};
  };
  EXPECT_EXIT(touch(), ExitedWithCode(kPreviousStatus), "");
}

}  // namespace
}  // namespace petps::media
