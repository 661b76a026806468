#include "petps_client/host.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"

namespace petps::client {

namespace {

// How long the addresses of a name are used: new servers of a service get pulls after this time.
constexpr uint64_t kRefreshNs = 30'000'000'000;
// The same while a server of the name is dead. Its successor has another address.
constexpr uint64_t kRefreshAfterFailureNs = 1'000'000'000;

bool is_same(const SocketAddress& a, const SocketAddress& b) {
  return a.size == b.size && std::memcmp(&a.bytes, &b.bytes, a.size) == 0;
}

bool is_before(const SocketAddress& a, const SocketAddress& b) {
  if (a.size != b.size) return a.size < b.size;
  return std::memcmp(&a.bytes, &b.bytes, a.size) < 0;
}

// Return whether each address is a server: a family has several. Sort the addresses and remove
// repeated ones, because name servers rotate them.
bool are_servers(std::vector<SocketAddress>& addresses) {
  std::sort(addresses.begin(), addresses.end(), is_before);
  addresses.erase(std::unique(addresses.begin(), addresses.end(), is_same), addresses.end());
  if (addresses.size() > kMaxAddresses) addresses.resize(kMaxAddresses);
  const auto of_ipv4 = std::count_if(addresses.begin(), addresses.end(), [](const auto& address) {
    return address.bytes.ss_family == AF_INET;
  });
  return of_ipv4 > 1 || addresses.size() - static_cast<size_t>(of_ipv4) > 1;
}

}  // namespace

Host::Host(Address address, HostLookup::Resolve resolve, Make make)
    : address_(std::move(address)),
      make_(std::move(make)),
      lookup_(address_, std::move(resolve)),
      single_(make_(address_, nullptr)) {}

RemoteServers Host::servers() const {
  const std::lock_guard lock(mutex_);
  if (places_.empty()) return {single_};
  RemoteServers servers;
  for (const Place& place : places_) servers.push_back(place.server);
  return servers;
}

uint64_t Host::refresh_due_ns() const {
  if (lookup_.is_numeric()) return UINT64_MAX;
  const std::lock_guard lock(mutex_);
  if (refreshed_at_ns_ == 0) return 0;
  const bool has_dead =
      places_.empty() ? single_->is_dead()
                      : std::any_of(places_.begin(), places_.end(),
                                    [](const Place& place) { return place.server->is_dead(); });
  return refreshed_at_ns_ + (has_dead ? kRefreshAfterFailureNs : kRefreshNs);
}

bool Host::refresh(const Deadline& deadline) {
  if (refresh_due_ns() > base::monotonic_ns()) return false;
  lookup_.forget();
  auto found = lookup_.addresses(deadline);
  const std::lock_guard lock(mutex_);
  refreshed_at_ns_ = base::monotonic_ns();
  if (!found.ok() || found.value().empty()) return false;
  std::vector<SocketAddress> addresses = std::move(found).value();
  std::vector<Place> places;
  if (are_servers(addresses)) {
    for (const SocketAddress& at : addresses) {
      const auto known = std::find_if(places_.begin(), places_.end(),
                                      [&](const Place& place) { return is_same(place.at, at); });
      places.push_back(known != places_.end() ? *known : Place{at, make_(address_, &at)});
    }
  }
  const bool is_changed =
      !std::equal(places.begin(), places.end(), places_.begin(), places_.end(),
                  [](const Place& a, const Place& b) { return a.server == b.server; });
  places_ = std::move(places);
  return is_changed;
}

}  // namespace petps::client
