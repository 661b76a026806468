// What TCP pulls are compared with: a server that answers row numbers with rows, and its client.
// Nothing between them but a 4-byte length: no index, no epochs, no checks.
//
// Request: u32 bytes of row numbers, then u32 row numbers. Reply: u32 bytes of rows, then the rows.
// The first 8 bytes of a connection set how the server works, so that a run can find its best:
// u32 rows of a send, u32 rows prefetched ahead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace petps::bench {

struct LimitSetting {
  uint32_t send_rows = 500;
  uint32_t ahead = 8;
  bool wait_all = true;  // the client asks for a whole reply in one call, or takes what is there
};

// Listens on a free port of 127.0.0.1.
int listen_on_loopback(uint16_t* port);

// Serves rows[n] = rows + n * row_bytes, one thread a connection. Never returns.
[[noreturn]] void serve_rows(int listener, const std::byte* rows, uint32_t row_bytes);

// One connection; requests of a fixed size, replies read into place.
class LimitClient {
 public:
  LimitClient(uint16_t port, const LimitSetting& setting, uint32_t request_rows,
              uint32_t row_bytes);
  ~LimitClient();
  LimitClient(const LimitClient&) = delete;
  LimitClient& operator=(const LimitClient&) = delete;

  void ask(const uint32_t* numbers);
  // The oldest reply, request_rows * row_bytes.
  void take(std::byte* out);

 private:
  int socket_;
  uint32_t request_rows_;
  uint32_t reply_bytes_;
  bool wait_all_;
  std::vector<uint32_t> request_;
};

}  // namespace petps::bench
