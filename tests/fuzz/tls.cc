// TLS records from an untrusted peer. The first byte chooses where they begin: at the handshake of
// a server or of a client, or after a real handshake, in whose stream the input then replaces,
// inserts or removes bytes. A stream must never give plain text that the other side did not send.
#include "tls/tls.h"

#include <algorithm>
#include <cstdint>

#include "tests/fuzz/expect.h"
#include "tests/support/certificates/certificates.h"

namespace petps::tls {
namespace {

using Bytes = std::vector<std::byte>;

constexpr size_t kOutputMax = size_t{1} << 20;  // of one input: alerts and answers to new keys

struct Contexts {
  tests::Authority authority;
  std::shared_ptr<ServerContext> server;
  std::shared_ptr<ClientContext> client;
  Contexts() {
    const tests::KeyPair pair = authority.issue_local();
    server = ServerContext::open(
                 {pair.certificate, pair.key, authority.ca(), ClientCertificates::kOptional})
                 .value();
    client = ClientContext::open({authority.ca(), "", ""}).value();
  }
};

Contexts& contexts() {
  static Contexts instance;
  return instance;
}

// Feed `input` to the stream in parts. Return the plain text.
Bytes feed(Stream& stream, std::span<const std::byte> input, size_t part) {
  Bytes out;
  Bytes plain;
  Bytes room(2 * kRecordBytes);
  while (!input.empty() && !stream.has_failed() && !stream.has_ended()) {
    std::span<const std::byte> now = input.first(std::min(part, input.size()));
    input = input.subspan(now.size());
    if (!stream.is_open()) {
      const base::Status status = stream.handshake(now, out);
      FUZZ_EXPECT(status.ok() || !status.message().empty());
      if (!stream.is_open()) continue;
    }
    do {
      size_t n = 0;
      const base::Status status = stream.read(now, room, n, out);
      FUZZ_EXPECT(n <= room.size());
      FUZZ_EXPECT(status.ok() == !stream.has_failed());
      plain.insert(plain.end(), room.begin(), room.begin() + static_cast<ptrdiff_t>(n));
      if (!status.ok()) break;
    } while ((!now.empty() && !stream.has_ended()) || stream.has_plain());
    FUZZ_EXPECT(out.size() <= kOutputMax);
  }
  return plain;
}

void handshake(Stream& server, Stream& client) {
  Bytes to_server;
  Bytes to_client;
  while (!server.is_open() || !client.is_open()) {
    std::span<const std::byte> arrived = to_client;
    FUZZ_EXPECT(client.handshake(arrived, to_server).ok());
    to_client.assign(arrived.begin(), arrived.end());
    arrived = to_server;
    FUZZ_EXPECT(server.handshake(arrived, to_client).ok());
    to_server.assign(arrived.begin(), arrived.end());
  }
}

// Change the records of a real connection as the input says: (where, how, byte) each.
void change_records(std::span<const uint8_t> input, size_t part) {
  auto server = contexts().server->accept().value();
  auto client = contexts().client->connect("localhost").value();
  handshake(*server, *client);
  Bytes plain(20'000);
  for (size_t i = 0; i < plain.size(); ++i) plain[i] = static_cast<std::byte>(i * 31);
  Bytes records;
  FUZZ_EXPECT(client->write(plain, records).ok());
  bool is_changed = false;
  for (; input.size() >= 4; input = input.subspan(4)) {
    const size_t at = (size_t{input[0]} << 8 | input[1]) % records.size();
    const auto byte = static_cast<std::byte>(input[3]);
    switch (input[2] % 3) {
      case 0:
        is_changed |= records[at] != byte;
        records[at] = byte;
        break;
      case 1:
        records.insert(records.begin() + static_cast<ptrdiff_t>(at), byte);
        is_changed = true;
        break;
      default:
        records.erase(records.begin() + static_cast<ptrdiff_t>(at));
        is_changed = true;
    }
    if (records.empty()) break;
  }
  const Bytes received = feed(*server, records, part);
  // What arrives is a prefix of what was sent, and all of it only if nothing was changed.
  FUZZ_EXPECT(received.size() <= plain.size());
  FUZZ_EXPECT(std::equal(received.begin(), received.end(), plain.begin()));
  FUZZ_EXPECT(is_changed || received.size() == plain.size());
}

}  // namespace
}  // namespace petps::tls

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace tls = petps::tls;
  if (size < 2) return 0;
  const size_t part = 1 + size_t{data[1]} * 17;
  const std::span<const uint8_t> input(data + 2, size - 2);
  switch (data[0] % 3) {
    case 0:
      tls::feed(*tls::contexts().server->accept().value(), std::as_bytes(input), part);
      break;
    case 1: {
      auto client = tls::contexts().client->connect("localhost").value();
      std::vector<std::byte> hello;
      std::span<const std::byte> nothing;
      FUZZ_EXPECT(client->handshake(nothing, hello).ok());
      tls::feed(*client, std::as_bytes(input), part);
      break;
    }
    default:
      tls::change_records(input, part);
  }
  return 0;
}
