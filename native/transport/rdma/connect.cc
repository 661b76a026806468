// The steps that make a queue pair ready: init, ready to receive, ready to send.
#include <algorithm>
#include <random>

#include "transport/rdma/verbs.h"

namespace petps::transport {

using base::Code;
using base::Status;

namespace {

constexpr uint32_t kPacketNumberMask = 0xffffff;
// 4.096 us x 2^14 = 67 ms per try, 7 tries: a lost peer is detected within about a second.
constexpr uint8_t kAcknowledgeTimeout = 14;
constexpr uint8_t kRetries = 7;
// Credits keep a receiver ready. 7 = forever: only a peer that breaks the credits waits, alone.
constexpr uint8_t kNotReadyRetries = 7;
constexpr uint8_t kNotReadyTimer = 12;  // 0.64 ms
constexpr uint8_t kHops = 64;

Status refusal(const char* step, int error) {
  return base::errno_status(Code::kUnavailable, std::string("rdma: the device refused ") + step,
                            error);
}

ibv_ah_attr route_to(const VerbsDevice& device, const QueuePairAddress& peer) {
  ibv_ah_attr route{};
  route.dlid = peer.lid;
  route.port_num = 1;
  if (device.ethernet) {
    route.is_global = 1;
    std::copy(peer.gid.begin(), peer.gid.end(), route.grh.dgid.raw);
    route.grh.sgid_index = device.gid_index;
    route.grh.hop_limit = kHops;
  }
  return route;
}

}  // namespace

QueuePairAddress address_of(const VerbsDevice& device, const QueuePair& pair) {
  std::random_device random;
  return {pair.number, random() & kPacketNumberMask, device.lid, device.mtu, device.gid};
}

Status connect_pair(QueuePair& pair, const VerbsDevice& device, const QueuePairAddress& own,
                    const QueuePairAddress& peer, bool is_writable) {
  if (peer.number == 0 || peer.number > kPacketNumberMask ||
      peer.packet_number > kPacketNumberMask || peer.mtu < IBV_MTU_256 || peer.mtu > IBV_MTU_4096) {
    return Status(Code::kInvalidArgument,
                  "rdma: the peer's queue pair " + std::to_string(peer.number) +
                      ", packet number " + std::to_string(peer.packet_number) + ", mtu " +
                      std::to_string(peer.mtu) + ", is not a valid address");
  }
  ibv_qp_attr init{};
  init.qp_state = IBV_QPS_INIT;
  init.port_num = 1;
  init.qp_access_flags = is_writable ? IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE : 0;
  int error =
      pair.modify(init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (error != 0) return refusal("a new queue pair", error);
  ibv_qp_attr receive{};
  receive.qp_state = IBV_QPS_RTR;
  receive.path_mtu = static_cast<ibv_mtu>(std::min(own.mtu, peer.mtu));
  receive.dest_qp_num = peer.number;
  receive.rq_psn = peer.packet_number;
  receive.min_rnr_timer = kNotReadyTimer;
  receive.ah_attr = route_to(device, peer);
  error =
      pair.modify(receive, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                               IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (error != 0) return refusal("the peer's address", error);
  ibv_qp_attr send{};
  send.qp_state = IBV_QPS_RTS;
  send.timeout = kAcknowledgeTimeout;
  send.retry_cnt = kRetries;
  send.rnr_retry = kNotReadyRetries;
  send.sq_psn = own.packet_number;
  error = pair.modify(send, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  return error == 0 ? Status() : refusal("to send", error);
}

}  // namespace petps::transport
