// One contract for every medium: dram, file in both durabilities, borrowed memory (as dram and as
// dax), and a device that is an ordinary file. Real persistent memory is opt-in, as in tests/lab:
// PETPS_TEST_DAX_FOLDER is a folder of a dax mount, and PETPS_TEST_DAX_DEVICE is a device-DAX
// device whose content the tests destroy.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "base/crc32c.h"
#include "media/file.h"
#include "media/media.h"
#include "temporary_folder.h"

namespace petps::media {
namespace {

struct Backend {
  const char* name;
  bool persistent;  // open() sees what was written
  Kind kind;
};

// Return a folder of a dax mount, or a device-DAX device; null if there is none to test with.
const char* dax_folder() { return std::getenv("PETPS_TEST_DAX_FOLDER"); }
const char* dax_device() { return std::getenv("PETPS_TEST_DAX_DEVICE"); }

std::vector<Backend> backends(bool (*is_wanted)(const Backend&)) {
  std::vector<Backend> all = {
      {"dram", false, Kind::kDram},        {"file_power", true, Kind::kFile},
      {"file_process", true, Kind::kFile}, {"borrowed", false, Kind::kDram},
      {"borrowed_dax", false, Kind::kDax}, {"fake_device", true, Kind::kDax}};
  if (dax_folder() != nullptr) all.push_back({"dax", true, Kind::kDax});
  if (dax_device() != nullptr) all.push_back({"device", true, Kind::kDax});
  std::erase_if(all, [&](const Backend& backend) { return !is_wanted(backend); });
  return all;
}
constexpr uint64_t kStartBytes = 64 * 1024;
constexpr uint64_t kRoomBytes = 16 * 1024 * 1024;
constexpr uint64_t kDeviceAlignment = 4 * 1024 * 1024;  // of the fake device

class MediaContract : public testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    if (name() == "fake_device") make_fake_device();
    if (name() == "device") path_ = dax_device();
    if (name() == "dax")
      path_ = std::string(dax_folder()) + "/petps_contract_" + std::to_string(getpid());
  }
  void TearDown() override {
    if (name() == "dax") unlink(path_.c_str());
    file_calls() = system_file_calls();
  }
  bool is_device() const { return name().ends_with("device"); }
  void make_fake_device() {
    static std::string path;
    path = path_;
    ASSERT_EQ(close(open(path_.c_str(), O_CREAT | O_RDWR, 0600)), 0);
    ASSERT_EQ(truncate(path_.c_str(), kRoomBytes), 0);
    file_calls().device = [](const std::string& name) {
      return name == path ? std::optional(Device{kRoomBytes, kDeviceAlignment}) : std::nullopt;
    };
  }
  std::string name() const { return GetParam().name; }

  Options options() const {
    Options options;
    options.reserve_bytes = kRoomBytes;
    options.replace = true;
    if (GetParam().persistent) options.path = path_;
    if (name() == "file_process") options.durability = Durability::kProcess;
    return options;
  }

  std::unique_ptr<Media> make() {
    if (name().starts_with("borrowed")) {
      borrowed_.assign(kRoomBytes + kLineBytes, std::byte{0xee});  // grow() must zero it
      std::byte* start = borrowed_.data();
      start += (kLineBytes - reinterpret_cast<uintptr_t>(start) % kLineBytes) % kLineBytes;
      std::memset(start, 0, kStartBytes);
      return Media::borrow(start, kStartBytes, kRoomBytes, nullptr, GetParam().kind);
    }
    auto media = Media::create(options(), kStartBytes);
    EXPECT_TRUE(media.ok()) << media.status().to_string();
    return media.ok() ? std::move(media).value() : nullptr;
  }

  static bool is_zero(const Media& media, uint64_t from, uint64_t to) {
    return std::all_of(media.base() + from, media.base() + to,
                       [](std::byte byte) { return byte == std::byte{0}; });
  }

  testing_support::TemporaryFolder folder_;
  std::string path_ = folder_.path("pool");
  std::vector<std::byte> borrowed_;
};

TEST_P(MediaContract, ReportsItsProperties) {
  auto media = make();
  EXPECT_EQ(media->kind(), GetParam().kind);
  EXPECT_EQ(media->size(), kStartBytes);
  EXPECT_EQ(media->is_volatile(), GetParam().kind == Kind::kDram);
  EXPECT_FALSE(media->read_only());
  EXPECT_FALSE(media->failed());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(media->base()) % kLineBytes, 0u);
  EXPECT_EQ(media->is_device(), is_device());
  if (name() == "dax" || is_device()) {
    EXPECT_EQ(media->durability(), Durability::kPower);
  }
}

