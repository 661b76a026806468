#include "base/status.h"

#include <iterator>
#include <system_error>

namespace petps::base {

std::string_view code_name(Code code) {
  static constexpr std::string_view kNames[] = {"OK",
                                                "INVALID_ARGUMENT",
                                                "NOT_FOUND",
                                                "ALREADY_EXISTS",
                                                "RESOURCE_EXHAUSTED",
                                                "FAILED_PRECONDITION",
                                                "UNAVAILABLE",
                                                "DEADLINE_EXCEEDED",
                                                "DATA_LOSS",
                                                "PERMISSION_DENIED",
                                                "STALE",
                                                "WRONG_SHARD",
                                                "UNIMPLEMENTED",
                                                "INTERNAL",
                                                "IO_ERROR",
                                                "IN_USE",
                                                "UNAUTHENTICATED"};
  static_assert(std::size(kNames) == static_cast<size_t>(Code::kUnauthenticated) + 1,
                "a name for each code");
  const auto number = static_cast<size_t>(code);
  // A newer peer may send a code that this version does not know.
  return number < std::size(kNames) ? kNames[number] : "UNKNOWN";
}

Status::Status(Code code, std::string message) {
  if (code == Code::kOk) return;  // OK carries no message
  rep_ = std::make_unique<Rep>(Rep{code, std::move(message)});
}

std::string Status::to_string() const {
  std::string text(code_name(code()));
  if (!ok() && !rep_->message.empty()) {
    text += ": ";
    text += rep_->message;
  }
  return text;
}

Status errno_status(Code code, std::string action, int error_number) {
  // Unlike strerror, system_category is thread-safe.
  return Status(code, action + ": " + std::system_category().message(error_number));
}

}  // namespace petps::base
