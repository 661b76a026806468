#include "transport/rdma/peer.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstring>

namespace petps::transport {

using base::Code;
using base::Result;
using base::Status;

namespace {

constexpr uint32_t kBuffers = kCredits;
constexpr uint32_t kSends = kBuffers + kEmptySends;
constexpr uint32_t kPeerInlineBytes = 256;
// The low bits of a work request id that names no buffer.
constexpr uint64_t kNoBuffer = 0xffff;
constexpr uint64_t kReceive = uint64_t{1} << 32;

}  // namespace

Result<std::unique_ptr<RdmaPeer>> RdmaPeer::open(Verbs& verbs, const RdmaPeerOptions& options) {
  std::unique_ptr<RdmaPeer> peer(new RdmaPeer(verbs, options));
  PETPS_RETURN_IF_ERROR(peer->make());
  return peer;
}

Status RdmaPeer::make() {
  ring_ = std::make_unique<std::byte[]>(options_.ring_bytes);
  auto ring = verbs_.register_memory(ring_.get(), options_.ring_bytes,
                                     IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
  if (!ring.ok()) return ring.status();
  ring_region_ = std::move(ring.value());
  buffers_ = std::make_unique<std::byte[]>(size_t{kBuffers} * kMessageBytes);
  auto buffers = verbs_.register_memory(buffers_.get(), size_t{kBuffers} * kMessageBytes,
                                        IBV_ACCESS_LOCAL_WRITE);
  if (!buffers.ok()) return buffers.status();
  buffers_region_ = std::move(buffers.value());
  auto channel = verbs_.make_channel();
  if (!channel.ok()) return channel.status();
  channel_ = std::move(channel.value());
  auto queue = verbs_.make_queue(kSends + options_.ring_messages, *channel_);
  if (!queue.ok()) return queue.status();
  queue_ = std::move(queue.value());
  ibv_qp_cap wanted{};
  wanted.max_send_wr = kSends;
  wanted.max_recv_wr = options_.ring_messages;
  wanted.max_send_sge = 1;
  wanted.max_recv_sge = 1;
  wanted.max_inline_data = kPeerInlineBytes;
  auto pair = verbs_.make_pair(wanted, *queue_);
  if (!pair.ok()) return pair.status();
  pair_ = std::move(pair.value());
  for (uint32_t i = 0; i < kBuffers; ++i) free_buffers_.push_back(i);
  hello_ = {address_of(verbs_.device(), *pair_), reinterpret_cast<uint64_t>(ring_.get()),
            ring_region_->remote_key, options_.ring_bytes, options_.ring_messages};
  return {};
}

Status RdmaPeer::break_with(std::string text) {
  if (broken_.ok()) broken_ = Status(Code::kUnavailable, "rdma: " + std::move(text));
  return broken_;
}

int RdmaPeer::post_receive() {
  ibv_recv_wr request{};  // replies are written into the ring: this takes only the immediate
  request.wr_id = kReceive;
  return pair_->post_receive(&request);
}

Status RdmaPeer::connect(const RdmaWelcome& welcome) {
  if (welcome.credits == 0 || welcome.message_bytes == 0)
    return break_with("the server's welcome grants no credits");
  credits_ = std::min(welcome.credits, kBuffers);
  message_bytes_ = std::min(welcome.message_bytes, kMessageBytes);
  PETPS_RETURN_IF_ERROR(connect_pair(*pair_, verbs_.device(), hello_.pair, welcome.pair, true));
  for (uint32_t i = 0; i < options_.ring_messages; ++i) {
    if (post_receive() != 0) return break_with("the device refused a receive request");
  }
  return {};
}

Status RdmaPeer::send(std::span<const std::byte> bytes) {
  out_.insert(out_.end(), bytes.begin(), bytes.end());
  return progress();
}

Status RdmaPeer::end_sending() {
  ending_ = true;
  return progress();
}

Status RdmaPeer::send_message(std::span<const std::byte> bytes, bool last) {
  ibv_send_wr request{};
  ibv_sge piece{};
  request.wr_id = kNoBuffer;
  request.opcode = IBV_WR_SEND_WITH_IMM;
  request.send_flags = IBV_SEND_SIGNALED;
  request.imm_data =
      htonl((static_cast<uint32_t>(taken_lines_) & kTakenMask) | (last ? kLastMessage : 0));
  if (!bytes.empty()) {
    piece.length = static_cast<uint32_t>(bytes.size());
    request.sg_list = &piece;
    request.num_sge = 1;
    if (bytes.size() <= pair_->cap.max_inline_data) {
      piece.addr = reinterpret_cast<uint64_t>(bytes.data());
      request.send_flags |= IBV_SEND_INLINE;
    } else {
      const uint32_t buffer = free_buffers_.back();
      free_buffers_.pop_back();
      std::byte* const at = buffers_.get() + size_t{buffer} * kMessageBytes;
      std::memcpy(at, bytes.data(), bytes.size());
      piece.addr = reinterpret_cast<uint64_t>(at);
      piece.lkey = buffers_region_->local_key;
      request.wr_id = buffer;
    }
    --credits_;
  }
  if (const int error = pair_->post_send(&request); error != 0)
    return break_with("post send failed: errno " + std::to_string(error));
  ++sends_in_flight_;
  reported_lines_ = taken_lines_;
  unreported_messages_ = 0;
  return {};
}

Status RdmaPeer::send_some() {
  while (has_unsent() && credits_ > 0 && !free_buffers_.empty() && sends_in_flight_ < kBuffers) {
    const size_t n = std::min<size_t>(out_.size() - out_at_, message_bytes_);
    PETPS_RETURN_IF_ERROR(send_message(std::span(out_).subspan(out_at_, n), false));
    out_at_ += n;
  }
  if (!has_unsent()) {
    out_.clear();
    out_at_ = 0;
    if (ending_ && !ended_ && sends_in_flight_ < kSends) {
      ended_ = true;
      return send_message({}, true);
    }
  }
  return report_taken();
}

// The server must learn of taken lines before its room is used up, so report them at half of it.
// Lines that are taken earlier are reported by the next request.
Status RdmaPeer::report_taken() {
  const bool half = (taken_lines_ - reported_lines_) * 2 >= options_.ring_bytes / kLineBytes ||
                    unreported_messages_ * 2 >= options_.ring_messages;
  if (!half || sends_in_flight_ >= kSends) return {};
  return send_message({}, false);
}

Status RdmaPeer::complete(const ibv_wc& completion) {
  if (completion.status != IBV_WC_SUCCESS)
    return break_with("the connection failed (completion status " +
                      std::to_string(completion.status) + ")");
  if (completion.wr_id != kReceive) {
    --sends_in_flight_;
    if (completion.wr_id != kNoBuffer)
      free_buffers_.push_back(static_cast<uint32_t>(completion.wr_id));
    return {};
  }
  const uint32_t immediate = ntohl(completion.imm_data);
  const uint32_t bytes = immediate & kReplyBytesMax;
  const uint32_t given = immediate >> kReplyBytesBits & kReplyCreditsMax;
  const uint64_t lines = std::max<uint64_t>(1, (uint64_t{bytes} + kLineBytes - 1) / kLineBytes);
  const uint64_t unread = arrived_lines_ - taken_lines_;
  if ((completion.wc_flags & IBV_WC_WITH_IMM) == 0 ||
      (unread + lines) * kLineBytes > options_.ring_bytes) {
    return break_with("the server wrote more than the ring holds");
  }
  credits_ += given;
  if ((immediate & kLastMessage) != 0) last_seen_ = true;
  messages_.push_back({arrived_lines_, bytes, 0});
  arrived_lines_ += lines;
  // Post before the server may learn that it has room, so that its next message finds a receive.
  if (!last_seen_ && post_receive() != 0) return break_with("the device refused a receive request");
  return {};
}

Status RdmaPeer::progress() {
  PETPS_RETURN_IF_ERROR(broken_);
  std::array<ibv_wc, 32> completions;
  int n = 0;
  Status status;
  while ((n = queue_->poll(completions)) > 0) {
    // Handle all of them: a reply may have arrived before the failure that broke the connection.
    for (int i = 0; i < n; ++i) {
      Status completed = complete(completions[static_cast<size_t>(i)]);
      if (status.ok()) status = std::move(completed);
    }
  }
  if (n < 0) return break_with("the completion queue is lost");
  drop_empty();
  return status.ok() ? send_some() : status;
}

// Remove messages that only gave credits back.
void RdmaPeer::drop_empty() {
  while (!messages_.empty() && messages_.front().bytes == 0) {
    ++taken_lines_;
    ++unreported_messages_;
    messages_.pop_front();
  }
}

size_t RdmaPeer::receive(std::span<std::byte> out) {
  size_t copied = 0;
  while (copied < out.size() && !messages_.empty()) {
    Message& front = messages_.front();
    const uint64_t at = (front.line * kLineBytes + front.read) % options_.ring_bytes;
    const size_t n = std::min<uint64_t>(
        {out.size() - copied, front.bytes - front.read, options_.ring_bytes - at});
    std::memcpy(out.data() + copied, ring_.get() + at, n);
    copied += n;
    front.read += static_cast<uint32_t>(n);
    if (front.read < front.bytes) continue;
    taken_lines_ += std::max<uint64_t>(1, (uint64_t{front.bytes} + kLineBytes - 1) / kLineBytes);
    ++unreported_messages_;
    messages_.pop_front();
    drop_empty();
  }
  return copied;
}

Status RdmaPeer::arm() {
  channel_->drain();
  if (queue_->arm() != 0) return break_with("the completion queue cannot be armed");
  return {};
}

}  // namespace petps::transport
