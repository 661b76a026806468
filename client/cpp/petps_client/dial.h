// From a host's name to a connected socket, by a deadline. Names are resolved off the calling
// thread, and the addresses of a name are tried in parallel.
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
#include "petps_client/deadline.h"

namespace petps::client {

// One address for connect().
struct SocketAddress {
  sockaddr_storage bytes{};
  socklen_t size = 0;
};

// The socket addresses of one host and port.
//
// getaddrinfo has no deadline and cannot be cancelled, so it runs on a thread of its own,
// one lookup at a time. A caller waits for it no longer than its deadline. The thread may
// outlive this object.
// Threads: all methods from any.
class HostLookup {
 public:
  // Returns getaddrinfo's code, 0 for success. Tests supply their own.
  using Resolve = std::function<int(const Address&, std::vector<SocketAddress>&)>;
  explicit HostLookup(Address address, Resolve resolve = nullptr);

  // Return the socket addresses. Numeric hosts and recent results cost nothing. An older result
  // is used when no newer one arrives in time.
  // Errors: kUnavailable (the name is unknown), kDeadlineExceeded; both name the host.
  base::Result<std::vector<SocketAddress>> addresses(const Deadline& deadline);
  // Forget that the last result is recent, because no address of it could be reached.
  void forget();

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_running = false;
    uint64_t results = 0;  // lookups finished so far
    int failure = 0;       // code of the last lookup
    bool is_fresh = false;
    uint64_t found_at_ns = 0;
    std::vector<SocketAddress> found;  // by the last lookup that succeeded
  };
  void start();

  const Address address_;
  const Resolve resolve_;
  const std::vector<SocketAddress> numeric_;  // empty: the host is a name
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

// Return a connected, non-blocking socket. The addresses are tried one after another, each a
// moment after the previous one or as soon as that failed. The first connection wins.
// Errors: kUnavailable (all refused; names `peer` and the last reason), kDeadlineExceeded.
base::Result<int> connect_any(const std::string& peer, std::span<const SocketAddress> addresses,
                              const Deadline& deadline);

}  // namespace petps::client
