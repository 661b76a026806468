// How a peer becomes a connection: the thread that calls accept() makes the queue pair and hands
// it to the endpoint's thread.
#include <algorithm>

#include "base/clock.h"
#include "transport/rdma/endpoint.h"

namespace petps::transport {

using base::Code;
using base::Result;
using base::Status;

RdmaEndpoint::RdmaEndpoint(Verbs& verbs, const RdmaOptions& options, Regions& regions)
    : StreamEndpoint(options.limits, options.rules, options.budget),
      verbs_(verbs),
      regions_(regions),
      send_requests_(std::min(verbs.device().work_requests_max, kSendRequests)),
      pieces_max_(std::min(verbs.device().sge_max, kPiecesMax)),
      stage_(verbs),
      chain_(send_requests_, pieces_max_) {}

RdmaEndpoint::~RdmaEndpoint() {
  slots_.clear();  // queue pairs before the completion queues that they use
  new_.clear();
  queues_.clear();
  channel_.reset();
}

Status RdmaEndpoint::open() {
  if (verbs_.device().work_requests_max < kReceiveRequests ||
      verbs_.device().completions_max < completions_of_pair()) {
    return Status(Code::kFailedPrecondition,
                  "rdma device " + verbs_.device().name + " has " +
                      std::to_string(verbs_.device().work_requests_max) +
                      " work requests a queue and " +
                      std::to_string(verbs_.device().completions_max) +
                      " completions; a connection needs " + std::to_string(kReceiveRequests) +
                      " and " + std::to_string(completions_of_pair()) + ": use another device");
  }
  PETPS_RETURN_IF_ERROR(open_wake());
  auto channel = verbs_.make_channel();
  if (!channel.ok()) return channel.status();
  channel_ = std::move(channel.value());
  return {};
}

// The caller must hold mutex_. All work requests may complete, with an error, before a completion
// is read. So a queue needs room for those of all its pairs, or it is lost.
Result<RdmaQueue*> RdmaEndpoint::queue_with_room() {
  for (const auto& queue : queues_) {
    if (queue->room > 0) return queue.get();
  }
  const uint32_t pairs =
      std::clamp(verbs_.device().completions_max / completions_of_pair(), 1u, kPairsPerQueue);
  auto queue = verbs_.make_queue(pairs * completions_of_pair(), *channel_);
  if (!queue.ok()) return queue.status();
  queues_.push_back(std::make_unique<RdmaQueue>(RdmaQueue{std::move(queue.value()), pairs}));
  return queues_.back().get();
}

int RdmaEndpoint::post_buffer(Connection& c, uint16_t buffer) {
  std::byte* const memory = c.receive_memory.get() + size_t{buffer} * kMessageBytes;
  ibv_sge piece{reinterpret_cast<uint64_t>(memory), kMessageBytes, c.receive_region->local_key};
  ibv_recv_wr request{};
  request.wr_id = c.pairing << 16 | buffer;
  request.sg_list = &piece;
  request.num_sge = 1;
  return c.pair->post_receive(&request);
}

// Make everything that the connection needs of the device.
Status RdmaEndpoint::prepare(Connection& c) {
  const size_t bytes = size_t{kReceiveRequests} * kMessageBytes;
  c.fixed_bytes = bytes;
  c.receive_memory = std::make_unique<std::byte[]>(bytes);
  auto region = verbs_.register_memory(c.receive_memory.get(), bytes, IBV_ACCESS_LOCAL_WRITE);
  if (!region.ok()) return region.status();
  c.receive_region = std::move(region.value());
  auto queue = queue_with_room();
  if (!queue.ok()) return queue.status();
  ibv_qp_cap wanted{};
  wanted.max_send_wr = send_requests_;
  wanted.max_recv_wr = kReceiveRequests;
  wanted.max_send_sge = pieces_max_;
  wanted.max_recv_sge = 1;
  wanted.max_inline_data = kInlineBytes;
  auto pair = verbs_.make_pair(wanted, *queue.value()->queue);
  if (!pair.ok()) return pair.status();
  c.pair = std::move(pair.value());
  c.queue = queue.value();
  --c.queue->room;
  return {};
}

void RdmaEndpoint::give_up(Connection& c) {
  const std::lock_guard lock(mutex_);
  if (c.queue != nullptr) ++c.queue->room;
}

Result<RdmaWelcome> RdmaEndpoint::accept(const Peer& peer, const RdmaHello& hello,
                                         uint64_t pairing) {
  auto c = std::make_unique<Connection>();
  c->pairing = pairing;
  c->address = peer.address;
  c->ring = {hello.ring_address, hello.ring_key, hello.ring_bytes};
  c->ring_messages = hello.ring_messages;
  {
    const std::lock_guard lock(mutex_);
    PETPS_RETURN_IF_ERROR(prepare(*c));
  }
  const QueuePairAddress own = address_of(verbs_.device(), *c->pair);
  Status status = connect_pair(*c->pair, verbs_.device(), own, hello.pair, false);
  int error = 0;
  for (uint16_t i = 0; status.ok() && error == 0 && i < kReceiveRequests; ++i)
    error = post_buffer(*c, i);
  if (error != 0)
    status =
        base::errno_status(Code::kUnavailable, "rdma: the device refused a receive request", error);
  if (!status.ok()) {
    c->pair.reset();
    give_up(*c);
    return status;
  }
  assigned_.fetch_add(1, std::memory_order_relaxed);
  open_.fetch_add(1, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    new_.push_back(std::move(c));
  }
  has_new_.store(true, std::memory_order_release);
  wake();
  return RdmaWelcome{own, kCredits, kMessageBytes, pairing};
}

void RdmaEndpoint::hang_up(uint64_t pairing) {
  {
    const std::lock_guard lock(mutex_);
    gone_.push_back(pairing);
  }
  has_new_.store(true, std::memory_order_release);
  wake();
}

void RdmaEndpoint::adopt_new() {
  std::vector<std::unique_ptr<Connection>> peers;
  std::vector<uint64_t> gone;
  {
    const std::lock_guard lock(mutex_);
    has_new_.store(false, std::memory_order_relaxed);
    peers.swap(new_);
    gone.swap(gone_);
    for (size_t i = polled_.size(); i < queues_.size(); ++i) polled_.push_back(queues_[i].get());
  }
  for (std::unique_ptr<Connection>& peer : peers) {
    by_pairing_[peer->pairing] = peer.get();
    report_opened(take_slot(std::move(peer)));
  }
  for (const uint64_t pairing : gone) {
    const auto entry = by_pairing_.find(pairing);
    if (entry == by_pairing_.end()) continue;
    Connection& c = *entry->second;
    if (c.state == State::kOpen) {
      break_connection(c, {});
    } else {
      destroy(c);
    }
  }
}

}  // namespace petps::transport
