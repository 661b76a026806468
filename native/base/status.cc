#include "base/status.h"

#include <system_error>

namespace petps::base {

std::string_view code_name(Code code) {
  switch (code) {
    case Code::kOk:
      return "OK";
    case Code::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case Code::kNotFound:
      return "NOT_FOUND";
    case Code::kAlreadyExists:
      return "ALREADY_EXISTS";
    case Code::kResourceExhausted:
      return "RESOURCE_EXHAUSTED";
    case Code::kFailedPrecondition:
      return "FAILED_PRECONDITION";
    case Code::kUnavailable:
      return "UNAVAILABLE";
    case Code::kDeadlineExceeded:
      return "DEADLINE_EXCEEDED";
    case Code::kDataLoss:
      return "DATA_LOSS";
    case Code::kPermissionDenied:
      return "PERMISSION_DENIED";
    case Code::kStale:
      return "STALE";
    case Code::kWrongShard:
      return "WRONG_SHARD";
    case Code::kUnimplemented:
      return "UNIMPLEMENTED";
    case Code::kInternal:
      return "INTERNAL";
    case Code::kIoError:
      return "IO_ERROR";
    case Code::kInUse:
      return "IN_USE";
  }
  return "UNKNOWN";  // a newer peer may send a code that this version does not know
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

Status errno_status(Code code, std::string what, int error_number) {
  what += ": ";
  what += std::system_category().message(error_number);  // thread-safe, unlike strerror
  return Status(code, std::move(what));
}

}  // namespace petps::base
