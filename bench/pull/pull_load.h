// Closed-loop pulls over raw connections, driven by one thread. Each connection keeps a fixed
// number of requests in flight and discards the rows.
#pragma once

#include <cstdint>
#include <vector>

#include "wire/wire.h"

namespace petps::bench {

// Request frames for rows of a LoadedTable. They are encoded before the clock starts; a connection
// cycles through them.
struct Requests {
  std::vector<wire::Frame> frames;
  std::vector<uint64_t> first_keys;  // of frames[0]
  uint32_t keys = 0;                 // per frame
  uint32_t row_bytes = 0;
};
Requests make_requests(uint32_t table, uint64_t rows, uint32_t row_bytes, uint32_t keys);

struct Load {
  uint64_t rows = 0;
  double seconds = 0;
  std::vector<double> latencies_us;  // from sending a request to the last byte of its reply
  double rows_per_s() const { return static_cast<double>(rows) / seconds; }
};

class PullLoad {
 public:
  PullLoad(uint32_t port, const Requests& requests, uint32_t connections, uint32_t in_flight);
  ~PullLoad();
  PullLoad(const PullLoad&) = delete;
  PullLoad& operator=(const PullLoad&) = delete;

  // Send the first request. Exit the program if one of its rows is missing or torn.
  void check();
  // Send requests for `seconds`, then receive the replies that are still in flight.
  Load run(double seconds);

 private:
  struct Connection {
    int fd = -1;
    size_t head_at = 0;  // header bytes received so far
    std::byte head[wire::kHeaderBytes];
    uint64_t body_left = 0;
    size_t next = 0;                // index of the next frame to send
    std::vector<uint64_t> sent_ns;  // of the requests in flight, oldest first
  };
  void ask(Connection& connection);
  // Receive what has arrived. Return the number of replies that it completed.
  uint32_t receive(Connection& connection, Load& load);

  const Requests& requests_;
  const uint32_t in_flight_;
  int epoll_ = -1;
  std::vector<Connection> connections_;
  std::vector<std::byte> waste_;
};

}  // namespace petps::bench
