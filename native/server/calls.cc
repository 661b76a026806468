#include "server/calls.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "base/check.h"

namespace petps::server {

using base::Code;
using base::Status;
using transport::ConnectionId;
using transport::Event;

Status server_is_stopping() {
  return Status(Code::kUnavailable, "the server is stopping: ask another replica or try again");
}

namespace {

void encode_refusal(const wire::Frame& request, const Status& reason, wire::Frame& reply) {
  wire::FrameHeader header;
  // If decoding fails, the worker has refused the frame already, and the opcode stays 0.
  [[maybe_unused]] const Status decoded = wire::decode_request_header(request, header);
  wire::encode_error(header.opcode, header.request_id, reason, reply);
}

}  // namespace

// A transport in which each call is a connection with one frame, which ends with its reply.
class CallEndpoint final : public transport::Endpoint {
 public:
  explicit CallEndpoint(Calls& calls) : calls_(calls) {}

  void add(uint64_t ticket, wire::Frame frame) {
    {
      const std::lock_guard lock(mutex_);
      arrived_.push_back({ticket, std::move(frame)});
    }
    changed_.notify_one();
  }

  void drop(uint64_t ticket) {
    {
      const std::lock_guard lock(mutex_);
      dropped_.push_back(ticket);
      woken_ = true;
    }
    changed_.notify_one();
  }

  // Remove and return the calls without a reply. The worker must have stopped.
  std::vector<CallReply> take_unanswered() {
    const std::lock_guard lock(mutex_);
    std::vector<CallReply> calls = std::exchange(arrived_, {});
    for (Slot& slot : slots_) {
      if (slot.ticket != 0) calls.push_back({slot.ticket, std::move(slot.frame)});
      slot.ticket = 0;
    }
    return calls;
  }

  std::span<const Event> poll(int timeout_ms) override {
    events_.clear();
    report_waiting();
    {
      std::unique_lock lock(mutex_);
      if (events_.empty()) {
        changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                          [this] { return woken_ || !arrived_.empty(); });
      }
      woken_ = false;
      arriving_.swap(arrived_);
      leaving_.swap(dropped_);
    }
    for (CallReply& call : arriving_) adopt(std::move(call));
    arriving_.clear();
    for (const uint64_t ticket : leaving_) {  // calls that are answered already have no slot
      const auto is_its = [&](const Slot& slot) { return slot.ticket == ticket; };
      const auto slot = std::ranges::find_if(slots_, is_its);
      if (slot != slots_.end()) slot->left = true;
    }
    leaving_.clear();
    return events_;
  }

  bool peek(ConnectionId connection, std::span<const std::byte>& frame) override {
    const Slot* slot = find(connection);
    if (slot == nullptr || slot->consumed) return false;
    frame = slot->frame;
    return true;
  }

  void consume(ConnectionId connection) override {
    transport::Counters::add(counters_.frames_received, 1);
    if (Slot* slot = find(connection)) slot->consumed = true;
  }

  void post(ConnectionId connection, gather::GatherList&& list, epoch::Pin&& pin) override {
    if (Slot* slot = find(connection)) {
      wire::Frame reply(list.bytes());
      list.copy_to(reply.data());
      transport::Counters::add(counters_.lists_posted, 1);
      transport::Counters::add(counters_.bytes_sent, reply.size());
      answer(*slot, std::move(reply));
    }
    list.clear();
    pin.drop();
  }

