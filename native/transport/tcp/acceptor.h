// The thread that accepts peers and gives each to the endpoint with the fewest connections.
// Internal to transport/tcp.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "transport/tcp/endpoint.h"
#include "transport/tcp/handshaker.h"

namespace petps::transport {

// At most this many refused peers wait for their error frame at the same time; further ones are
// closed without a frame.
inline constexpr uint32_t kRefusalsAtOnce = 64;
// Length of the kernel's queue of connections that wait to be accepted.
inline constexpr int kBacklog = 1024;

class Acceptor {
 public:
  Acceptor(const TcpOptions& options, Places& places,
           std::vector<std::unique_ptr<TcpEndpoint>>& endpoints);
  ~Acceptor();
  base::Status listen();
  base::Status start();
  void stop();
  uint16_t port() const { return port_; }
  Handshakes handshakes() const {
    return handshaker_ == nullptr ? Handshakes() : handshaker_->counts();
  }
  std::vector<std::string> refusals() const { return refusals_.lines(); }
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  void run();
  void accept_peer();
  static void tune(int fd);
  // Give the peer to an endpoint. Runs on one thread: the handshaker's, or this one without TLS.
  void hand_over(NewPeer peer);
  // Return why the peer cannot have a place; else it has one.
  base::Status find_place(NewPeer& peer);
  void refuse_without_descriptors();
  TcpEndpoint* longest_idle() const;

  const TcpOptions& options_;
  Places& places_;
  std::vector<std::unique_ptr<TcpEndpoint>>& endpoints_;
  Refusals refusals_;
  int listener_ = -1;
  int stop_ = -1;
  // Closed for a moment when no descriptors are left, so that a peer can be refused instead of
  // being left waiting.
  int reserve_ = -1;
  uint16_t port_ = 0;
  std::atomic<uint64_t> refused_{0};
  std::thread thread_;
  std::unique_ptr<Handshaker> handshaker_;  // null: plain text
};

}  // namespace petps::transport
