// The token that a client presents.
#pragma once

#include <string>

#include "base/status.h"
#include "petps_client/client.h"

namespace petps::client {

// Return Options::token, or the content of Options::token_file, which is read at each call so that
// a new token is used without a restart; "" if there is neither.
// Errors: kNotFound, kPermissionDenied, kIoError, kInvalidArgument (no token: names the file).
base::Result<std::string> read_token(const Options& options);

}  // namespace petps::client
