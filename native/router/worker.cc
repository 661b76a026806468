#include "router/worker.h"

#include <algorithm>
#include <functional>

#include "base/clock.h"
#include "base/peer.h"
#include "router/requests.h"
#include "router/shared.h"

namespace petps::router {

using base::Code;
using base::Status;
using transport::ConnectionId;
using transport::Event;
using wire::Opcode;

namespace {

// A poll returns at least this often, so that the worker sees that the router stops.
constexpr int kPollMs = 500;
// A worker tries a frame again after this, for which there was no place. Other workers and the
// threads of logins give places back without a notice.
constexpr int kRetryMs = 1;
// While connections are held, the worker looks this often whether their peers have left.
constexpr int kLookMs = 50;

Status router_is_stopping() {
  return Status(Code::kUnavailable, "the router is stopping: ask another one, or try again");
}

}  // namespace

uint64_t owner_of(const std::string& name) { return std::hash<std::string>()(name) | 1; }

void count(const Job& job, server::WorkerStats& stats) {
  if (job.code != Code::kOk) stats.errors[static_cast<size_t>(job.code)].add(1);
  if (job.is_only_login) return;  // its request follows, or never reaches a server
  if (job.header.opcode < stats.latency.size())
    stats.latency[job.header.opcode].add(base::monotonic_ns() - job.start_ns);
  const auto opcode = static_cast<Opcode>(job.header.opcode);
  if (opcode == Opcode::kPush) stats.pushes.add(1);
  if (job.code != Code::kOk) return;
  if (opcode == Opcode::kPull) {
    stats.pulls.add(1);
    stats.keys.add(job.keys);
    stats.rows_found.add(job.rows);
  } else if (opcode == Opcode::kPush) {
    stats.rows_pushed.add(job.rows);
    stats.rows_refused.add(job.refused);
  } else if (opcode == Opcode::kHotKeys) {
    stats.hot_sets.add(1);
  }
}

Status Worker::open() {
  PETPS_RETURN_IF_ERROR(started_.open());
  return endpoint_.watch(started_.file());
}

void Worker::run() {
  while (!shared_.stopping.load(std::memory_order_acquire)) {
    const int most_ms = is_any_blocked() ? kRetryMs : (held_.empty() ? kPollMs : kLookMs);
    const std::span<const Event> events = endpoint_.poll(started_.wait_ms(most_ms));
    take_arrivals();
    if (has_done_.load(std::memory_order_acquire)) post_replies();
    resume_blocked();
    note_leavers();
    for (const Event& event : events) handle(event);
    transport::Counters::add(rounds_, 1);
  }
  drain();
}

// Take the requests that have arrived. Then wait for their replies, and read no new ones.
void Worker::drain() {
  draining_ = true;
  for (const Event& event : endpoint_.poll(0)) handle(event);
  for (const ConnectionId connection : endpoint_.connections()) endpoint_.pause(connection);
  const uint64_t until = shared_.drain_until_ns.load(std::memory_order_acquire);
  while (true) {
    take_arrivals();
    post_replies();
    const bool has_resumed = resume_blocked();
    drained_ =
        in_flight_ == 0 && !is_any_blocked() && !has_resumed && endpoint_.pending_posts() == 0;
    if (drained_ || base::monotonic_ns() >= until) break;
    for (const Event& event : endpoint_.poll(kRetryMs)) handle(event);
    transport::Counters::add(rounds_, 1);
  }
  for (ConnectionState& state : connections_) {
    if (state.held != nullptr) state.held->is_left.store(true, std::memory_order_relaxed);
  }
  for (const ConnectionId connection : endpoint_.connections())
    endpoint_.close(connection, router_is_stopping());
  endpoint_.poll(0);
}

Worker::ConnectionState& Worker::state_of(ConnectionId connection) {
  const uint32_t slot = transport::slot_of(connection);
  if (slot >= connections_.size()) connections_.resize(slot + 1);
  ConnectionState& state = connections_[slot];
  if (state.id != connection) state = {.id = connection};  // a new connection uses the slot
  return state;
}

void Worker::handle(const Event& event) {
  ConnectionState& state = state_of(event.connection);
  switch (event.kind) {
    case Event::Kind::kOpened:
      state = {.id = event.connection, .host = base::host_of(endpoint_.peer(event.connection))};
      state.owner = owner_of(state.host);
      break;
    case Event::Kind::kFrames:
      while (handle_frames(event.connection) && draining_) {  // a drain takes all frames
      }
      if (draining_) endpoint_.pause(event.connection);
      break;
    case Event::Kind::kClosed:
      if (state.held != nullptr) state.held->is_left.store(true, std::memory_order_relaxed);
      state = {};
      break;
    case Event::Kind::kOverdue:  // only of lists with a pin, and a router has no rows to pin
      break;
  }
}

// Handle at most in_flight frames, so that a client with a long pipeline does not delay others. The
// next poll reports the rest. Return true if the limit was reached.
bool Worker::handle_frames(ConnectionId connection) {
  uint32_t handled = 0;
  std::span<const std::byte> frame;
  while (handled < shared_.options.limits.in_flight && endpoint_.peek(connection, frame)) {
    const Outcome outcome = handle_frame(connection, frame);
    if (outcome != Outcome::kDone) endpoint_.pause(connection);
    if (outcome == Outcome::kWait) {
      const bool is_known = state_of(connection).caller != nullptr;
      (is_known ? blocked_ : blocked_logins_).push_back(connection);
    }
    if (outcome == Outcome::kWait || outcome == Outcome::kLogin) break;
    endpoint_.consume(connection);
    ++handled;
    if (outcome == Outcome::kHold) break;
  }
  endpoint_.flush();
  return handled == shared_.options.limits.in_flight;
}

// Resume the connections that have waited longest; the next poll reports their frames without
// waiting. One that finds no place again waits behind the others. Return whether any was resumed.
bool Worker::resume_blocked() {
  if (!is_any_blocked()) return false;
  const uint64_t now = base::monotonic_ns();
  if (!has_free_place_ && now < retry_ns_) return false;
  has_free_place_ = false;
  retry_ns_ = now + uint64_t{kRetryMs} * 1'000'000;
  return resume_some(blocked_) + resume_some(blocked_logins_) > 0;
}

size_t Worker::resume_some(std::deque<ConnectionId>& blocked) {
  size_t resumed = 0;
  while (!blocked.empty() && resumed < kResumedAtOnce) {
    const ConnectionId connection = blocked.front();
    blocked.pop_front();
    const ConnectionState& state = connections_[transport::slot_of(connection)];
    if (state.id != connection || state.is_revoked) continue;  // it is closed, or will be
    endpoint_.resume(connection);
    ++resumed;
  }
  return resumed;
}

// Tell the calls whose peers have left, and for which their connections are paused.
void Worker::note_leavers() {
  for (const ConnectionId connection : held_) {
    const ConnectionState& state = connections_[transport::slot_of(connection)];
    if (state.id == connection && state.held != nullptr && endpoint_.has_left(connection))
      state.held->is_left.store(true, std::memory_order_relaxed);
  }
}

Status Worker::look_at_pull(const wire::FrameHeader& header, std::span<const std::byte> body,
                            uint32_t& wait_ms) const {
  wire::PullRequest pull;
  PETPS_RETURN_IF_ERROR(wire::decode_pull(header, body, shared_.options.limits, pull));
  wait_ms = pull.min_version == 0 ? 0 : pull.wait_ms;
  return {};
}

Worker::Outcome Worker::handle_frame(ConnectionId connection, std::span<const std::byte> frame) {
  wire::FrameHeader header;
  Status refusal = wire::decode_request_header(frame, header);
  const auto opcode = static_cast<Opcode>(header.opcode);
  uint32_t wait_ms = 0;
  if (refusal.ok() && opcode == Opcode::kPull)
    refusal = look_at_pull(header, frame.subspan(wire::kHeaderBytes), wait_ms);
  if (refusal.ok() && opcode == Opcode::kControl) {
    refusal = Status(Code::kUnimplemented,
                     "a router takes no administration: run the command on the servers' machines, "
                     "or with their admin ports");
  } else if (refusal.ok() && opcode == Opcode::kRdma) {
    refusal = Status(Code::kUnimplemented, "a router offers no RDMA: connect to the servers");
  } else if (refusal.ok() && (header.opcode == 0 || header.opcode >= wire::kOpcodesEnd)) {
    refusal = Status(Code::kUnimplemented, "opcode " + std::to_string(header.opcode) +
                                               " is unknown to this router (protocol version " +
                                               std::to_string(wire::kProtocolVersion) + ")");
  }
  if (refusal.ok()) return submit(state_of(connection), header, frame, wait_ms);
  refuse(connection, header, refusal);
  return Outcome::kDone;
}

// Start a pull, or hand a request to a call. A connection that has not said hello logs in without a
// token first.
Worker::Outcome Worker::submit(ConnectionState& state, const wire::FrameHeader& header,
                               std::span<const std::byte> frame, uint32_t wait_ms) {
  if (state.in_flight >= shared_.options.limits.in_flight) return Outcome::kWait;
  const bool is_hello = static_cast<Opcode>(header.opcode) == Opcode::kHello;
  const bool is_only_login = !is_hello && state.caller == nullptr;
  const size_t bytes = is_only_login ? 0 : request_bytes(header, frame.size());
  if (const Status full = shared_.memory->admit(bytes); !full.ok()) {
    state.blocked_since_ns = 0;
    refuse(state.id, header, full);
    return Outcome::kDone;
  }
  const Callers::Place place = place_of(state, header, frame);
  if (place == Callers::Place::kWait) return wait_for_place(state, header);
  // Frames before a hello keep their caller, because they have their jobs already.
  JobPointer job = place == Callers::Place::kLogin ? shared_.logins.begin(owner_of(state.host))
                                                   : shared_.calls.begin(state.owner);
  if (job == nullptr) return wait_for_place(state, header);
  state.blocked_since_ns = 0;
  job->worker = number_;
  job->connection = state.id;
  job->header = header;
  job->host = state.host;
  job->start_ns = base::monotonic_ns();
  job->caller = state.caller;
  job->wait_ms = wait_ms > 0 && job->calls->begin_wait(*job) ? wait_ms : 0;
  job->is_only_login = is_only_login;
  job->is_held = is_hello || job->is_only_login || job->wait_ms > 0;
  job->is_left.store(false, std::memory_order_relaxed);
  job->is_revoked = false;
  job->code = Code::kOk;
  job->caller_owner = 0;
  job->keys = job->rows = job->refused = 0;
  if (job->is_only_login) {
    job->frame.clear();
  } else {
    job->frame.assign(frame.begin(), frame.end());
  }
  job->counted_bytes = bytes;
  shared_.memory->change(0, job->counted_bytes);
  if (job->wait_ms > 0) stats_.waits_for_version.add(1);
  const Outcome outcome = job->is_only_login ? Outcome::kLogin
                          : job->is_held     ? Outcome::kHold
                                             : Outcome::kDone;
  if (job->is_held) {
    state.held = job.get();
    held_.push_back(state.id);
  }
  ++state.in_flight;
  ++in_flight_;
  const bool is_pull = static_cast<Opcode>(header.opcode) == Opcode::kPull;
  if (is_pull && !job->is_only_login && start_pull(shared_, *job)) started_.add(job);
  if (job == nullptr) return outcome;
  Calls& calls = *job->calls;
  calls.submit(std::move(job));
  return outcome;
}

// Let the frame wait for a place. Refuse a login that has waited as long as a request may take, so
// that its peer hears the reason before it gives up, and leaves its place in the queue to others.
Worker::Outcome Worker::wait_for_place(ConnectionState& state, const wire::FrameHeader& header) {
  const uint64_t now = base::monotonic_ns();
  if (state.blocked_since_ns == 0) state.blocked_since_ns = now;
  const bool is_login =
      state.caller == nullptr || static_cast<Opcode>(header.opcode) == Opcode::kHello;
  const uint64_t most_ns = uint64_t{shared_.options.deadline_ms} * 1'000'000;
  if (!is_login || now - state.blocked_since_ns < most_ns) return Outcome::kWait;
  const ConnectionId connection = state.id;
  refuse(
      connection, header,
      Status(Code::kResourceExhausted,
             "the router had no place for the login within " +
                 std::to_string(shared_.options.deadline_ms) +
                 " ms (router.deadline_seconds): other logins of this host or token wait for "
                 "the servers, or all router.calls are taken: try again, or ask another router"));
  endpoint_.close(connection, {});
  return Outcome::kDone;
}

// Return how the caller of a frame is found. A login may wait for the servers.
Callers::Place Worker::place_of(const ConnectionState& state, const wire::FrameHeader& header,
                                std::span<const std::byte> frame) {
  if (static_cast<Opcode>(header.opcode) == Opcode::kHello) {
    wire::HelloRequest hello;
    if (!wire::decode_hello(header, frame.subspan(wire::kHeaderBytes), hello).ok())
      return Callers::Place::kKnown;  // it is refused without a login
    return shared_.callers.look(std::string(hello.token), state.host);
  }
  return state.caller != nullptr ? Callers::Place::kKnown : shared_.callers.look("", state.host);
}

void Worker::finish(JobPointer job) {
  bool is_first = false;
  {
    const std::lock_guard lock(done_mutex_);
    is_first = done_.empty();
    done_.push_back(std::move(job));
  }
  if (!is_first) return;  // the worker has been woken already
  has_done_.store(true, std::memory_order_release);
  endpoint_.wake();
}

// Answer the pulls whose rows have arrived. Those that need more get the thread of a call.
void Worker::take_arrivals() {
  started_.look([this](JobPointer job, bool is_done) {
    if (!is_done) return shared_.calls.submit(std::move(job));  // a login starts no pull
    transport::Counters::add(started_pulls_, 1);
    answer(shared_, *job);
    post_reply(std::move(job));
  });
  endpoint_.flush();
}

void Worker::drop_replies() {
  for (JobPointer& job : started_.take_all()) done_.push_back(std::move(job));
  for (JobPointer& job : done_) end(std::move(job));
  done_.clear();
}

void Worker::post_replies() {
  {
    const std::lock_guard lock(done_mutex_);
    has_done_.store(false, std::memory_order_relaxed);
    done_now_.swap(done_);
  }
  for (JobPointer& job : done_now_) post_reply(std::move(job));
  done_now_.clear();
  endpoint_.flush();
}

void Worker::post_reply(JobPointer job) {
  --in_flight_;
  ConnectionState& state = connections_[transport::slot_of(job->connection)];
  const bool is_open = state.id == job->connection;
  const bool has_logged_in = job->is_only_login && job->code == Code::kOk;
  if (is_open) {
    --state.in_flight;
    if (is_login(*job) && job->code == Code::kOk) {
      state.caller = job->caller;
      state.owner = job->caller_owner != 0 ? job->caller_owner : owner_of(state.host);
    }
    state.is_revoked = state.is_revoked || job->is_revoked;
  }
  count(*job, stats_);
  if (is_open && !has_logged_in && !job->is_revoked) {
    if (job->is_only_login) endpoint_.consume(job->connection);  // the reply is the frame's
    endpoint_.post(job->connection, std::move(job->reply), epoch::Pin());
    if (job->code == Code::kUnauthenticated ||
        (is_login(*job) && job->code == Code::kResourceExhausted))
      endpoint_.close(job->connection, {});
  }
  if (job->is_held) std::erase(held_, job->connection);
  if (is_open && job->is_held) {
    state.held = nullptr;
    if (!state.is_revoked && (!draining_ || has_logged_in)) endpoint_.resume(job->connection);
  }
  if (is_open && state.is_revoked) end_revoked(state);
  job->reply.clear();
  end(std::move(job));
}

// Close the connection as a server does, so that its client connects again, with its next token.
// Other requests are answered first: pushes among them may be applied.
void Worker::end_revoked(const ConnectionState& state) {
  endpoint_.pause(state.id);
  if (state.in_flight > 0) return;
  endpoint_.close(state.id, Status(Code::kUnauthenticated,
                                   "the servers do not know this token any more: connect again "
                                   "with another one"));
}

void Worker::end(JobPointer job) {
  has_free_place_ = true;
  shared_.memory->change(job->counted_bytes, 0);
  Calls& calls = *job->calls;
  calls.end(std::move(job));
}

void Worker::refuse(ConnectionId connection, const wire::FrameHeader& header,
                    const Status& status) {
  stats_.errors[static_cast<size_t>(status.code())].add(1);
  wire::encode_error(header.opcode, header.request_id, status, reply_);
  list_.assign(reply_);
  endpoint_.post(connection, std::move(list_), epoch::Pin());
}

}  // namespace petps::router
