#include "base/peer.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <iterator>

namespace petps::base {

std::string host_of(std::string_view address) {
  std::string host(address.substr(0, address.rfind(':')));
  in6_addr v6{};
  if (host.size() < 2 || host.front() != '[') return host;
  const std::string inner = host.substr(1, host.size() - 2);
  const size_t end = inner.find('%');  // a link-local address names its interface: "fe80::1%eth0"
  const std::string scope = end == std::string::npos ? "" : inner.substr(end);
  if (inet_pton(AF_INET6, inner.substr(0, end).c_str(), &v6) != 1) return host;
  if (IN6_IS_ADDR_V4MAPPED(&v6)) return host;
  std::fill(std::begin(v6.s6_addr) + 8, std::end(v6.s6_addr), uint8_t{0});
  std::array<char, INET6_ADDRSTRLEN> text{};
  inet_ntop(AF_INET6, &v6, text.data(), text.size());
  return std::string("[") + text.data() + scope + "/64]";
}

}  // namespace petps::base