TEST_P(MediaContract, IsZeroAtFirstAndKeepsStores) {
  auto media = make();
  EXPECT_TRUE(is_zero(*media, 0, kStartBytes));
  std::memset(media->base(), 0x5a, kStartBytes);
  Flusher flusher(*media);
  flusher.flush(media->base(), kStartBytes, Site::kRow);
  EXPECT_TRUE(flusher.drain(Site::kFilled).ok());
  EXPECT_EQ(media->base()[kStartBytes - 1], std::byte{0x5a});
}

TEST_P(MediaContract, CopyCopiesExactlyTheBytes) {
  auto media = make();
  Flusher flusher(*media);
  constexpr size_t kMargin = 128;
  std::vector<std::byte> source(1200);
  std::mt19937_64 random(11);
  for (std::byte& byte : source) byte = static_cast<std::byte>(random());
  std::vector<std::byte> expected(4096);
  const std::vector<size_t> lengths = {0,   1,   7,   8,   15,  16,  63,  64,   65,  127,
                                       128, 129, 191, 192, 255, 256, 257, 271,  272, 319,
                                       320, 321, 384, 511, 512, 513, 577, 1024, 1087};
  for (size_t offset = 0; offset < 2 * kLineBytes; ++offset) {
    for (const size_t bytes : lengths) {
      const size_t from = (offset * 5 + bytes) % 64;  // covers every alignment of the source
      std::memset(media->base(), 0x11, expected.size());
      std::fill(expected.begin(), expected.end(), std::byte{0x11});
      std::copy_n(source.begin() + from, bytes, expected.begin() + kMargin + offset);
      flusher.copy(media->base() + kMargin + offset, source.data() + from, bytes, Site::kRow);
      ASSERT_EQ(std::memcmp(media->base(), expected.data(), expected.size()), 0)
          << "offset " << offset << " bytes " << bytes;
    }
  }
  EXPECT_TRUE(flusher.drain(Site::kFilled).ok());
}

TEST_P(MediaContract, CopyWithCrc32cCopiesAndReturnsTheChecksum) {
  auto media = make();
  Flusher flusher(*media);
  std::vector<std::byte> source(4096 + 64);
  std::mt19937_64 random(12);
  for (std::byte& byte : source) byte = static_cast<std::byte>(random());
  for (const size_t offset : {0, 8, 64, 72}) {
    for (const size_t bytes : {8, 64, 192, 200, 256, 320, 512, 520, 576, 1024, 4096}) {
      const size_t from = (offset + bytes) % 64;
      std::memset(media->base(), 0x11, 8192);
      EXPECT_EQ(
          flusher.copy_with_crc32c(media->base() + offset, source.data() + from, bytes, Site::kRow),
          base::crc32c(source.data() + from, bytes));
      ASSERT_TRUE(flusher.drain(Site::kFilled).ok());
      ASSERT_EQ(std::memcmp(media->base() + offset, source.data() + from, bytes), 0)
          << "offset " << offset << " bytes " << bytes;
      ASSERT_EQ(media->base()[offset + bytes], std::byte{0x11});
      if (offset > 0) {
        ASSERT_EQ(media->base()[offset - 1], std::byte{0x11});
      }
    }
  }
}

TEST_P(MediaContract, Copy16ChangesNothingElseInTheLine) {
  auto media = make();
  Flusher flusher(*media);
  std::memset(media->base(), 0x11, 128);
  const std::array<uint64_t, 2> value = {0x0123456789ABCDEF, 0xFEDCBA9876543210};
  flusher.copy_16(media->base() + 48, value.data(), Site::kRowHeader);
  ASSERT_TRUE(flusher.drain(Site::kFilled).ok());
  std::vector<std::byte> expected(128, std::byte{0x11});
  std::memcpy(expected.data() + 48, value.data(), sizeof value);
  EXPECT_EQ(std::memcmp(media->base(), expected.data(), expected.size()), 0);
}

TEST_P(MediaContract, GrowsInPlaceWithZeros) {
  auto media = make();
  std::byte* const base = media->base();
  base[kStartBytes - 1] = std::byte{7};
  uint64_t before = media->size();
  for (const uint64_t bytes :
       {uint64_t{68 * 1024}, uint64_t{1} << 20, (uint64_t{5} << 20) + 4096}) {
    ASSERT_TRUE(media->grow(bytes).ok());
    EXPECT_EQ(media->base(), base) << "the base never moves";
    EXPECT_GE(media->size(), bytes);
    EXPECT_TRUE(is_zero(*media, before, media->size()));
    media->base()[media->size() - 1] = std::byte{9};
    before = media->size();
  }
  EXPECT_EQ(base[kStartBytes - 1], std::byte{7});
  EXPECT_TRUE(media->grow(100).ok()) << "growing to less is no change";
  EXPECT_EQ(media->size(), before);
}

