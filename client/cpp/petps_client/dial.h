// From a host's name to a connected socket, by a deadline. A thread of its own resolves names, and
// the client tries the addresses of a name in parallel.
#pragma once

#include <sys/socket.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "petps_client/address.h"
#include "petps_client/client.h"
#include "petps_client/deadline.h"

namespace petps::client {

// One address for connect().
struct SocketAddress {
  sockaddr_storage bytes{};
  socklen_t size = 0;
};

// The socket addresses of one host and port.
//
// getaddrinfo has no deadline and cannot be cancelled, so it runs on a thread of its own, one
// lookup at a time. A caller waits for it until its deadline at most. The thread may outlive this
// object.
// Threads: all methods from any.
class HostLookup {
 public:
  // Returns getaddrinfo's code, 0 for success. Tests supply their own.
  using Resolve = std::function<int(const Address&, std::vector<SocketAddress>&)>;
  explicit HostLookup(Address address, Resolve resolve = nullptr);
  // A host whose socket address is known.
  HostLookup(Address address, const SocketAddress& at);
  // Return whether the host needs no lookup.
  bool is_numeric() const { return !numeric_.empty(); }

  // Return the socket addresses. Numeric hosts and recent results need no lookup. If no newer
  // result arrives in time, return an older one.
  // Errors: kUnavailable (the name is unknown), kDeadlineExceeded; both name the host.
  base::Result<std::vector<SocketAddress>> addresses(const Deadline& deadline);
  // Look the name up again at the next call, because no address of the last result could be
  // reached.
  void forget();

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_running = false;
    uint64_t finished = 0;  // number of finished lookups
    int failure = 0;        // code of the last lookup
    bool is_recent = false;
    uint64_t resolved_at_ns = 0;
    std::vector<SocketAddress> addresses;  // by the last lookup that succeeded
  };
  void start();

  const Address address_;
  const Resolve resolve_;
  const std::vector<SocketAddress> numeric_;  // empty: the host is a name
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

// Return the resolver that asks Options::resolve; null if that is empty.
HostLookup::Resolve resolver_of(const Options& options);
// Return the numeric address, without the port: "10.0.0.1".
std::string text_of(const SocketAddress& address);

// Return a connected, non-blocking socket. Begin the addresses one after another, each a moment
// after the previous one or as soon as that failed. The first connection wins.
// Errors: kUnavailable (all refused; names `peer` and the last reason), kDeadlineExceeded.
base::Result<int> connect_any(const std::string& peer, std::span<const SocketAddress> addresses,
                              const Deadline& deadline);

}  // namespace petps::client
