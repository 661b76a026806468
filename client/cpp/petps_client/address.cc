#include "petps_client/address.h"

#include <algorithm>
#include <charconv>

#include "base/printable.h"
#include "petps_client/client.h"
#include "wire/wire.h"

namespace petps::client {
namespace {

using base::Code;
using base::Result;
using base::Status;

constexpr std::string_view kScheme = "petps://";
constexpr std::string_view kTlsScheme = "petps+tls://";

Status url_error(std::string_view url, std::string_view reason) {
  std::string text = "'";
  text.append(base::printable(url)).append("': ").append(reason);
  text.append("; expected petps://host:7070,host:7070/model, or petps+tls:// with TLS");
  return Status(Code::kInvalidArgument, std::move(text));
}

// Parse "name=value&name=value" after the '?' of a URL.
Status parse_options(std::string_view url, std::string_view text, Url& parsed) {
  constexpr std::string_view kOnUnavailable = "on_unavailable=";
  for (bool has_more = true; has_more;) {
    const size_t end = text.find('&');
    has_more = end != std::string_view::npos;
    const std::string_view option = text.substr(0, end);
    if (has_more) text = text.substr(end + 1);
    if (option == "on_unavailable=default") {
      parsed.on_unavailable = OnUnavailable::kDefault;
    } else if (option == "on_unavailable=error") {
      parsed.on_unavailable = OnUnavailable::kError;
    } else if (option.starts_with(kOnUnavailable)) {
      return url_error(url, "on_unavailable must be 'error' or 'default', got '" +
                                std::string(option.substr(kOnUnavailable.size())) + "'");
    } else {
      return url_error(url, "the option '" + std::string(option) +
                                "' is unknown; the only option is on_unavailable");
    }
  }
  return {};
}

}  // namespace

std::string Address::text() const {
  const bool is_ipv6 = host.find(':') != std::string::npos;
  std::string text = is_ipv6 ? "[" + host + "]" : host;
  return text.append(":").append(std::to_string(port));
}

Result<Address> parse_address(std::string_view url, std::string_view text) {
  Address address;
  address.port = kDefaultPort;
  std::string_view port;
  if (text.starts_with('[')) {
    const size_t end = text.find(']');
    if (end == std::string_view::npos) return url_error(url, "'[' without ']'");
    address.host = text.substr(1, end - 1);
    port = text.substr(end + 1);
  } else {
    const size_t colon = text.find(':');
    address.host = text.substr(0, colon);
    port = colon == std::string_view::npos ? std::string_view() : text.substr(colon);
    if (port.find(':', 1) != std::string_view::npos) {
      return url_error(url, "an IPv6 address must be in brackets: [::1]:7070");
    }
  }
  if (address.host.empty()) return url_error(url, "an address has no host");
  // A server may have sent it, and it is shown in logs, metrics and errors.
  if (!std::ranges::all_of(address.host, [](char c) { return c > ' ' && c <= '~'; }))
    return url_error(url, "a host has only visible ASCII characters");
  if (port.empty()) return address;
  const char* end = port.data() + port.size();
  const auto [stop, error] = std::from_chars(port.data() + 1, end, address.port);
  if (port[0] != ':' || error != std::errc() || stop != end || address.port == 0) {
    return url_error(url, "the port must be a number from 1 to 65535");
  }
  return address;
}

Result<Url> parse_url(std::string_view url) {
  Url parsed;
  parsed.has_tls = url.starts_with(kTlsScheme);
  if (!parsed.has_tls && !url.starts_with(kScheme))
    return url_error(url, "it must start with petps:// or petps+tls://");
  std::string_view rest = url.substr((parsed.has_tls ? kTlsScheme : kScheme).size());
  if (const size_t question = rest.find('?'); question != std::string_view::npos) {
    PETPS_RETURN_IF_ERROR(parse_options(url, rest.substr(question + 1), parsed));
    rest = rest.substr(0, question);
  }
  const size_t slash = rest.find('/');
  if (slash != std::string_view::npos) {
    parsed.model = rest.substr(slash + 1);
    rest = rest.substr(0, slash);
  }
  if (parsed.model.find('/') != std::string::npos)
    return url_error(url, "a model's name has no '/'");
  if (parsed.model.size() > wire::kMaxNameBytes)
    return url_error(url, "the model's name is longer than 255 bytes");
  for (bool has_more = true; has_more;) {
    const size_t comma = rest.find(',');
    has_more = comma != std::string_view::npos;
    auto address = parse_address(url, rest.substr(0, comma));
    if (!address.ok()) return address.status();
    parsed.addresses.push_back(std::move(address).value());
    if (has_more) rest = rest.substr(comma + 1);
  }
  if (parsed.addresses.size() > kMaxAddresses) return url_error(url, "more than 64 addresses");
  return parsed;
}

}  // namespace petps::client
