// The thread that accepts peers and gives each to the endpoint with the fewest. Internal to
// transport/tcp.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "transport/tcp/endpoint.h"

namespace petps::transport {

// Refused peers that may be told so at the same time; more are closed without a word.
inline constexpr uint32_t kRefusalsAtOnce = 64;
// Waiting connections that the kernel keeps for us.
inline constexpr int kBacklog = 1024;

class Acceptor {
 public:
  Acceptor(const TcpOptions& options, std::vector<std::unique_ptr<TcpEndpoint>>& endpoints);
  ~Acceptor();
  base::Status listen();
  base::Status start();
  void stop();
  uint16_t port() const { return port_; }
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  void run();
  void accept_one();
  void hand_over(int fd, std::string address);
  void survive_no_descriptors();
  TcpEndpoint* longest_idle() const;

  const TcpOptions& options_;
  std::vector<std::unique_ptr<TcpEndpoint>>& endpoints_;
  int listener_ = -1;
  int stop_ = -1;
  int reserve_ =
      // given up for a moment when there are no descriptors, to refuse a peer instead of leaving it
      // waiting
      -1;
  uint16_t port_ = 0;
  std::atomic<uint64_t> refused_{0};
  std::thread thread_;
};

}  // namespace petps::transport
