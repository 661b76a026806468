// RDMA beside TCP. A client offers its queue pair over a TCP connection, which stays open so that
// either side notices when the other is gone. An rdma worker serves the queue pair's connection.
#include <linux/magic.h>
#include <sys/statfs.h>

#include "server/shared.h"
#include "server/worker.h"

namespace petps::server {

using base::Code;
using base::Status;
using transport::ConnectionId;

namespace {

transport::QueuePairAddress address_of(const wire::QueuePair& pair) {
  return {pair.number, pair.packet_number, pair.lid, pair.mtu, pair.gid};
}

wire::QueuePair pair_of(const transport::QueuePairAddress& address) {
  return {address.number, address.packet_number, address.lid, address.mtu, 0, address.gid};
}

// Return whether a network card may keep the pool's pages. Pages of a file system on a disk or on
// fsdax may move while the card uses them. Pages of a device-DAX device or of a file in memory
// (tmpfs, huge pages) do not move.
bool keeps_pages(const media::Media& medium) {
  if (medium.kind() == media::Kind::kDax) return medium.is_device();
  if (medium.kind() == media::Kind::kDram) return true;
  struct statfs system {};
  return statfs(medium.path().c_str(), &system) == 0 &&
         (system.f_type == TMPFS_MAGIC || system.f_type == HUGETLBFS_MAGIC);
}

}  // namespace

Status Shared::open_rdma() {
  if (options.rdma == nullptr) return {};
  const media::Media& medium = tables.pool().medium();
  if (!keeps_pages(medium)) {
    return Status(Code::kFailedPrecondition,
                  "rdma: the pool " + medium.path() + " is a file on a " +
                      media::kind_name(medium.kind()) +
                      " medium, and a network card cannot keep such a file's pages: serve it from "
                      "device-DAX or from memory (tmpfs), or set server.rdma = \"off\"");
  }
  transport::RdmaOptions with;
  with.endpoints = options.workers;
  with.limits = options.transport;
  with.limits.connections = options.limits.connections;
  with.budget = memory;
  with.rules = Server::frame_rules(options.limits);
  with.memory = [&medium] { return transport::RowMemory{medium.base(), medium.size()}; };
  tables.pool().keep_blocks();
  auto created = transport::make_rdma(*options.rdma, with);
  if (!created.ok()) return created.status();
  rdma = std::move(created.value());
  return {};
}

void Shared::add_pairing(uint64_t pairing, const Door& door) {
  const std::lock_guard lock(pairings_mutex);
  pairings[pairing] = door;
}

access::CallerPointer Shared::caller_of(uint64_t pairing) {
  const std::lock_guard lock(pairings_mutex);
  const auto found = pairings.find(pairing);
  return found == pairings.end() ? nullptr : found->second.caller;
}

void Shared::drop_pairing(uint64_t pairing) {
  {
    const std::lock_guard lock(pairings_mutex);
    pairings.erase(pairing);
  }
  rdma->hang_up(pairing);
}

void Shared::close_door(uint64_t pairing) {
  Door door{};
  {
    const std::lock_guard lock(pairings_mutex);
    const auto found = pairings.find(pairing);
    if (found == pairings.end()) return;  // the TCP connection was closed first
    door = found->second;
    pairings.erase(found);
  }
  workers[door.worker]->close_soon(door.connection);
}

Status Worker::open_rdma(ConnectionId connection, const wire::FrameHeader& header,
                         std::span<const std::byte> body) {
  if (shared_.rdma == nullptr)
    return Status(Code::kUnimplemented, "this server does not offer rdma: see server.rdma");
  if (source_ == Source::kRdma || state_of(connection).pairing != 0)
    return Status(Code::kFailedPrecondition, "this connection has its queue pair already");
  wire::RdmaRequest request;
  PETPS_RETURN_IF_ERROR(wire::decode_rdma(header, body, request));
  const transport::RdmaHello hello{address_of(request.pair), request.ring_address, request.ring_key,
                                   request.ring_bytes, request.ring_messages};
  auto welcome = shared_.rdma->accept({endpoint_.peer(connection)}, hello);
  if (!welcome.ok()) return welcome.status();
  state_of(connection).pairing = welcome->pairing;
  endpoint_.keep(connection);
  shared_.add_pairing(welcome->pairing, {number_, connection, state_of(connection).caller});
  wire::encode_rdma_reply(header.request_id,
                          {pair_of(welcome->pair), welcome->credits, welcome->message_bytes, 0},
                          reply_);
  return {};
}

void Worker::opened(ConnectionId connection) {
  ConnectionState& state = state_of(connection);
  state = {.id = connection, .peer = endpoint_.peer(connection)};
  if (source_ == Source::kRdma)
    state.pairing = shared_.rdma->pairing(number_ - shared_.first_rdma_worker(), connection);
}

void Worker::closed(const transport::Event& event) {
  ConnectionState& state = state_of(event.connection);
  if (!event.reason.ok()) shared_.report_incident(event.reason.to_string(), state.peer);
  state.caller = nullptr;
  if (state.parked_until_ns != 0) {  // its place is another client's
    std::erase_if(parked_,
                  [&](const Parked& parked) { return parked.connection == event.connection; });
  }
  const uint64_t pairing = std::exchange(state.pairing, 0);
  if (pairing == 0) return;
  if (source_ == Source::kRdma) {
    shared_.close_door(pairing);
  } else {
    shared_.drop_pairing(pairing);
  }
}

void Worker::close_soon(ConnectionId connection) {
  {
    const std::lock_guard lock(done_mutex_);
    to_close_.push_back(connection);
  }
  has_to_close_.store(true, std::memory_order_release);
  endpoint_.wake();
}

void Worker::close_doors() {
  std::vector<ConnectionId> doors;
  {
    const std::lock_guard lock(done_mutex_);
    has_to_close_.store(false, std::memory_order_relaxed);
    doors.swap(to_close_);
  }
  for (const ConnectionId door : doors) {
    // Not state_of(): by now a new connection may use the slot, and its state must stay.
    const uint32_t slot = transport::slot_of(door);
    if (slot < connections_.size() && connections_[slot].id == door) connections_[slot].pairing = 0;
    endpoint_.close(door, {});
  }
}

}  // namespace petps::server
