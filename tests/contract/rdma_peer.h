// The rdma transport as the contract suite makes it: on fake devices, and on a device of this
// machine.
#pragma once

#include "fake_verbs.h"
#include "transport/rdma/rdma.h"
#include "transport_client.h"

namespace petps::transport {

inline constexpr uint32_t kTestRingBytes = 1u << 20;  // of each client

// The row memory that the device knows: all of it, or none, so that every row is copied.
enum class Registered : uint8_t { kEverything, kNothing };

// A transport that also makes its clients. They share a device or a fabric with it.
class TestRdma : public Transport {
 public:
  size_t endpoints() const override { return rdma_->endpoints(); }
  Endpoint& endpoint(size_t worker) override { return rdma_->endpoint(worker); }
  base::Status start() override { return rdma_->start(); }
  void stop_accepting() override { rdma_->stop_accepting(); }
  void end() override { rdma_->end(); }
  uint16_t port() const override { return rdma_->port(); }
  uint64_t refused() const override { return rdma_->refused(); }
  const char* name() const override { return rdma_->name(); }

  std::unique_ptr<Client> connect();
  RdmaTransport& rdma() { return *rdma_; }
  virtual Verbs& clients() = 0;

 protected:
  std::unique_ptr<RdmaTransport> rdma_;

 private:
  std::atomic<uint64_t> next_peer_{1};
};

// A transport with its own fabric: the server's device has `limits`, the clients' has ordinary
// ones.
class FakeRdma final : public TestRdma {
 public:
  FakeRdma(const FakeLimits& device, Registered registered, const Limits& limits, size_t endpoints,
           const Admit& admit);
  ~FakeRdma() override;

  FakeVerbs& device() { return server_; }
  FakeVerbs& clients() override { return clients_; }
  const FakeFabric& fabric() const { return fabric_; }

 private:
  FakeFabric fabric_;
  FakeVerbs server_;
  FakeVerbs clients_;
};

// Return null if this machine has no RDMA device; soft-RoCE counts as one.
std::shared_ptr<Verbs> rdma_device();

std::vector<Backend> rdma_backends();

}  // namespace petps::transport
