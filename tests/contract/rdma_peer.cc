#include "rdma_peer.h"

#include <gtest/gtest.h>
#include <poll.h>

#include "base/clock.h"
#include "transport/rdma/peer.h"

namespace petps::transport {

using base::Status;

namespace {

// The suite sends from one thread while another receives.
class RdmaClient final : public Client {
 public:
  RdmaClient(TestRdma& rdma, std::string address) : rdma_(rdma) {
    auto opened = RdmaPeer::open(rdma.clients(), RdmaPeerOptions{kTestRingBytes, 32});
    EXPECT_TRUE(opened.ok()) << opened.status().to_string();
    auto welcome = rdma.rdma().accept({std::move(address)}, opened.value()->hello());
    if (!welcome.ok()) {  // as the server reports it over TCP
      test_rules().encode_error(welcome.status(), refusal_);
      return;
    }
    pairing_ = welcome->pairing;
    const Status connected = opened.value()->connect(welcome.value());
    EXPECT_TRUE(connected.ok()) << connected.to_string();
    peer_ = std::move(opened.value());
  }
  ~RdmaClient() override { close(); }

  bool send(std::span<const std::byte> bytes) override {
    const std::lock_guard lock(mutex_);
    return peer_ != nullptr && !peer_->has_ended() && peer_->send(bytes).ok();
  }
  size_t receive(std::span<std::byte> out, int timeout_ms) override {
    const uint64_t until = base::monotonic_ns() + static_cast<uint64_t>(timeout_ms) * 1'000'000;
    while (true) {
      pollfd waiting{-1, POLLIN, 0};
      {
        const std::lock_guard lock(mutex_);
        if (peer_ == nullptr) return receive_refusal(out);
        Status status = peer_->arm();
        if (status.ok()) status = peer_->progress();
        const size_t n = peer_->receive(out);
        if (n > 0 || !status.ok() || peer_->has_ended()) return n;
        waiting.fd = peer_->file();
      }
      if (base::monotonic_ns() >= until) return 0;
      // Short, because the sending thread may take the event that this thread waits for.
      constexpr int kLookMs = 2;
      ::poll(&waiting, 1, kLookMs);
    }
  }
  void end_sending() override {
    const std::lock_guard lock(mutex_);
    const Status status = peer_->end_sending();
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  void close() override {
    const std::lock_guard lock(mutex_);
    if (peer_ == nullptr) return;
    peer_.reset();
    rdma_.rdma().hang_up(pairing_);
  }

 private:
  size_t receive_refusal(std::span<std::byte> out) {
    const size_t n = std::min(out.size(), refusal_.size());
    std::copy_n(refusal_.begin(), n, out.begin());
    refusal_.erase(refusal_.begin(), refusal_.begin() + static_cast<ptrdiff_t>(n));
    return n;
  }

  TestRdma& rdma_;
  std::mutex mutex_;
  std::unique_ptr<RdmaPeer> peer_;  // null: refused, or closed
  std::vector<std::byte> refusal_;
  uint64_t pairing_ = 0;
};

RowMemory everything() {
  // Registration reads nothing of this memory; a row may lie anywhere.
  return {reinterpret_cast<const std::byte*>(uintptr_t{4096}), (size_t{1} << 47) - 8192};
}

std::unique_ptr<RdmaTransport> make_on(Verbs& verbs, const std::function<RowMemory()>& memory,
                                       const Limits& limits, size_t endpoints, const Admit& admit) {
  RdmaOptions options;
  options.endpoints = endpoints;
  options.limits = limits;
  options.rules = test_rules();
  options.admit = admit;
  options.memory = memory;
  auto rdma = make_rdma(verbs, options);
  EXPECT_TRUE(rdma.ok()) << rdma.status().to_string();
  return std::move(rdma.value());
}

class DeviceRdma final : public TestRdma {
 public:
  DeviceRdma(std::shared_ptr<Verbs> device, const Limits& limits, size_t endpoints,
             const Admit& admit)
      : device_(std::move(device)) {
    const auto memory = [] { return RowMemory{row_memory().data(), row_memory().size()}; };
    rdma_ = make_on(*device_, memory, limits, endpoints, admit);
  }
  ~DeviceRdma() override { rdma_ = nullptr; }
  Verbs& clients() override { return *device_; }

 private:
  std::shared_ptr<Verbs> device_;
};

}  // namespace

FakeRdma::FakeRdma(const FakeLimits& device, Registered registered, const Limits& limits,
                   size_t endpoints, const Admit& admit)
    : server_(fabric_, device), clients_(fabric_, FakeLimits{}) {
  rdma_ = make_on(server_, registered == Registered::kEverything ? everything : nullptr, limits,
                  endpoints, admit);
}

FakeRdma::~FakeRdma() {
  rdma_ = nullptr;
  EXPECT_EQ(fabric_.not_ready(), 0u) << "credits must keep every receiver ready";
  EXPECT_EQ(fabric_.overflows(), 0u) << "a completion queue was too small";
}

std::unique_ptr<Client> TestRdma::connect() {
  return std::make_unique<RdmaClient>(*this, "peer:" + std::to_string(next_peer_++));
}

std::shared_ptr<Verbs> rdma_device() {
  auto opened = open_verbs("");
  return opened.ok() ? std::shared_ptr<Verbs>(std::move(opened.value())) : nullptr;
}

std::vector<Backend> rdma_backends() {
  const auto connect = [](Transport& transport) {
    return static_cast<TestRdma&>(transport).connect();
  };
  const auto backend = [&](const std::string& name, const FakeLimits& device,
                           Registered registered) {
    const auto make = [=](const Limits& limits, size_t endpoints, const Admit& admit) {
      return std::make_unique<FakeRdma>(device, registered, limits, endpoints, admit);
    };
    return Backend{"rdma_" + name, make, connect};
  };
  std::vector<Backend> all = {
      backend("sge1_no_inline", {1, 0, 4096, 1 << 16}, Registered::kEverything),
      backend("sge2_inline1", {2, 1, 4096, 1 << 16}, Registered::kEverything),
      backend("sge30_inline2", {30, 2, 4096, 1 << 16}, Registered::kEverything),
      backend("sge32_inline30", {32, 30, 4096, 1 << 16}, Registered::kEverything),
      backend("sge32_inline32", {32, 32, 4096, 1 << 16}, Registered::kEverything),
      // 24 work requests: most replies need more and are copied; 100 completions: one pair per
      // queue.
      backend("small_queues", {2, 32, 24, 100}, Registered::kEverything),
      backend("nothing_registered", {30, 64, 4096, 1 << 16}, Registered::kNothing),
  };
  if (std::shared_ptr<Verbs> device = rdma_device(); device != nullptr) {
    const auto make = [device](const Limits& limits, size_t endpoints, const Admit& admit) {
      return std::make_unique<DeviceRdma>(device, limits, endpoints, admit);
    };
    all.push_back({"rdma_device", make, connect});
  }
  return all;
}

}  // namespace petps::transport
