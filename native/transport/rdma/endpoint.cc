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

RdmaEndpoint::Connection* RdmaEndpoint::find(ConnectionId id) const {
  const uint32_t slot = slot_of(id);
  if (slot >= slots_.size()) return nullptr;
  Connection* c = slots_[slot].get();
  const bool same = c != nullptr && c->state == Connection::State::kOpen &&
                    c->generation == static_cast<uint32_t>(id >> 32);
  return same ? c : nullptr;
}

bool RdmaEndpoint::may_read(const Connection& c) const {
  if (c.paused) return false;
  return c.output() == 0 ||
         (c.output() < options_.limits.output_pause_bytes && !options_.budget->is_tight());
}

void RdmaEndpoint::add_candidate(Connection& c) {
  if (c.candidate) return;
  c.candidate = true;
  candidates_.push_back(c.slot);
}

void RdmaEndpoint::wake() {
  const uint64_t one = 1;
  // A full counter (EAGAIN) has already woken the poll.
  [[maybe_unused]] const ssize_t n = ::write(wake_, &one, sizeof(one));
}

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
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(wake_, &count, sizeof(count));
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
    for (const auto& c : slots_) {
      if (c != nullptr && c->queue == polled_[i])
        break_connection(*c, Status(Code::kUnavailable, "rdma: the completion queue is lost"));
    }
  }
  return any;
}

void RdmaEndpoint::complete(const ibv_wc& completion) {
  const uint64_t pairing = completion.wr_id >> 16;
  auto found = by_pairing_.find(pairing);
  if (found == by_pairing_.end() && has_new_.load(std::memory_order_acquire)) {
    adopt_new();  // a peer may send before poll() has adopted its connection
    found = by_pairing_.find(pairing);
  }
  if (found == by_pairing_.end()) return;  // the queue pair is gone
  Connection& c = *found->second;
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
    break_connection(c, Status(Code::kInvalidArgument, "rdma: a SEND without its immediate"), true);
    return;
  }
  const uint32_t immediate = ntohl(completion.imm_data);
  take(c, immediate & kTakenMask);
  if ((immediate & kLastMessage) != 0) c.ended = true;
  if (completion.byte_len > 0 && c.state == Connection::State::kOpen) {
    c.received.push_back({buffer, 0, completion.byte_len});
    Counters::add(counters_.bytes_received, completion.byte_len);
  } else if (const int error = post_buffer(c, buffer); error != 0) {
    break_connection(c, base::errno_status(Code::kUnavailable, "rdma: post receive", error));
  }
}

// The peer has taken `lines` lines of its ring since the beginning, modulo 2^31.
void RdmaEndpoint::take(Connection& c, uint32_t lines) {
  const uint32_t more = (lines - static_cast<uint32_t>(c.taken_lines)) & kTakenMask;
  if (more == 0) return;
  if (more > c.written_lines - c.taken_lines) {
    break_connection(c,
                     Status(Code::kInvalidArgument,
                            "rdma: the peer says that it took replies that were not written"),
                     true);
    return;
  }
  c.taken_lines += more;
  while (!c.untaken.empty() && c.untaken.front() <= c.taken_lines) c.untaken.pop_front();
  c.out_since_ns = base::monotonic_ns();
}

// Move what has arrived into `in` and repost its buffers. Stop when `in` holds enough for a
// request of ordinary size, unless the frame at the front still needs more.
void RdmaEndpoint::take_input(Connection& c) {
  while (!c.received.empty()) {
    std::span<const std::byte> frame;
    Status reason;
    if (c.in.bytes() + kMessageBytes > ReceiveBuffer::kFirstBytes &&
        (!may_read(c) ||
         c.in.look(options_.rules, frame, reason) != ReceiveBuffer::Look::kPartial)) {
      return;
    }
    const std::span<std::byte> space = c.in.space(options_.rules);
    if (space.empty()) return;
    if (c.in.bytes() >= kFreeBytes && !options_.budget->has_room(kMessageBytes)) {
      fail(c, options_.budget->refuse(kMessageBytes));
      return;
    }
    Connection::Received& front = c.received.front();
    const size_t n = std::min<size_t>(space.size(), front.end - front.begin);
    std::memcpy(space.data(),
                c.receive_memory.get() + size_t{front.buffer} * kMessageBytes + front.begin, n);
    const size_t touched = c.in.touched();
    c.in.received(n);
    if (c.in.touched() != touched) count_memory(c);
    front.begin += static_cast<uint32_t>(n);
    if (front.begin < front.end) continue;
    if (const int error = post_buffer(c, front.buffer); error != 0) {
      break_connection(c, base::errno_status(Code::kUnavailable, "rdma: post receive", error));
      return;
    }
    c.received.pop_front();
    ++c.credits_owed;
  }
}

