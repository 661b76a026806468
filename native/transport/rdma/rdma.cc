#include "transport/rdma/rdma.h"

#include "transport/rdma/endpoint.h"

namespace petps::transport {

using base::Code;
using base::Result;
using base::Status;

namespace {

Status check_hello(const RdmaHello& hello) {
  if (hello.ring_bytes >= kRingBytesMin && hello.ring_bytes <= kRingBytesMax &&
      hello.ring_bytes % kLineBytes == 0 && hello.ring_messages >= kRingMessagesMin &&
      hello.ring_messages <= kRingMessagesMax) {
    return {};
  }
  return Status(Code::kInvalidArgument,
                "a reply ring of " + std::to_string(hello.ring_bytes) + " bytes for " +
                    std::to_string(hello.ring_messages) + " messages is outside " +
                    std::to_string(kRingBytesMin) + ".." + std::to_string(kRingBytesMax) +
                    " bytes in lines of " + std::to_string(kLineBytes) + " and " +
                    std::to_string(kRingMessagesMin) + ".." + std::to_string(kRingMessagesMax) +
                    " messages");
}

class Rdma final : public RdmaTransport {
 public:
  Rdma(Verbs& verbs, const RdmaOptions& options)
      : options_(options), regions_(verbs, options.memory) {
    for (size_t i = 0; i < options.endpoints; ++i)
      endpoints_.push_back(std::make_unique<RdmaEndpoint>(verbs, options_, regions_));
  }

  Status open() {
    for (const auto& endpoint : endpoints_) PETPS_RETURN_IF_ERROR(endpoint->open());
    return regions_.start();
  }

  size_t endpoints() const override { return endpoints_.size(); }
  Endpoint& endpoint(size_t worker) override { return *endpoints_[worker]; }
  Status start() override {
    accepting_.store(true, std::memory_order_release);
    return {};
  }
  void stop_accepting() override { accepting_.store(false, std::memory_order_release); }
  uint16_t port() const override { return 0; }
  uint64_t refused() const override { return refused_.load(std::memory_order_relaxed); }
  const char* name() const override { return "rdma"; }

  Result<RdmaWelcome> accept(const Peer& peer, const RdmaHello& hello) override {
    const std::lock_guard lock(accept_mutex_);  // place() compares counts that accept() changes
    auto welcome = place(peer, hello);
    if (!welcome.ok()) refused_.fetch_add(1, std::memory_order_relaxed);
    return welcome;
  }

  void hang_up(uint64_t pairing) override {
    endpoints_[pairing % endpoints_.size()]->hang_up(pairing);
  }
  uint64_t pairing(size_t endpoint, ConnectionId connection) const override {
    return endpoints_[endpoint]->pairing(connection);
  }
  void end() override {
    stop_accepting();
    for (const auto& endpoint : endpoints_) endpoint->end();
    regions_.end();
  }

 private:
  Result<RdmaWelcome> place(const Peer& peer, const RdmaHello& hello) {
    if (!accepting_.load(std::memory_order_acquire))
      return Status(Code::kUnavailable, "the server is stopping");
    uint32_t open = 0;
    size_t fewest = 0;
    for (size_t i = 0; i < endpoints_.size(); ++i) {
      open += endpoints_[i]->assigned();
      if (endpoints_[i]->assigned() < endpoints_[fewest]->assigned()) fewest = i;
    }
    if (open >= options_.limits.connections) return too_many_connections(options_.limits);
    if (options_.admit) PETPS_RETURN_IF_ERROR(options_.admit(peer));
    PETPS_RETURN_IF_ERROR(check_hello(hello));
    const uint64_t pairing = ++accepted_ * endpoints_.size() + fewest;
    return endpoints_[fewest]->accept(peer, hello, pairing);
  }

  const RdmaOptions options_;
  Regions regions_;
  std::vector<std::unique_ptr<RdmaEndpoint>> endpoints_;  // after regions_: destroyed first
  std::atomic<bool> accepting_{false};
  std::atomic<uint64_t> refused_{0};
  std::mutex accept_mutex_;
  uint64_t accepted_ = 0;  // guarded by accept_mutex_
};

}  // namespace

Result<std::unique_ptr<RdmaTransport>> make_rdma(Verbs& verbs, const RdmaOptions& options) {
  if (options.endpoints == 0)
    return Status(Code::kInvalidArgument, "rdma needs at least one endpoint");
  auto rdma = std::make_unique<Rdma>(verbs, options);
  PETPS_RETURN_IF_ERROR(rdma->open());
  return std::unique_ptr<RdmaTransport>(std::move(rdma));
}

}  // namespace petps::transport
