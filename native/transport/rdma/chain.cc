#include "transport/rdma/chain.h"

#include <arpa/inet.h>

#include <algorithm>

namespace petps::transport {

void Chain::begin(const Ring& ring, uint64_t position, uint32_t requests) {
  ring_ = ring;
  position_ = position;
  limit_ = std::min<uint32_t>(requests, static_cast<uint32_t>(requests_.size()));
  used_ = 0;
  room_ = 0;
}

bool Chain::open_request() {
  if (used_ == limit_) return false;
  const uint64_t at = position_ % ring_.bytes;
  ibv_send_wr& request = requests_[used_];
  request = {};
  request.sg_list = &pieces_[size_t{used_} * pieces_max_];
  request.opcode = IBV_WR_RDMA_WRITE;
  request.wr.rdma.remote_addr = ring_.address + at;
  request.wr.rdma.rkey = ring_.key;
  room_ = ring_.bytes - at;
  ++used_;
  return true;
}

bool Chain::add(const std::byte* address, uint32_t key, size_t bytes) {
  while (bytes > 0) {
    if (room_ == 0 && !open_request()) return false;
    ibv_send_wr* request = &requests_[used_ - 1];
    const auto n = static_cast<uint32_t>(std::min<uint64_t>(bytes, room_));
    if (ibv_sge* last = request->num_sge == 0 ? nullptr : &request->sg_list[request->num_sge - 1];
        last != nullptr && last->lkey == key &&
        last->addr + last->length == reinterpret_cast<uint64_t>(address)) {
      last->length += n;
    } else if (request->num_sge == static_cast<int>(pieces_max_)) {
      if (!open_request()) return false;
      continue;
    } else {
      request->sg_list[request->num_sge++] = {reinterpret_cast<uint64_t>(address), n, key};
    }
    address += n;
    bytes -= n;
    position_ += n;
    room_ -= n;
  }
  return true;
}

ibv_send_wr* Chain::finish(uint32_t immediate, uint64_t id, unsigned flags) {
  if (used_ == 0) open_request();  // a message without bytes
  for (uint32_t i = 0; i + 1 < used_; ++i) requests_[i].next = &requests_[i + 1];
  for (uint32_t i = 0; i < used_; ++i) {
    requests_[i].wr_id = id;  // flushed requests complete too
    requests_[i].send_flags = flags;
  }
  ibv_send_wr& last = requests_[used_ - 1];
  last.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  last.imm_data = htonl(immediate);
  last.send_flags |= IBV_SEND_SIGNALED;
  return requests_.data();
}

}  // namespace petps::transport
