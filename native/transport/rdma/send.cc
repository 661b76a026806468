// The output path: a list is gathered in place, or copied, or kept until the peer has room.
#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "transport/rdma/endpoint.h"

namespace petps::transport {

using base::Code;
using base::Status;

void RdmaEndpoint::post(ConnectionId connection, gather::GatherList&& list, epoch::Pin&& pin) {
  // Dropped on return, unless the device reads the rows in place.
  epoch::Pin held = std::move(pin);
  auto* c = static_cast<Connection*>(begin_post(connection, list));
  if (c == nullptr) return;
  // A peer that takes nothing must not hold the pin, so a list that it has no room for is copied
  // out.
  if (c->out.bytes() > 0 || !send_list(*c, list, held)) {
    if (!c->broken) list.copy_to(grow_output(*c, list.bytes()));
    Counters::add(counters_.lists_copied, 1);
  }
  list.clear();
}

bool RdmaEndpoint::send_list(Connection& c, const gather::GatherList& list, epoch::Pin& pin) {
  const size_t n = list.bytes();
  if (n > kReplyBytesMax || std::max<size_t>(n, 1) > c.room_bytes() ||
      c.requests_in_flight == send_requests_) {
    return false;
  }
  RdmaSent sent;
  unsigned flags = 0;
  if (n <= std::min<size_t>(c.pair->cap.max_inline_data, inline_.size())) {
    list.copy_to(inline_.data());
    chain_.begin(c.ring, c.written_lines * kLineBytes, send_requests_ - c.requests_in_flight);
    if (!chain_.add(inline_.data(), 0, n)) return false;  // it wraps, but only one request is left
    flags = IBV_SEND_INLINE;
  } else if (chain_list(c, list, sent)) {
    if (in_place_) sent.pin = std::move(pin);
  } else if (!chain_copy(c, list, sent)) {
    return false;
  }
  Counters::add(sent.pin ? counters_.lists_zerocopy : counters_.lists_copied, 1);
  post_message(c, n, false, flags, std::move(sent));
  return true;
}

// Chain the list: the header copied, because its buffer is reused when post() returns, and the
// rows in place. Return false if the chain is too long or no block is free; then no block is held.
bool RdmaEndpoint::chain_list(Connection& c, const gather::GatherList& list, RdmaSent& sent) {
  chain_.begin(c.ring, c.written_lines * kLineBytes, send_requests_ - c.requests_in_flight);
  in_place_ = false;
  bool fits = chain_copied(list.header_bytes().data(), list.header_bytes().size(), sent);
  gather::Position at{1, 0};
  std::array<iovec, 64> pieces;
  while (fits && !list.at_end(at)) {
    const size_t n = list.fill_iovecs(at, pieces);
    if (n == 0) break;
    size_t bytes = 0;
    for (size_t i = 0; i < n && fits; ++i) {
      fits =
          chain_piece(static_cast<const std::byte*>(pieces[i].iov_base), pieces[i].iov_len, sent);
      bytes += pieces[i].iov_len;
    }
    at = list.advance(at, bytes);
  }
  if (!fits) stage_.give_back(std::exchange(sent.block, kNoBlock));
  return fits;
}

// Chain a piece in place where it is registered; otherwise copy it.
bool RdmaEndpoint::chain_piece(const std::byte* address, size_t bytes, RdmaSent& sent) {
  while (bytes > 0) {
    uint32_t key = 0;
    const size_t registered = regions_.find(address, key);
    if (registered == 0) {
      regions_.request_check();
      return chain_copied(address, bytes, sent);
    }
    const size_t n = std::min(registered, bytes);
    if (!chain_.add(address, key, n)) return false;
    in_place_ = true;
    address += n;
    bytes -= n;
  }
  return true;
}

// Copy behind the bytes that were copied before, into the message's last block or a new one.
bool RdmaEndpoint::chain_copied(const std::byte* bytes, size_t n, RdmaSent& sent) {
  while (n > 0) {
    if (sent.block == kNoBlock || stage_used_ == kStageBlockBytes) {
      const uint32_t block = stage_.take(sent.block);
      if (block == kNoBlock) return false;
      sent.block = block;
      stage_used_ = 0;
    }
    const size_t part = std::min(n, kStageBlockBytes - stage_used_);
    std::byte* const to = stage_.memory(sent.block) + stage_used_;
    std::memcpy(to, bytes, part);
    if (!chain_.add(to, stage_.key(sent.block), part)) return false;
    stage_used_ += part;
    bytes += part;
    n -= part;
  }
  return true;
}

bool RdmaEndpoint::chain_copy(Connection& c, const gather::GatherList& list, RdmaSent& sent) {
  chain_.begin(c.ring, c.written_lines * kLineBytes, send_requests_ - c.requests_in_flight);
  gather::Position at;
  for (size_t left = list.bytes(); left > 0;) {
    const uint32_t block = stage_.take(sent.block);
    if (block != kNoBlock) sent.block = block;
    const size_t part = block == kNoBlock ? 0
                                          : list.copy_some(at, stage_.memory(block),
                                                           std::min(left, kStageBlockBytes));
    if (part == 0 || !chain_.add(stage_.memory(block), stage_.key(block), part)) {
      stage_.give_back(std::exchange(sent.block, kNoBlock));
      return false;
    }
    left -= part;
  }
  return true;
}

// Chain at most `most` bytes of the waiting output and set `n` to their number. Return false if
// no block is free.
bool RdmaEndpoint::chain_output(Connection& c, size_t most, RdmaSent& sent, size_t& n) {
  const uint32_t requests = send_requests_ - c.requests_in_flight;
  if (requests < 2) return false;
  // Keep one request for the message that wraps around the ring's end.
  most = std::min(most, size_t{requests - 1} * pieces_max_ * kStageBlockBytes);
  chain_.begin(c.ring, c.written_lines * kLineBytes, requests);
  for (n = 0; n < most;) {
    const uint32_t block = stage_.take(sent.block);
    if (block == kNoBlock) break;
    sent.block = block;
    const size_t part = std::min(most - n, kStageBlockBytes);
    std::memcpy(stage_.memory(block), c.out.data() + n, part);
    if (!chain_.add(stage_.memory(block), stage_.key(block), part)) break;
    n += part;
  }
  return n > 0;
}

// Post the whole chain with one doorbell. The credits owed to the peer travel with it.
void RdmaEndpoint::post_message(Connection& c, size_t bytes, bool last, unsigned flags,
                                RdmaSent sent) {
  const uint32_t credits = std::min(c.credits_owed, kReplyCreditsMax);
  const uint32_t immediate =
      static_cast<uint32_t>(bytes) | credits << kReplyBytesBits | (last ? kLastMessage : 0);
  ibv_send_wr* const chain = chain_.finish(immediate, c.pairing << 16 | kSendId, flags);
  const int error = c.pair->post_send(chain);
  sent.requests = chain_.requests();
  sent.posted_ns = base::monotonic_ns();
  // Even if the post failed, the device may hold a part of the chain: keep it until the pair is
  // gone.
  c.sent.push_back(std::move(sent));
  if (error != 0) {
    break_connection(c, base::errno_status(Code::kUnavailable, "rdma: post send", error));
    return;
  }
  c.requests_in_flight += c.sent.back().requests;
  c.written_lines += std::max<uint64_t>(1, (bytes + kLineBytes - 1) / kLineBytes);
  c.untaken.push_back(c.written_lines);
  c.credits_owed -= credits;
  c.last_sent = last;
  Counters::add(counters_.bytes_sent, bytes);
}

void RdmaEndpoint::post_empty_message(Connection& c, bool last) {
  chain_.begin(c.ring, c.written_lines * kLineBytes, 1);
  post_message(c, 0, last, 0, {});
}

void RdmaEndpoint::send_output(StreamConnection& connection) {
  Connection& c = rdma(connection);
  while (c.out.bytes() > 0 && !c.broken) {
    const size_t most = std::min({c.out.bytes(), size_t{c.room_bytes()}, kPartBytes});
    RdmaSent sent;
    size_t n = 0;
    if (most == 0 || !chain_output(c, most, sent, n)) return;
    const bool last = c.state == State::kLingering && n == c.out.bytes();
    post_message(c, n, last, 0, std::move(sent));
    consume_output(c, n);
  }
  if (c.state == State::kLingering && !c.last_sent && !c.broken && has_room(c))
    post_empty_message(c, true);
}

// Returning half of them is early enough, because the peer still has the others. Fewer travel
// with the next reply.
void RdmaEndpoint::send_credits(Connection& c) {
  if (c.credits_owed * 2 >= kCredits && !c.broken && c.out.bytes() == 0 && has_room(c))
    post_empty_message(c, false);
}

}  // namespace petps::transport
