#include "petps_client/token.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "wire/wire.h"

namespace petps::client {

using base::Code;
using base::Result;
using base::Status;

namespace {

bool is_blank(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

Code code_of(int error_number) {
  if (error_number == ENOENT) return Code::kNotFound;
  return error_number == EACCES ? Code::kPermissionDenied : Code::kIoError;
}

}  // namespace

Result<std::string> read_token(const Options& options) {
  if (options.token_file.empty()) return options.token;
  const std::string what = "the token's file " + options.token_file;
  const int file = ::open(options.token_file.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return base::errno_status(code_of(errno), what, errno);
  std::array<char, wire::kMaxNameBytes + 2> bytes;  // room for a line's end, and one more
  std::string token;
  ssize_t n = 1;
  while (n != 0 && token.size() < bytes.size()) {  // a pipe may give it in parts
    n = ::read(file, bytes.data(), bytes.size() - token.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) break;
    token.append(bytes.data(), static_cast<size_t>(n));
  }
  const int error = errno;
  ::close(file);
  if (n < 0) return base::errno_status(Code::kIoError, what, error);
  while (!token.empty() && is_blank(token.back())) token.pop_back();
  while (!token.empty() && is_blank(token.front())) token.erase(0, 1);
  if (token.empty() || token.size() > wire::kMaxNameBytes) {
    return Status(Code::kInvalidArgument, what + " must have one token of at most " +
                                              std::to_string(wire::kMaxNameBytes) + " bytes; it " +
                                              (token.empty() ? "is empty" : "is longer"));
  }
  return token;
}

}  // namespace petps::client
