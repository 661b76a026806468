// Creating a table whose rows could never all fit is refused, and the message has the numbers.
#include <filesystem>

#include "media/file.h"
#include "memory_pool.h"

namespace petps::pool {
namespace {

using base::Code;
using testing_support::spec;

class CapacityLimit : public testing::Test {
 protected:
  CapacityLimit() : path_(testing::TempDir() + "/petps_room_" + std::to_string(getpid())) {
    std::filesystem::remove(path_);
    Options options;
    options.media.path = path_;
    options.unit_bytes = kTestUnitBytes;
    pool_ = std::move(Pool::create(options).value());
    EXPECT_TRUE(pool_->create_instance("model", "model@1", 2).ok());
  }
  ~CapacityLimit() override {
    media::file_calls() = media::system_file_calls();
    pool_.reset();
    std::filesystem::remove(path_);
  }

  std::string path_;
  std::unique_ptr<Pool> pool_;
};

TEST_F(CapacityLimit, ACapacityBeyondTheFileSystemIsRefused) {
  const uint64_t disk = pool_->medium().largest_size();
  ASSERT_LT(disk, uint64_t{1} << 50) << "this file system reports its size";
  const auto result = pool_->create_table(spec("t", disk / 64, 64));
  ASSERT_EQ(result.status().code(), Code::kResourceExhausted) << result.status().to_string();
  for (const std::string& text :
       {std::string("table 't'"), std::to_string(disk / 64), path_,
        std::to_string(disk >> 30) + " GiB in all", std::string("larger disk")})
    EXPECT_NE(result.status().message().find(text), std::string_view::npos)
        << result.status().to_string() << " does not contain " << text;
  EXPECT_TRUE(pool_->tables().empty());
  EXPECT_TRUE(pool_->create_table(spec("t", 1000)).ok()) << "the name is still free";
}

// The space that is free now does not count: a table takes its space as rows come.
TEST_F(CapacityLimit, ACapacityBelowTheSizeOfTheFileSystemIsAccepted) {
  const uint64_t disk = pool_->medium().largest_size();
  const uint64_t row_bytes = 16384;
  const uint64_t capacity = disk / 10 * 9 / (row_bytes + 512);
  const auto result = pool_->create_table(spec("t", capacity, row_bytes));
  EXPECT_TRUE(result.ok()) << result.status().to_string();
}

TEST_F(CapacityLimit, AnUnknownSizeOfTheFileSystemRefusesNothing) {
  media::file_calls().before = [](media::Call call) {
    return call == media::Call::kStatFileSystem ? ENOSYS : 0;
  };
  EXPECT_EQ(pool_->medium().largest_size(), ~uint64_t{0});
  EXPECT_TRUE(pool_->create_table(spec("t", 1000)).ok());
}

}  // namespace
}  // namespace petps::pool
