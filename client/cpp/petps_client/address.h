// petps:// URLs.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace petps::client {

// Replicas of one model beyond this are a mistake in a configuration.
inline constexpr size_t kMaxAddresses = 64;

struct Address {
  std::string host;  // without brackets
  uint16_t port = 0;
  std::string text() const;  // "h1:7070", "[::1]:7070"
  bool operator==(const Address&) const = default;
};

struct Url {
  std::vector<Address> addresses;  // at least one
  std::string model;               // may be empty
};

// Errors: kInvalidArgument, naming the part that is wrong and the form that is expected.
base::Result<Url> parse_url(std::string_view url);
// One "host:port" of `whole`, which messages name.
base::Result<Address> parse_address(std::string_view whole, std::string_view text);

}  // namespace petps::client
