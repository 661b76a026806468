// The work requests of one message: pieces in order, as many per work request as the device
// allows, one post for all of them. Internal to transport/rdma.
#pragma once

#include <cstdint>
#include <vector>

#include "transport/rdma/verbs.h"

namespace petps::transport {

// The peer's memory that replies are written to.
struct Ring {
  uint64_t address = 0;
  uint32_t key = 0;
  uint64_t bytes = 0;
};

class Chain {
 public:
  Chain(uint32_t work_requests_max, uint32_t pieces_max)
      : requests_(work_requests_max),
        pieces_(size_t{work_requests_max} * pieces_max),
        pieces_max_(pieces_max) {}

  // Start a message at `position` of the ring (bytes written since the beginning), of at most
  // `requests` work requests.
  void begin(const Ring& ring, uint64_t position, uint32_t requests);
  // Add a piece. Return false if the message needs more work requests than allowed.
  bool add(const std::byte* address, uint32_t key, size_t bytes);
  // Return the chain: writes with `flags`, of which only the last carries `immediate` and is
  // signaled, as `id`. It is valid until begin().
  ibv_send_wr* finish(uint32_t immediate, uint64_t id, unsigned flags);
  uint32_t requests() const { return used_; }

 private:
  bool open_request();

  std::vector<ibv_send_wr> requests_;
  std::vector<ibv_sge> pieces_;
  const uint32_t pieces_max_;
  Ring ring_;
  uint64_t position_ = 0;
  uint32_t limit_ = 0;
  uint32_t used_ = 0;
  uint64_t room_ = 0;  // bytes from the open work request's end to the ring's end
};

}  // namespace petps::transport
