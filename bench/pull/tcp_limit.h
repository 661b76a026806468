// The limit of TCP pulls: a server that answers row numbers with rows, and its client. A message
// has a 4-byte length and nothing else: no index, no epochs, no checks.
//
// Request: u32 bytes of row numbers, then u32 row numbers. Reply: u32 bytes of rows, then the rows.
// The first 8 bytes of a connection configure the server, so that a run can find its best setting:
// u32 rows per send, u32 rows prefetched ahead. Over TLS the handshake comes first.
#pragma once

#include <openssl/ssl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace petps::bench {

// Paths of PEM files of a server for 127.0.0.1. Empty: no TLS.
struct TlsPaths {
  std::string certificate;  // it is its own CA
  std::string key;
  bool empty() const { return certificate.empty(); }
};
// Make the files in `folder` by the program openssl.
TlsPaths make_certificate(const std::string& folder);

// A connection of the limit, whose socket it owns: plain, or TLS by OpenSSL alone.
class Channel {
 public:
  explicit Channel(int socket) : socket_(socket) {}
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // Shake hands with the cipher that petps uses. Return false if that fails.
  bool secure(const TlsPaths& paths, bool is_server);
  // Return false if the peer is gone. Over TLS the records of one call share a send.
  bool send_whole(const std::byte* bytes, size_t n);
  // Return the number of bytes, 0 or less if the peer is gone. `wait_all`: of a plain connection.
  ssize_t receive(std::byte* out, size_t n, bool wait_all = false);
  int socket() const { return socket_; }
  bool is_plain() const { return ssl_ == nullptr; }

 private:
  const int socket_;
  SSL* ssl_ = nullptr;
};

struct LimitSetting {
  uint32_t send_rows = 500;
  uint32_t ahead = 8;
  bool wait_all = true;  // receive whole replies in one call (MSG_WAITALL), or what has arrived
};

// Listen on a free port of 127.0.0.1. Store it in `*port` and return the socket.
int listen_on_loopback(uint16_t* port);

// Serve row n from rows + n * row_bytes, with one thread per connection. Never returns.
[[noreturn]] void serve_rows(int listener, const std::byte* rows, uint32_t row_bytes,
                             const TlsPaths& tls = {});

// One connection to the limit. All requests have the same size.
class LimitClient {
 public:
  LimitClient(uint16_t port, const LimitSetting& setting, uint32_t request_rows, uint32_t row_bytes,
              const TlsPaths& tls = {});
  LimitClient(const LimitClient&) = delete;
  LimitClient& operator=(const LimitClient&) = delete;

  // Send a request for request_rows row numbers.
  void ask(const uint32_t* numbers);
  // Receive the oldest reply, request_rows * row_bytes bytes, into `out`.
  void take(std::byte* out);

 private:
  Channel channel_;
  uint32_t request_rows_;
  uint32_t reply_bytes_;
  bool wait_all_;
  std::vector<uint32_t> request_;
};

}  // namespace petps::bench