// Handle the connections that had a completion or another change, or that the last poll reported.
void RdmaEndpoint::review_candidates() {
  scratch_.swap(candidates_);
  for (const uint32_t slot : scratch_) {
    Connection* c = slots_[slot].get();
    if (c == nullptr) continue;
    c->candidate = false;
    if (c->broken && c->state == Connection::State::kOpen) {
      abort_connection(*c, std::move(c->broken_reason), c->broken_for_cause);
      continue;
    }
    if (!c->broken) send_output(*c);
    if (c->state == Connection::State::kOpen) {
      report(*c);
    } else if (c->broken || (c->last_sent && c->sent.empty())) {
      destroy(*c);
    }
  }
  scratch_.clear();
}

void RdmaEndpoint::report(Connection& c) {
  take_input(c);
  if (c.state != Connection::State::kOpen) return;
  std::span<const std::byte> frame;
  Status reason;
  const ReceiveBuffer::Look look =
      may_read(c) ? c.in.look(options_.rules, frame, reason) : ReceiveBuffer::Look::kNothing;
  // Otherwise the credits travel with the frame's reply.
  if (look != ReceiveBuffer::Look::kFrame) send_credits(c);
  if (c.broken) {
    add_candidate(c);
    return;
  }
  if (!may_read(c)) return;  // resume() or the taken output makes it a candidate again
  if (look == ReceiveBuffer::Look::kFrame) {
    next_events_.push_back({Event::Kind::kFrames, id_of(c), {}});
    add_candidate(c);
  } else if (look == ReceiveBuffer::Look::kBroken) {
    fail(c, std::move(reason));
  } else if (look == ReceiveBuffer::Look::kPartial && c.ended) {
    fail(c, truncated_frame(c.in.bytes()));
  } else if (may_end(c)) {
    finish(c, {}, false);
    start_linger(c);
  }
}

// The peer sends no more and has received everything. A connection that is paused, or owed a
// reply, must stay, because the server still works for it.
bool RdmaEndpoint::may_end(const Connection& c) const {
  return c.ended && c.received.empty() && c.output() == 0 && !c.paused && c.owed <= 0;
}

bool RdmaEndpoint::peek(ConnectionId connection, std::span<const std::byte>& frame) {
  Connection* c = find(connection);
  if (c == nullptr || c->broken || !may_read(*c)) return false;
  Status reason;
  ReceiveBuffer::Look look = c->in.look(options_.rules, frame, reason);
  if (look == ReceiveBuffer::Look::kNothing || look == ReceiveBuffer::Look::kPartial) {
    take_input(*c);
    if (c->broken || c->state != Connection::State::kOpen) return false;
    look = c->in.look(options_.rules, frame, reason);
  }
  if (look == ReceiveBuffer::Look::kBroken) fail(*c, std::move(reason));
  return look == ReceiveBuffer::Look::kFrame;
}

void RdmaEndpoint::consume(ConnectionId connection) {
  Connection* c = find(connection);
  if (c == nullptr) return;
  c->in.consume();
  ++c->owed;
  Counters::add(counters_.frames_received, 1);
}

void RdmaEndpoint::pause(ConnectionId connection) {
  if (Connection* c = find(connection)) c->paused = true;
}

void RdmaEndpoint::resume(ConnectionId connection) {
  Connection* c = find(connection);
  if (c == nullptr || !c->paused) return;
  c->paused = false;
  add_candidate(*c);
}

size_t RdmaEndpoint::pending_posts() const {
  size_t pending = 0;
  for (const auto& c : slots_) {
    if (c == nullptr) continue;
    pending += c->sent.size() + (c->output() > 0 ? 1 : 0);
  }
  return pending;
}

std::vector<ConnectionId> RdmaEndpoint::connections() const {
  std::vector<ConnectionId> ids;
  for (const auto& c : slots_) {
    if (c != nullptr && c->state == Connection::State::kOpen) ids.push_back(id_of(*c));
  }
  return ids;
}

uint64_t RdmaEndpoint::pairing(ConnectionId connection) const {
  const Connection* c = find(connection);
  return c == nullptr ? 0 : c->pairing;
}

std::string RdmaEndpoint::peer(ConnectionId connection) const {
  const Connection* c = find(connection);
  return c == nullptr ? "" : c->address;
}

}  // namespace petps::transport
