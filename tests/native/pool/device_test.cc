// A pool on a device-DAX device, simulated by an ordinary file whose space holds what an earlier
// pool left. Does not cover a real device (tests/lab).
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>

#include "media/file.h"
#include "memory_pool.h"
#include "pool/slots.h"

namespace petps::pool {
namespace {

constexpr uint64_t kDeviceBytes = uint64_t{8} << 20;

class DevicePool : public testing::Test {
 protected:
  DevicePool() {
    path() = testing::TempDir() + "/petps_device_" + std::to_string(getpid());
    std::FILE* file = std::fopen(path().c_str(), "wb");
    const std::vector<std::byte> garbage(kDeviceBytes, std::byte{0xEE});
    EXPECT_EQ(std::fwrite(garbage.data(), 1, garbage.size(), file), garbage.size());
    std::fclose(file);
    media::file_calls().device = [](const std::string& name) {
      return name == path() ? std::optional(media::Device{kDeviceBytes, 4096}) : std::nullopt;
    };
    options_.media.path = path();
    options_.unit_bytes = kTestUnitBytes;
  }
  ~DevicePool() override {
    media::file_calls() = media::system_file_calls();
    std::filesystem::remove(path());
  }
  static std::string& path() {
    static std::string path;
    return path;
  }
  std::unique_ptr<Pool> create() {
    options_.media.replace = true;
    auto pool = Pool::create(options_);
    EXPECT_TRUE(pool.ok()) << pool.status().to_string();
    EXPECT_TRUE(pool.value()->create_instance("model", "model@1", 2).ok());
    return std::move(pool).value();
  }
  // Check that a table's buckets are zero: a stale entry would be a key that no caller wrote.
  static void expect_empty(Pool& pool, const TableRecord& table) {
    const auto* words = reinterpret_cast<const uint64_t*>(pool.at(table.bucket_offset));
    for (uint64_t i = 0; i < table.bucket_count * 8; ++i) ASSERT_EQ(words[i], 0u) << i;
  }

  Options options_;
};

TEST_F(DevicePool, CreateRefusesToOverwriteOtherDataUnlessAsked) {
  const auto refused = Pool::create(options_);
  EXPECT_EQ(refused.status().code(), base::Code::kAlreadyExists);
  EXPECT_NE(refused.status().message().find("--replace"), std::string_view::npos);
  create();
}

TEST_F(DevicePool, NewSpaceIsZeroWhateverTheDeviceHeld) {
  uint64_t size = 0;
  {
    auto pool = create();
    const auto table = pool->create_table(testing_support::spec("first", 1000));
    ASSERT_TRUE(table.ok()) << table.status().to_string();
    expect_empty(*pool, table.value());
    size = pool->medium().size();
    EXPECT_LT(size, kDeviceBytes);
  }
  auto pool = Pool::open(options_);
  ASSERT_TRUE(pool.ok()) << pool.status().to_string();
  EXPECT_TRUE(pool.value()->medium().is_device());
  EXPECT_EQ(pool.value()->medium().size(), size) << "the rest of the device is not the pool's";
  ASSERT_TRUE(pool.value()->begin_writing().ok());
  const auto table = pool.value()->create_table(testing_support::spec("second", 1000));
  ASSERT_TRUE(table.ok()) << table.status().to_string();
  expect_empty(*pool.value(), table.value());
}

TEST_F(DevicePool, AFullDeviceIsAnErrorAndThePoolStaysUsable) {
  auto pool = create();
  const auto table = pool->create_table(testing_support::spec("large", 4'000'000));
  EXPECT_EQ(table.status().code(), base::Code::kResourceExhausted);
  EXPECT_NE(table.status().message().find("larger namespace (ndctl)"), std::string_view::npos)
      << table.status().to_string();
  EXPECT_TRUE(pool->create_table(testing_support::spec("small", 1000)).ok());
}

}  // namespace
}  // namespace petps::pool
