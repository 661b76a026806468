// Two streams that talk to each other through buffers.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/certificates/certificates.h"
#include "tls/tls.h"

namespace petps::tls {

using Bytes = std::vector<std::byte>;

inline Bytes bytes_of(std::string_view text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return Bytes(data, data + text.size());
}
inline Bytes pattern(size_t n) {
  Bytes bytes(n);
  for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 251);
  return bytes;
}

// Decrypt everything and append it to `plain`. `part`: bytes that arrive at once.
inline base::Status read_all(Stream& stream, std::span<const std::byte> arrived, Bytes& plain,
                             Bytes& out, size_t part = SIZE_MAX) {
  while (!arrived.empty() || stream.has_plain()) {
    std::span<const std::byte> now = arrived.first(std::min(part, arrived.size()));
    arrived = arrived.subspan(now.size());
    do {
      const size_t had = plain.size();
      plain.resize(had + 10'000);
      size_t n = 0;
      const base::Status status = stream.read(now, std::span(plain).subspan(had), n, out);
      plain.resize(had + n);
      if (!status.ok()) return status;
    } while ((!now.empty() && !stream.has_ended()) || stream.has_plain());
  }
  return {};
}

struct Pair {
  std::unique_ptr<Stream> server;
  std::unique_ptr<Stream> client;
  Bytes to_server;
  Bytes to_client;
  base::Status server_status;
  base::Status client_status;

  Pair(const ServerContext& accepting, ClientContext& connecting,
       const std::string& name = "localhost")
      : server(std::move(accepting.accept()).value()),
        client(std::move(connecting.connect(name)).value()) {}

  // Run both sides until neither has anything to say. `part`: bytes that arrive at once.
  void shake(size_t part = SIZE_MAX) {
    step(*client, client_status, to_client, to_server, part);
    while (!to_server.empty() || !to_client.empty()) {
      step(*server, server_status, to_server, to_client, part);
      step(*client, client_status, to_client, to_server, part);
    }
  }
  bool is_open() const { return server->is_open() && client->is_open(); }

 private:
  static void step(Stream& stream, base::Status& status, Bytes& in, Bytes& out, size_t part) {
    Bytes arrived = std::exchange(in, {});
    size_t at = 0;
    do {
      std::span<const std::byte> now =
          std::span(arrived).subspan(at, std::min(part, arrived.size() - at));
      at += now.size();
      if (!status.ok()) return;
      if (!stream.is_open()) {
        status = stream.handshake(now, out);
        continue;
      }
      Bytes plain;  // an alert behind the client's last message
      status = read_all(stream, now, plain, out);
    } while (at < arrived.size());
  }
};

class TlsTest : public testing::Test {
 protected:
  std::shared_ptr<ServerContext> serve(
      const tests::KeyPair& files, ClientCertificates clients = ClientCertificates::kOff) const {
    auto context = ServerContext::open({files.certificate, files.key, authority_.ca(), clients});
    EXPECT_TRUE(context.ok()) << context.status().to_string();
    return std::move(context).value();
  }
  std::shared_ptr<ClientContext> connect(ClientFiles files) const {
    auto context = ClientContext::open(std::move(files));
    EXPECT_TRUE(context.ok()) << context.status().to_string();
    return std::move(context).value();
  }
  std::shared_ptr<ClientContext> connect() const { return connect({authority_.ca(), "", ""}); }
  Pair open_pair() const {
    Pair pair(*serve(authority_.issue_local()), *connect());
    pair.shake();
    EXPECT_TRUE(pair.is_open()) << pair.client_status.to_string();
    return pair;
  }

  tests::Authority authority_;
};

}  // namespace petps::tls
