// From a host's name to a connected socket, by a deadline: names are resolved off the calling
// thread, and a name's addresses are tried side by side.
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

struct SocketAddress {
  sockaddr_storage bytes{};
  socklen_t size = 0;
};

// The socket addresses of one host and port.
//
// getaddrinfo has no deadline and cannot be cancelled, so a thread of its own runs it, one at a
// time; callers wait for it no longer than they want. The thread may outlive this object.
// Threads: all methods from any.
class HostLookup {
 public:
  // Returns getaddrinfo's code, 0 for success. Tests bring their own.
  using Resolve = std::function<int(const Address&, std::vector<SocketAddress>&)>;
  explicit HostLookup(Address address, Resolve resolve = nullptr);

  // Numeric addresses and recent results cost nothing; older ones are used when there is no newer
  // one in time. Errors: kUnavailable (the name is not known), kDeadlineExceeded; both name it.
  base::Result<std::vector<SocketAddress>> addresses(const Deadline& deadline);
  // No address of the last result could be reached: ask again.
  void forget();

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_running = false;
    uint64_t results = 0;  // how many lookups have ended
    int failure = 0;       // of the last one
    bool is_fresh = false;
    uint64_t found_at_ns = 0;
    std::vector<SocketAddress> found;  // of the last one that succeeded
  };
  void start();

  const Address address_;
  const Resolve resolve_;
  const std::vector<SocketAddress> numeric_;  // empty: the host is a name
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

// A connected, non-blocking socket. The addresses are begun one after another, each a moment after
// the one before or as soon as that failed, and the first that connects wins.
// Errors: kUnavailable (all refused; names `peer` and the last reason), kDeadlineExceeded.
base::Result<int> connect_any(const std::string& peer, std::span<const SocketAddress> addresses,
                              const Deadline& deadline);

}  // namespace petps::client
