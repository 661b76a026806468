#include "base/status.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <vector>

namespace petps::base {
namespace {

TEST(Status, OkIsNullAndHasNoMessage) {
  static_assert(sizeof(Status) == sizeof(void*), "an OK costs the data path one null pointer");
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), Code::kOk);
  EXPECT_EQ(status.message(), "");
  EXPECT_EQ(status.to_string(), "OK");
  EXPECT_TRUE(Status(Code::kOk, "ignored").ok());
}

TEST(Status, CarriesCodeAndMessageThroughCopyAndMove) {
  Status status(Code::kInvalidArgument, "dim 0 is outside 1..4096");
  EXPECT_EQ(status.to_string(), "INVALID_ARGUMENT: dim 0 is outside 1..4096");
  Status copy = status;
  EXPECT_EQ(copy.message(), status.message());
  const Status moved = std::move(copy);
  EXPECT_EQ(moved.code(), Code::kInvalidArgument);
  copy = Status();
  EXPECT_TRUE(copy.ok());
  status = moved;
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
}

TEST(Status, NumbersAreNeverRenumbered) {  // they travel on the wire
  EXPECT_EQ(static_cast<int>(Code::kResourceExhausted), 4);
  EXPECT_EQ(static_cast<int>(Code::kStale), 10);
  EXPECT_EQ(static_cast<int>(Code::kWrongShard), 11);
  EXPECT_EQ(static_cast<int>(Code::kIoError), 14);
}

TEST(Status, EveryCodeHasItsOwnName) {
  std::vector<std::string> names;
  for (int code = 0; code <= 14; ++code) {
    names.emplace_back(code_name(static_cast<Code>(code)));
    EXPECT_NE(names.back(), "UNKNOWN");
  }
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::unique(names.begin(), names.end()), names.end());
  EXPECT_EQ(code_name(static_cast<Code>(999)), "UNKNOWN");
}

TEST(Status, ErrnoTextIsInTheMessage) {
  EXPECT_EQ(errno_status(Code::kIoError, "open rows.pool", ENOENT).to_string(),
            "IO_ERROR: open rows.pool: No such file or directory");
}

Result<int> half(int number) {
  if (number % 2 != 0) return Status(Code::kInvalidArgument, "odd");
  return number / 2;
}

Status check_even(int number) {
  PETPS_RETURN_IF_ERROR(half(number).status());
  return Status();
}

TEST(Result, HoldsAValueOrAStatus) {
  EXPECT_TRUE(half(4).ok());
  EXPECT_EQ(half(4).value(), 2);
  EXPECT_EQ(half(3).status().message(), "odd");
  EXPECT_TRUE(check_even(2).ok());
  EXPECT_EQ(check_even(1).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace petps::base
