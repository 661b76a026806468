// petps:// and petps+tls:// URLs and their parser.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "petps_client/client.h"

namespace petps::client {

// A URL with more replicas than this is a configuration error.
inline constexpr size_t kMaxAddresses = 64;

struct Address {
  std::string host;  // without brackets
  uint16_t port = 0;
  // Return "h1:7070" or "[::1]:7070".
  std::string text() const;
  bool operator==(const Address&) const = default;
};

struct Url {
  bool has_tls = false;            // of all addresses
  std::vector<Address> addresses;  // at least one
  std::string model;               // may be empty
  std::optional<OnUnavailable> on_unavailable = {};
};

// Parse a URL.
// Errors: kInvalidArgument; the message names the wrong part and the expected form.
base::Result<Url> parse_url(std::string_view url);
// Parse `text`, one "host:port" of the URL `whole`. Error messages quote `whole`.
base::Result<Address> parse_address(std::string_view whole, std::string_view text);

}  // namespace petps::client
