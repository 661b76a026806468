// A client of the contract suite that speaks TLS over another client.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>

#include "tests/support/certificates/certificates.h"
#include "tls/tls.h"
#include "transport_client.h"

namespace petps::transport {

// The certificates of the suite's servers and clients.
struct TestTls {
  std::shared_ptr<tests::Authority> authority;
  std::shared_ptr<tls::ServerContext> server;
  std::shared_ptr<tls::ClientContext> client;
};
const TestTls& test_tls();

// One thread may send while another one receives.
class TlsClient final : public Client {
 public:
  TlsClient(std::unique_ptr<Client> raw, tls::ClientContext& context);

  // Take the rest of the handshake. Return whether the server took part to its end.
  bool shake();
  bool send(std::span<const std::byte> bytes) override;
  size_t receive(std::span<std::byte> out, int timeout_ms) override;
  void end_sending() override;
  void close() override { raw_->close(); }
  // Change the keys with the next send().
  void update_keys();

 private:
  size_t decrypt(std::span<std::byte> out);

  const std::unique_ptr<Client> raw_;
  std::mutex mutex_;  // guards tls_
  const std::unique_ptr<tls::Stream> tls_;
  std::atomic<bool> is_alive_{false};
  std::array<std::byte, 20'000> arrived_;
  std::span<const std::byte> rest_;
};

// Return a client whose handshake is done, if the server takes part in it.
std::unique_ptr<TlsClient> connect_tls(std::unique_ptr<Client> raw);

}  // namespace petps::transport