TEST_P(MediaContract, RefusesToGrowBeyondTheReservedRange) {
  auto media = make();
  const uint64_t room = media->reserved();  // for a device: at least its size
  const base::Status status = media->grow(room + 4096);
  EXPECT_EQ(status.code(), base::Code::kResourceExhausted);
  EXPECT_NE(status.message().find("reserve_bytes"), std::string::npos) << status.to_string();
  EXPECT_EQ(media->size(), kStartBytes);
  EXPECT_TRUE(media->grow(room).ok()) << "the medium is still usable";
}

class PersistentMedia : public MediaContract {};

TEST_P(PersistentMedia, AReopenedMediumHoldsWhatWasDrained) {
  uint64_t bytes = 0;
  {
    auto media = make();
    ASSERT_TRUE(media->grow(1 << 20).ok());
    Flusher flusher(*media);
    std::vector<std::byte> row(512, std::byte{3});
    flusher.copy(media->base() + 700'000, row.data(), row.size(), Site::kRow);
    ASSERT_TRUE(flusher.drain(Site::kFilled).ok());
    bytes = media->size();
  }
  auto reopened = Media::open(options());
  ASSERT_TRUE(reopened.ok()) << reopened.status().to_string();
  if (is_device()) {
    EXPECT_GT(reopened.value()->size(), bytes);
    std::memset(reopened.value()->base() + bytes, 0xee, kLineBytes);  // left by an earlier pool
  }
  reopened.value()->forget_beyond(bytes);
  EXPECT_EQ(reopened.value()->size(), bytes);
  EXPECT_EQ(reopened.value()->kind(), GetParam().kind);
  EXPECT_EQ(reopened.value()->base()[700'511], std::byte{3});
  EXPECT_EQ(reopened.value()->base()[700'512], std::byte{0});
  reopened.value()->expect_scan(0, bytes);
  reopened.value()->expect_scan(bytes - 100, 1 << 20);
  reopened.value()->expect_scan(bytes, 1);
  ASSERT_TRUE(reopened.value()->grow(2 << 20).ok()) << "an opened medium grows as well";
  EXPECT_TRUE(is_zero(*reopened.value(), bytes, 2 << 20));
}

TEST_P(PersistentMedia, ASyncOfALongRangeLosesNoStoreBesideIt) {
  constexpr uint64_t kLong = 4 << 20;
  constexpr uint64_t kRounds = 20;
  auto media = make();
  ASSERT_TRUE(media->grow(kLong).ok());
  std::byte* const base = media->base();
  const auto word = [base](uint64_t at) {
    return std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(base + at));
  };
  std::atomic<bool> is_over{false};
  uint64_t written = 0;
  std::thread writing([&] {
    while (!is_over.load() || written < kRounds) {
      ++written;
      for (uint64_t at = 0; at < kLong; at += 4096) word(at).store(written);
    }
  });
  for (uint64_t i = 0; i < kRounds; ++i)
    EXPECT_TRUE(media->sync_range(base, kLong, Site::kGrownSync).ok());
  is_over = true;
  writing.join();
  for (uint64_t at = 0; at < kLong; at += 4096) ASSERT_EQ(word(at).load(), written) << at;
  media->expect_sync(base, kLong);
  for (uint64_t at = 0; at < kLong; at += 4096) ASSERT_EQ(word(at).load(), written) << at;
}

TEST_P(PersistentMedia, AnotherWriterIsRefused) {
  auto media = make();
  const auto second = Media::open(options());
  EXPECT_EQ(second.status().code(), base::Code::kInUse);
  EXPECT_NE(second.status().message().find("is open in another process"), std::string::npos);
  media = nullptr;
  EXPECT_TRUE(Media::open(options()).ok());
}

TEST_P(PersistentMedia, CreateRefusesToReplaceContentUnlessAsked) {
  make()->base()[100] = std::byte{1};
  Options options = this->options();
  options.replace = false;
  const auto second = Media::create(options, kStartBytes);
  EXPECT_EQ(second.status().code(), base::Code::kAlreadyExists) << second.status().to_string();
  EXPECT_EQ(Media::open(options).value()->base()[100], std::byte{1});
  ASSERT_TRUE(Media::discard(path_).ok());
  EXPECT_EQ(Media::open(options).ok(), is_device());
  const auto third = Media::create(options, kStartBytes);
  ASSERT_TRUE(third.ok()) << third.status().to_string();
  EXPECT_EQ(third.value()->base()[100], std::byte{0});
}

class DeviceMedia : public MediaContract {};

TEST_P(DeviceMedia, CreateRefusesADeviceThatIsTooSmall) {
  const uint64_t room = make()->reserved();
  Options options = this->options();
  options.reserve_bytes = 2 * room;
  const auto large = Media::create(options, room + 4096);
  EXPECT_EQ(large.status().code(), base::Code::kResourceExhausted);
  EXPECT_NE(large.status().message().find("larger namespace (ndctl)"), std::string::npos)
      << large.status().to_string();
  EXPECT_TRUE(Media::create(options, room).ok());
}

struct RecordingObserver : Observer {
  std::vector<std::string> calls;
  base::Status drain_result;
  const std::byte* base = nullptr;
  uint64_t seen = 0;
  void on_store(const void* at, size_t bytes) override {
    std::memcpy(&seen, at, sizeof seen);  // the store must be visible by now
    note("store", at, bytes);
  }
  void on_flush(const void* at, size_t bytes, Site) override { note("flush", at, bytes); }
  base::Status on_drain(Site) override {
    calls.push_back("drain");
    return drain_result;
  }
  void note(const char* name, const void* at, size_t bytes) {
    calls.push_back(std::string(name) + " " +
                    std::to_string(static_cast<const std::byte*>(at) - base) + "+" +
                    std::to_string(bytes));
  }
};

TEST_P(MediaContract, TheObserverGetsStoresFlushesAndDrainsInOrder) {
  auto media = make();
  RecordingObserver observer;
  observer.base = media->base();
  media->set_observer(&observer);
  Flusher flusher(*media);
  for (const size_t bytes : {size_t{8}, size_t{512}}) {
    observer.calls.clear();
    std::vector<std::byte> row(bytes, std::byte{0x42});
    flusher.copy(media->base() + 128, row.data(), bytes, Site::kRow);
    EXPECT_EQ(observer.seen, 0x4242424242424242u);
    EXPECT_TRUE(flusher.drain(Site::kFilled).ok());
    const std::string range = " 128+" + std::to_string(bytes);
    EXPECT_EQ(observer.calls,
              (std::vector<std::string>{"store" + range, "flush" + range, "drain"}));
  }
  observer.calls.clear();
  media->base()[5] = std::byte{1};
  media->report_store(media->base() + 5, 1);
  flusher.flush(media->base() + 5, 1, Site::kEntry);
  EXPECT_EQ(observer.calls, (std::vector<std::string>{"store 5+1", "flush 5+1"}));
  media->set_observer(nullptr);
}

TEST_P(MediaContract, AfterAFailedDrainEveryDrainFails) {
  auto media = make();
  RecordingObserver observer;
  observer.base = media->base();
  observer.drain_result = base::Status(base::Code::kIoError, "the test makes this fail");
  media->set_observer(&observer);
  Flusher flusher(*media);
  Flusher other(*media);
  flusher.flush(media->base(), 8, Site::kRow);
  EXPECT_EQ(flusher.drain(Site::kFilled).message(), "the test makes this fail");
  EXPECT_TRUE(media->failed());
  observer.drain_result = base::Status();
  const base::Status later = other.drain(Site::kFilled);
  EXPECT_EQ(later.code(), base::Code::kIoError);
  EXPECT_NE(later.message().find("read-only until it is reopened"), std::string_view::npos)
      << later.to_string();
  media->set_observer(nullptr);
}

TEST(RealPersistentMemory, TakesPartInTheContract) {
  if (dax_folder() == nullptr && dax_device() == nullptr)
    GTEST_SKIP() << "no PETPS_TEST_DAX_FOLDER, no PETPS_TEST_DAX_DEVICE: `make lab` has both";
}

std::string name_of(const testing::TestParamInfo<Backend>& backend) { return backend.param.name; }
bool is_any(const Backend&) { return true; }
bool is_persistent(const Backend& backend) { return backend.persistent; }
bool is_device(const Backend& backend) {
  return std::string_view(backend.name).ends_with("device");
}

INSTANTIATE_TEST_SUITE_P(Backends, MediaContract, testing::ValuesIn(backends(is_any)), name_of);
INSTANTIATE_TEST_SUITE_P(Backends, PersistentMedia, testing::ValuesIn(backends(is_persistent)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Backends, DeviceMedia, testing::ValuesIn(backends(is_device)), name_of);

}  // namespace
}  // namespace petps::media