  void flush() override {}
  void pause(ConnectionId connection) override {
    if (Slot* slot = find(connection)) slot->paused = true;
  }
  void resume(ConnectionId connection) override {
    if (Slot* slot = find(connection)) slot->paused = false;
  }
  void close(ConnectionId connection, Status reason) override {
    Slot* slot = find(connection);
    if (slot == nullptr) return;
    wire::Frame reply;
    // Without a reason, nobody waits for the reply, which must be one nevertheless.
    encode_refusal(slot->frame, reason.ok() ? server_is_stopping() : reason, reply);
    answer(*slot, std::move(reply));
  }
  bool has_left(ConnectionId connection) const override {
    const Slot* slot = const_cast<CallEndpoint*>(this)->find(connection);
    return slot != nullptr && slot->left;
  }
  size_t pending_posts() const override { return 0; }
  std::vector<ConnectionId> connections() const override {
    std::vector<ConnectionId> open;
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].ticket != 0) open.push_back(id_of(i));
    }
    return open;
  }
  std::string peer(ConnectionId connection) const override {
    return const_cast<CallEndpoint*>(this)->find(connection) == nullptr ? "" : "this process";
  }

  void wake() override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    changed_.notify_one();
  }

 private:
  struct Slot {
    uint64_t ticket = 0;  // 0: free
    uint32_t generation = 0;
    bool consumed = false;
    bool paused = false;
    bool left = false;  // see Calls::drop
    wire::Frame frame;
  };

  ConnectionId id_of(size_t i) const { return uint64_t{slots_[i].generation} << 32 | i; }

  Slot* find(ConnectionId connection) {
    const uint32_t i = transport::slot_of(connection);
    if (i >= slots_.size() || slots_[i].ticket == 0 || id_of(i) != connection) return nullptr;
    return &slots_[i];
  }

  void adopt(CallReply call) {
    if (free_.empty()) {
      free_.push_back(slots_.size());
      slots_.emplace_back();
    }
    const size_t i = free_.back();
    free_.pop_back();
    transport::Counters::add(counters_.bytes_received, call.frame.size());
    // The generation begins at 1, so a connection id is never 0.
    slots_[i] = {call.ticket, slots_[i].generation + 1, false, false, false, std::move(call.frame)};
    events_.push_back({Event::Kind::kFrames, id_of(i), {}});
  }

  // Report calls whose frame is still at the front, such as those that were resumed.
  void report_waiting() {
    for (size_t i = 0; i < slots_.size(); ++i) {
      const Slot& slot = slots_[i];
      if (slot.ticket != 0 && !slot.consumed && !slot.paused)
        events_.push_back({Event::Kind::kFrames, id_of(i), {}});
    }
  }

  void answer(Slot& slot, wire::Frame reply) {
    calls_.answer(slot.ticket, slot.frame.size(), std::move(reply));
    slot.ticket = 0;
    slot.frame = wire::Frame();
    free_.push_back(static_cast<size_t>(&slot - slots_.data()));
  }

  Calls& calls_;
  // Only the worker's thread uses the members above mutex_.
  std::vector<Slot> slots_;
  std::vector<size_t> free_;
  std::vector<Event> events_;
  std::vector<CallReply> arriving_;
  std::vector<uint64_t> leaving_;

  std::mutex mutex_;                // guards the members below
  std::vector<CallReply> arrived_;  // tickets and requests
  std::vector<uint64_t> dropped_;   // tickets
  bool woken_ = false;
  std::condition_variable changed_;
};

Calls::Calls(size_t endpoints, std::shared_ptr<transport::MemoryBudget> memory)
    : memory_(std::move(memory)) {
  if (endpoints == 0) return;
  ready_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  for (size_t i = 0; i < endpoints; ++i)
    endpoints_.push_back(std::make_unique<CallEndpoint>(*this));
}

Calls::~Calls() {
  if (ready_ >= 0) ::close(ready_);
}

transport::Endpoint& Calls::endpoint(size_t i) { return *endpoints_[i]; }

base::Result<uint64_t> Calls::submit(wire::Frame frame) {
  if (endpoints_.empty() || ready_ < 0)
    return Status(Code::kFailedPrecondition,
                  "this server takes no calls: start it with call_workers above 0");
  const size_t bytes = frame.size();
  if (bytes > transport::kFreeBytes && !memory_->has_room(bytes)) return memory_->refuse(bytes);
  uint64_t ticket = 0;
  {
    const std::lock_guard lock(mutex_);
    if (finished_) return server_is_stopping();
    if (open_ >= kMaxCalls) {
      return Status(Code::kResourceExhausted, "the server already has " +
                                                  std::to_string(kMaxCalls) +
                                                  " calls: try again, or ask a replica");
    }
    ++open_;
    memory_->change(0, bytes);
    ticket = next_ticket_++;
    // Under the lock, so that finish() finds it.
    endpoints_[ticket % endpoints_.size()]->add(ticket, std::move(frame));
  }
  return ticket;
}

void Calls::drop(uint64_t ticket) {
  if (!endpoints_.empty()) endpoints_[ticket % endpoints_.size()]->drop(ticket);
}

base::Status Calls::hold(size_t bytes) {
  if (bytes > transport::kFreeBytes && !memory_->has_room(bytes)) return memory_->refuse(bytes);
  memory_->change(0, bytes);
  return {};
}

std::vector<CallReply> Calls::take() {
  const std::lock_guard lock(mutex_);
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t bytes_read = ::read(ready_, &count, sizeof(count));
  open_ -= replies_.size();
  for (const CallReply& reply : replies_) memory_->change(reply.frame.size(), 0);
  return std::exchange(replies_, {});
}

// Store a reply. Its bytes replace those of the request in the memory budget.
void Calls::answer(uint64_t ticket, size_t request_bytes, wire::Frame reply) {
  memory_->change(request_bytes, reply.size());
  const std::lock_guard lock(mutex_);
  replies_.push_back({ticket, std::move(reply)});
  const uint64_t one = 1;
  // Cannot fail: the counter overflows only after 2^64 - 1 writes.
  [[maybe_unused]] const ssize_t bytes_written = ::write(ready_, &one, sizeof(one));
}

void Calls::finish() {
  {
    const std::lock_guard lock(mutex_);
    finished_ = true;
  }
  for (const auto& endpoint : endpoints_) {
    for (CallReply& call : endpoint->take_unanswered()) {
      wire::Frame reply;
      encode_refusal(call.frame, server_is_stopping(), reply);
      answer(call.ticket, call.frame.size(), std::move(reply));
    }
  }
}

}  // namespace petps::server
