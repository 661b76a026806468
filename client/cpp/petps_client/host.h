// Hosts: the servers behind the name in an address. A name may have several addresses, such as that
// of a headless service: then each address is a server.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "petps_client/dial.h"
#include "petps_client/remote_server.h"
#include "petps_client/routing.h"

namespace petps::client {

// One "host:port" of a URL or of a shard map.
//
// A name with at most one IPv4 and one IPv6 address is one server, which resolves the name itself
// and may be reached at either address. With more addresses of a family, each address is a server
// of its own: with its own connections, catalogue and failures. They all have the name's port, and
// their certificates must have the name.
// Threads: all methods from any.
class Host {
 public:
  // Makes a server; `at` is its socket address, or null if it resolves the name itself.
  using Make =
      std::function<std::shared_ptr<RemoteServer>(const Address&, const SocketAddress* at)>;
  Host(Address address, HostLookup::Resolve resolve, Make make);

  const Address& address() const { return address_; }
  // Return the servers by the last result; at least one.
  RemoteServers servers() const;
  // Look the name up if the last result is old, or if a server failed since. Servers whose address
  // is still there stay as they are. A failed lookup changes nothing. Return whether servers()
  // changed.
  bool refresh(const Deadline& deadline);
  // Return when refresh() is due, by base::monotonic_ns; UINT64_MAX: the host is no name.
  uint64_t refresh_due_ns() const;

 private:
  struct Place {
    SocketAddress at;
    std::shared_ptr<RemoteServer> server;
  };

  const Address address_;
  const Make make_;
  HostLookup lookup_;
  const std::shared_ptr<RemoteServer> single_;  // of a name that is one server
  mutable std::mutex mutex_;                    // guards everything below
  std::vector<Place> places_;                   // by address; empty: single_ is the server
  uint64_t refreshed_at_ns_ = 0;                // 0: never
};

}  // namespace petps::client
