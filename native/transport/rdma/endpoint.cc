#include "transport/rdma/endpoint.h"

#include <arpa/inet.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"

namespace petps::transport {

using base::Code;
using base::Status;

namespace {

Status failure(const ibv_wc& completion) {
  return Status(Code::kUnavailable, std::string("rdma: ") + ibv_wc_status_str(completion.status) +
                                        " (status " + std::to_string(completion.status) +
                                        ", vendor " + std::to_string(completion.vendor_err) + ")");
}

}  // namespace

std::span<const Event> RdmaEndpoint::poll(int timeout_ms) {
  const uint64_t until = timeout_ms < 0
                             ? ~uint64_t{0}
                             : base::monotonic_ns() + static_cast<uint64_t>(timeout_ms) * 1'000'000;
  while (true) {
    if (has_new_.load(std::memory_order_acquire)) adopt_new();
    run_completions();
    const uint64_t now = base::monotonic_ns();
    if (now >= next_sweep_ns_) sweep(now);
    review_candidates();
    if (!next_events_.empty() || woken_ || now >= until) break;
    wait(by_pairing_.empty() ? until : std::min(until, next_sweep_ns_));
  }
  woken_ = false;
  events_.clear();
  events_.swap(next_events_);
  return events_;
}

// Sleep until a completion, wake() or `until_ns`. A completion between the last poll and the
// arming would raise no event, so arm first and then poll once more.
void RdmaEndpoint::wait(uint64_t until_ns) {
  if (!candidates_.empty()) return;
  for (RdmaQueue* queue : polled_) {
    if (queue->queue->arm() != 0) return;
  }
  if (run_completions()) return;
  const uint64_t now = base::monotonic_ns();
  if (now >= until_ns) return;
  const uint64_t left = until_ns - now;
  const timespec limit{static_cast<time_t>(std::min<uint64_t>(left / 1'000'000'000, 1 << 30)),
                       static_cast<long>(left % 1'000'000'000)};
  std::array<pollfd, 2> files{pollfd{wake_, POLLIN, 0}, pollfd{channel_->file, POLLIN, 0}};
  if (ppoll(files.data(), files.size(), &limit, nullptr) <= 0) return;
  if (files[0].revents != 0) {
    clear_wake();
    woken_ = true;
  }
  if (files[1].revents != 0) channel_->drain();
}

bool RdmaEndpoint::run_completions() {
  bool any = false;
  for (size_t i = 0; i < polled_.size(); ++i) {
    int n = 0;
    while ((n = polled_[i]->queue->poll(completions_)) > 0) {
      any = true;
      for (int k = 0; k < n; ++k) complete(completions_[static_cast<size_t>(k)]);
      if (static_cast<size_t>(n) < completions_.size()) break;
    }
    if (n >= 0) continue;
    for (const auto& [pairing, c] : by_pairing_) {
      if (c->queue == polled_[i])
        break_connection(*c, Status(Code::kUnavailable, "rdma: the completion queue is lost"));
    }
  }
  return any;
}

void RdmaEndpoint::complete(const ibv_wc& completion) {
  const uint64_t pairing = completion.wr_id >> 16;
  auto entry = by_pairing_.find(pairing);
  if (entry == by_pairing_.end() && has_new_.load(std::memory_order_acquire)) {
    adopt_new();  // a peer may send before poll() has adopted its connection
    entry = by_pairing_.find(pairing);
  }
  if (entry == by_pairing_.end()) return;  // the queue pair is gone
  Connection& c = *entry->second;
  add_candidate(c);
  if (completion.status != IBV_WC_SUCCESS) {
    break_connection(c, failure(completion));
    return;
  }
  const auto buffer = static_cast<uint16_t>(completion.wr_id);
  if (buffer != kSendId) {
    receive(c, buffer, completion);
    return;
  }
  RdmaSent& sent = c.sent.front();
  stage_.give_back(sent.block);
  c.requests_in_flight -= sent.requests;
  c.sent.pop_front();  // drops its pin
}

void RdmaEndpoint::receive(Connection& c, uint16_t buffer, const ibv_wc& completion) {
  if (c.broken) return;
  if ((completion.wc_flags & IBV_WC_WITH_IMM) == 0) {
    break_connection(
        c, Status(Code::kInvalidArgument, "rdma: the peer sent a SEND without an immediate"), true);
    return;
  }
  const uint32_t immediate = ntohl(completion.imm_data);
  take(c, immediate & kTakenMask);
  if ((immediate & kLastMessage) != 0) c.ended = true;
  if (completion.byte_len > 0 && c.state == Connection::State::kOpen) {
    c.received.push_back({buffer, 0, completion.byte_len});
    Counters::add(counters_.bytes_received, completion.byte_len);
  } else {
    repost_buffer(c, buffer);
  }
}

void RdmaEndpoint::repost_buffer(Connection& c, uint16_t buffer) {
  if (const int error = post_buffer(c, buffer); error != 0)
    break_connection(c, base::errno_status(Code::kUnavailable, "rdma: post receive", error));
}

// The peer has taken `lines` lines of its ring since the beginning, modulo 2^31.
void RdmaEndpoint::take(Connection& c, uint32_t lines) {
  const uint32_t more = (lines - static_cast<uint32_t>(c.taken_lines)) & kTakenMask;
  if (more == 0) return;
  if (more > c.written_lines - c.taken_lines) {
    break_connection(c,
                     Status(Code::kInvalidArgument,
                            "rdma: the peer reports that it took replies that were not written"),
                     true);
    return;
  }
  c.taken_lines += more;
  while (!c.untaken.empty() && c.untaken.front() <= c.taken_lines) c.untaken.pop_front();
  c.out_since_ns = base::monotonic_ns();
}

// Move what has arrived into `in` and repost its buffers. Stop when `in` holds enough for a
// request of ordinary size, unless the frame at the front still needs more.
void RdmaEndpoint::receive_waiting(StreamConnection& connection) {
  Connection& c = rdma(connection);
  while (!c.received.empty() && !c.broken) {
    std::span<const std::byte> frame;
    Status reason;
    if (c.in.bytes() + kMessageBytes > ReceiveBuffer::kFirstBytes &&
        look(c, frame, reason) != Look::kPartial) {
      return;
    }
    const std::span<std::byte> space = c.in.space(rules_);
    if (space.empty()) return;
    if (c.in.bytes() >= kFreeBytes && !memory_->has_room(kMessageBytes)) {
      fail(c, memory_->refuse(kMessageBytes));
      return;
    }
    Connection::Received& front = c.received.front();
    const size_t n = std::min<size_t>(space.size(), front.end - front.begin);
    std::memcpy(space.data(),
                c.receive_memory.get() + size_t{front.buffer} * kMessageBytes + front.begin, n);
    const size_t touched = c.in.touched();
    c.in.commit(n);
    if (c.in.touched() != touched) count_memory(c);
    front.begin += static_cast<uint32_t>(n);
    if (front.begin < front.end) continue;
    repost_buffer(c, front.buffer);
    c.received.pop_front();
    ++c.credits_owed;
  }
}

// Handle the connections that had a completion or another change, or that the last poll reported.
void RdmaEndpoint::review_candidates() {
  reviewed_.swap(candidates_);
  for (const uint32_t slot : reviewed_) {
    Connection& c = rdma(*slots_[slot]);
    c.candidate = false;
    if (c.state == State::kFree) continue;
    if (!c.broken) send_output(c);
    if (c.state == State::kLingering && (c.broken || (c.last_sent && c.sent.empty()))) destroy(c);
    if (c.state != State::kOpen) continue;
    receive_waiting(c);
    if (c.state != State::kOpen) continue;
    if (!has_frame(c)) send_credits(c);  // otherwise the credits travel with the frame's reply
    if (c.broken) {
      drop_broken(c);
    } else if (report(c)) {
      add_candidate(c);
    }
  }
  reviewed_.clear();
}

bool RdmaEndpoint::peek(ConnectionId connection, std::span<const std::byte>& frame) {
  if (StreamEndpoint::peek(connection, frame)) return true;
  StreamConnection* c = find(connection);
  if (c == nullptr || !may_read(*c)) return false;
  receive_waiting(*c);
  return StreamEndpoint::peek(connection, frame);
}

uint64_t RdmaEndpoint::pairing(ConnectionId connection) const {
  StreamConnection* c = find(connection);
  return c == nullptr ? 0 : rdma(*c).pairing;
}

}  // namespace petps::transport
