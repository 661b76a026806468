// Closed-loop pulls over raw connections, driven by one thread: each connection keeps some requests
// under way and throws the rows away.
#pragma once

#include <cstdint>
#include <vector>

#include "wire/wire.h"

namespace petps::bench {

// Frames drawn before the clock starts, used round and round. Rows are those of a LoadedTable.
struct Requests {
  std::vector<wire::Frame> frames;
  std::vector<uint64_t> first_keys;  // of frames[0]
  uint32_t keys = 0;                 // of each
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

  // Ends the program when a row of the first request is not whole.
  void check();
  // Asks for `seconds`, then takes what is still under way.
  Load run(double seconds);

 private:
  struct Connection {
    int fd = -1;
    size_t head_at = 0;  // bytes of the header that are there
    std::byte head[wire::kHeaderBytes];
    uint64_t body_left = 0;
    size_t next = 0;                // frame
    std::vector<uint64_t> sent_ns;  // of requests under way, oldest first
  };
  void ask(Connection& connection);
  // Takes what has come; how many replies it ended.
  uint32_t receive(Connection& connection, Load& load);

  const Requests& requests_;
  const uint32_t in_flight_;
  int epoll_ = -1;
  std::vector<Connection> connections_;
  std::vector<std::byte> waste_;
};

}  // namespace petps::bench
