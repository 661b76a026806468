// Whom an address of a connection belongs to.
#pragma once

#include <string>
#include <string_view>

namespace petps::base {

// Return whom `address` ("10.0.0.7:51234", "[::1]:51234") belongs to: it without the port, and of
// IPv6 only the first 64 bits, because whoever has one such address usually has all with these
// bits. A link-local address keeps its interface ("[fe80::%eth0/64]").
std::string host_of(std::string_view address);

// In the text of the UNAUTHENTICATED of servers that do not know a token.
inline constexpr std::string_view kUnknownToken = "the token is not known to this server";

// At the beginning of the UNAUTHENTICATED of servers that were shown no credential.
inline constexpr std::string_view kNeedsCredential = "this server needs a ";

// In the text of the RESOURCE_EXHAUSTED that servers send after several failed logins of a peer.
inline constexpr std::string_view kFailedLogins = " failed logins from ";

}  // namespace petps::base
