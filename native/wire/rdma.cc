#include "wire/bytes.h"
#include "wire/wire.h"

namespace petps::wire {

using base::Status;

namespace {

constexpr uint32_t kQueuePairBits = 24;

Status check_pair(const QueuePair& pair) {
  if (pair.number != 0 && pair.number >> kQueuePairBits == 0 &&
      pair.packet_number >> kQueuePairBits == 0 && pair.mtu >= 1 && pair.mtu <= 5 &&
      pair.reserved == 0) {
    return {};
  }
  return bad_frame("rdma: queue pair " + std::to_string(pair.number) + ", packet number " +
                   std::to_string(pair.packet_number) + ", mtu " + std::to_string(pair.mtu) +
                   " is not the address of a queue pair");
}

}  // namespace

void encode_rdma(uint64_t request_id, const RdmaRequest& rdma, Frame& frame) {
  start_frame(Opcode::kRdma, request_id, frame);
  append(rdma, frame);
  finish_frame(frame);
}

Status decode_rdma(const FrameHeader& header, std::span<const std::byte> body, RdmaRequest& rdma) {
  PETPS_RETURN_IF_ERROR(expect_request(header, Opcode::kRdma, body));
  Cursor cursor(body);
  if (!cursor.take(rdma)) return truncated("rdma", "offer", body.size());
  PETPS_RETURN_IF_ERROR(expect_end(cursor, "rdma", "offer"));
  return check_pair(rdma.pair);
}

void encode_rdma_reply(uint64_t request_id, const RdmaReply& rdma, Frame& frame) {
  start_reply(Opcode::kRdma, request_id, frame);
  append(rdma, frame);
  finish_frame(frame);
}

// Later releases may append fields; a reader takes the fields that it knows.
Status decode_rdma_reply(const FrameHeader& header, std::span<const std::byte> body,
                         RdmaReply& rdma) {
  PETPS_RETURN_IF_ERROR(expect_reply(header, Opcode::kRdma, body));
  Cursor cursor(body);
  if (!cursor.take(rdma)) return truncated("rdma reply", "queue pair and credits", body.size());
  PETPS_RETURN_IF_ERROR(check_pair(rdma.pair));
  if (rdma.credits == 0 || rdma.message_bytes == 0)
    return bad_frame("rdma reply: credits and the bytes of a message must not be 0");
  return {};
}

}  // namespace petps::wire
