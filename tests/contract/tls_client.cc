#include "tls_client.h"

#include <gtest/gtest.h>

#include "base/clock.h"

namespace petps::transport {

const TestTls& test_tls() {
  static const TestTls tls = [] {
    TestTls suite;
    suite.authority = std::make_shared<tests::Authority>();
    const tests::KeyPair own = suite.authority->issue_local();
    suite.server = std::move(tls::ServerContext::open({own.certificate, own.key, "", {}})).value();
    suite.client = std::move(tls::ClientContext::open({suite.authority->ca(), "", ""})).value();
    return suite;
  }();
  return tls;
}

TlsClient::TlsClient(std::unique_ptr<Client> raw, tls::ClientContext& context)
    : raw_(std::move(raw)), tls_(std::move(context.connect("localhost")).value()) {
  std::vector<std::byte> hello;
  EXPECT_TRUE(tls_->handshake(rest_, hello).ok());
  is_alive_ = raw_->send(hello);
}

bool TlsClient::shake() {
  std::vector<std::byte> out;
  while (is_alive_ && !tls_->is_open()) {
    const size_t n = raw_->receive(arrived_, 60'000);
    rest_ = std::span(arrived_).first(n);
    out.clear();
    is_alive_ = n > 0 && tls_->handshake(rest_, out).ok() && raw_->send(out);
  }
  return is_alive_;
}

bool TlsClient::send(std::span<const std::byte> bytes) {
  std::vector<std::byte> records;
  {
    const std::lock_guard lock(mutex_);
    if (!is_alive_ || !tls_->write(bytes, records).ok()) return false;
  }
  return raw_->send(records);
}

size_t TlsClient::receive(std::span<std::byte> out, int timeout_ms) {
  const uint64_t until = base::monotonic_ns() + static_cast<uint64_t>(timeout_ms) * 1'000'000;
  while (is_alive_) {
    if (const size_t n = decrypt(out); n > 0) return n;
    const uint64_t now = base::monotonic_ns();
    if (!is_alive_ || now >= until) return 0;
    const size_t n = raw_->receive(arrived_, static_cast<int>((until - now) / 1'000'000) + 1);
    if (n == 0) return 0;
    rest_ = std::span(arrived_).first(n);
  }
  return 0;
}

void TlsClient::end_sending() {
  std::vector<std::byte> records;
  {
    const std::lock_guard lock(mutex_);
    tls_->end(records);
  }
  if (is_alive_) raw_->send(records);
  raw_->end_sending();
}

void TlsClient::update_keys() {
  const std::lock_guard lock(mutex_);
  EXPECT_TRUE(tls_->update_keys(true).ok());
}

size_t TlsClient::decrypt(std::span<std::byte> out) {
  const std::lock_guard lock(mutex_);
  std::vector<std::byte> replies;
  size_t n = 0;
  if (!tls_->read(rest_, out, n, replies).ok() || (n == 0 && tls_->has_ended())) is_alive_ = false;
  return n;
}

std::unique_ptr<TlsClient> connect_tls(std::unique_ptr<Client> raw) {
  auto client = std::make_unique<TlsClient>(std::move(raw), *test_tls().client);
  client->shake();
  return client;
}

}  // namespace petps::transport
