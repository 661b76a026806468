// How a connection ends: from which moment the device reads nothing more for it.
#include "transport/rdma/endpoint.h"

namespace petps::transport {

bool RdmaConnection::take_overdue(uint64_t since_ns) {
  bool any = false;
  for (RdmaSent& message : sent) {  // the oldest first
    if (message.posted_ns >= since_ns) break;
    any |= message.pin && !message.reported;
    message.reported = true;
  }
  return any;
}

void RdmaEndpoint::end() {
  for (const auto& c : slots_) {
    if (c->state == State::kOpen) report_closed(*c, {}, false);
    if (c->state != State::kFree) destroy(*c);
  }
  const std::lock_guard lock(mutex_);
  new_.clear();
}

void RdmaEndpoint::destroy(StreamConnection& connection) {
  Connection& c = rdma(connection);
  c.pair.reset();  // from here on the device reads nothing for this connection
  for (const RdmaSent& message : c.sent) stage_.give_back(message.block);
  c.sent.clear();  // drops the pins
  c.receive_region.reset();
  c.receive_memory.reset();
  c.received.clear();
  c.untaken.clear();
  give_up(c);
  by_pairing_.erase(c.pairing);
  free_slot(c);
}

}  // namespace petps::transport
