// Status and Result: how every native room reports an error.
//
// A Status is one pointer; OK is null, so the data path returns it for free.
// Codes travel on the wire and are listed in FORMAT.md of room wire: never renumber.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace petps::base {

enum class Code : uint16_t {  // never renumber: these travel on the wire
  kOk = 0,
  kInvalidArgument = 1,     // the caller's input is wrong; a retry changes nothing
  kNotFound = 2,            // no such table, file, instance
  kAlreadyExists = 3,       // a table, pool or instance of that name exists
  kResourceExhausted = 4,   // table full, disk full, a limit reached
  kFailedPrecondition = 5,  // wrong state: read-only pool, delta-fed table
  kUnavailable = 6,         // peer away, connection closed: retry
  kDeadlineExceeded = 7,    // the caller's deadline passed
  kDataLoss = 8,            // checksum mismatch, torn file, corrupt chunk
  kPermissionDenied = 9,
  kStale = 10,            // the server is older than min_version
  kWrongShard = 11,       // the server does not own a key of the request
  kUnimplemented = 12,    // unknown opcode or newer format
  kInternal = 13,         // our own mistake
  kIoError = 14,          // a system call failed: errno is in the message
  kInUse = 15,            // another process has the pool open
  kUnauthenticated = 16,  // no credential, or one that is unknown, expired or revoked
};

std::string_view code_name(Code code);  // "INVALID_ARGUMENT"

class [[nodiscard]] Status {
 public:
  Status() = default;  // OK
  Status(Code code, std::string message);
  Status(const Status& other) : rep_(other.rep_ ? std::make_unique<Rep>(*other.rep_) : nullptr) {}
  Status& operator=(const Status& other) {
    if (this != &other) rep_ = other.rep_ ? std::make_unique<Rep>(*other.rep_) : nullptr;
    return *this;
  }
  Status(Status&&) noexcept = default;
  Status& operator=(Status&&) noexcept = default;

  bool ok() const { return rep_ == nullptr; }
  Code code() const { return rep_ ? rep_->code : Code::kOk; }
  std::string_view message() const { return rep_ ? std::string_view(rep_->message) : ""; }
  std::string to_string() const;  // "INVALID_ARGUMENT: dim 0 is outside 1..4096"

 private:
  struct Rep {
    Code code;
    std::string message;
  };
  std::unique_ptr<Rep> rep_;
};

// Return a Status of `code` with errno's text in its message: "open /x: No such file or directory".
Status errno_status(Code code, std::string action, int error_number);

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}         // NOLINT: implicit by intent
  Result(Status status) : state_(std::move(status)) {}  // NOLINT: implicit by intent
  bool ok() const { return state_.index() == 0; }
  Status status() const { return ok() ? Status() : std::get<1>(state_); }
  T& value() & { return std::get<0>(state_); }
  const T& value() const& { return std::get<0>(state_); }
  T&& value() && { return std::get<0>(std::move(state_)); }
  T* operator->() { return &std::get<0>(state_); }
  T& operator*() & { return std::get<0>(state_); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace petps::base

// Evaluate `expression` and return its Status from the calling function unless it is OK.
#define PETPS_RETURN_IF_ERROR(expression)                                        \
  do {                                                                           \
    if (::petps::base::Status petps_status_ = (expression); !petps_status_.ok()) \
      return petps_status_;                                                      \
  } while (false)
