#include "server/worker.h"

#include "base/clock.h"
#include "server/shared.h"

namespace petps::server {

using base::Code;
using base::Status;
using transport::ConnectionId;
using transport::Event;
using wire::Opcode;

namespace {

// A poll returns at least this often, so that the worker sees that the server stops.
constexpr int kPollMs = 500;
// A worker retries a frame that waits for a pin or for the writer after this, or when it wakes.
constexpr int kRetryMs = 1;
// A connection's turn ends after this, or after its first frame if that takes longer. It is more
// than twenty pulls of 500 keys take. Without it, a client that asks for the status all the time
// would make the others wait for as many answers as it may have in flight.
constexpr uint64_t kTurnNs = 1'000'000;

}  // namespace

Worker::Worker(Shared& shared, size_t number, transport::Endpoint& endpoint, epoch::Reader& reader,
               Source source)
    : shared_(shared), number_(number), endpoint_(endpoint), reader_(reader), source_(source) {
  take_map();
  rows_.resize(wire::kMaxKeysPerPull);
  if (shared.options.trace) spans_ = std::make_unique<SpanRecorder>(shared.options.trace_sample);
}

void Worker::run() {
  while (!shared_.stopping.load(std::memory_order_acquire)) {
    const bool waiting = !blocked_.empty() || !parked_.empty();
    const std::span<const Event> events = poll(waiting ? kRetryMs : kPollMs);
    if (has_done_.load(std::memory_order_acquire)) post_pushes();
    if (has_to_close_.load(std::memory_order_acquire)) close_doors();
    if (waiting) resume_blocked();
    renew_callers();
    for (const Event& event : events) handle(event);
    transport::Counters::add(rounds_, 1);
  }
  drain();
}

std::span<const Event> Worker::poll(int timeout_ms) {
  const std::span<const Event> events = endpoint_.poll(timeout_ms);
  if (spans_ != nullptr) spans_->note_poll(base::monotonic_ns());
  return events;
}

// Answer the requests that have arrived. Then wait for pushes and posted lists, and read no new
// requests.
void Worker::drain() {
  draining_ = true;
  for (const Event& event : poll(0)) handle(event);
  for (const ConnectionId connection : endpoint_.connections()) endpoint_.pause(connection);
  const uint64_t until = shared_.drain_until_ns.load(std::memory_order_acquire);
  while (true) {
    post_pushes();
    resume_blocked();
    endpoint_.flush();
    drained_ = pushes_in_flight_ == 0 && blocked_.empty() && unblocked_.empty() &&
               parked_.empty() && endpoint_.pending_posts() == 0;
    if (drained_ || base::monotonic_ns() >= until) break;
    for (const Event& event : poll(kRetryMs)) handle(event);
    transport::Counters::add(rounds_, 1);
    unblocked_.clear();
  }
  for (const ConnectionId connection : endpoint_.connections()) {
    endpoint_.close(connection, server_is_stopping());
  }
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
  switch (event.kind) {
    case Event::Kind::kOpened:
      opened(event.connection);
      break;
    case Event::Kind::kFrames:
      while (handle_frames(event.connection) && draining_) {  // a drain takes all frames
      }
      if (draining_) endpoint_.pause(event.connection);
      break;
    case Event::Kind::kClosed:
      closed(event);
      break;
    case Event::Kind::kOverdue: {
      if (!event.reason.ok()) {  // already closed
        shared_.report_incident(event.reason.to_string(), state_of(event.connection).peer);
        break;
      }
      const std::string text = "connection " + endpoint_.peer(event.connection) +
                               " has held rows longer than " +
                               std::to_string(shared_.options.transport.pin_ms) + " ms: closed";
      endpoint_.close(event.connection,
                      Status(Code::kDeadlineExceeded, text));  // the kClosed event reports it
      break;
    }
  }
}

// Handle at most in_flight frames, for at most kTurnNs, so that a client with a long pipeline does
// not delay other clients. The next poll reports the others. Return true if a limit was reached.
bool Worker::handle_frames(ConnectionId connection) {
  uint32_t handled = 0;
  bool is_over = false;
  const uint64_t until_ns = base::monotonic_ns() + kTurnNs;
  std::span<const std::byte> frame;
  while (!is_over && endpoint_.peek(connection, frame)) {
    const Outcome outcome = handle_frame(connection, frame);
    if (outcome != Outcome::kDone) {
      endpoint_.pause(connection);
      if (outcome == Outcome::kWait) blocked_.push_back(connection);
      break;
    }
    ConnectionState& state = state_of(connection);
    state.parked_until_ns = 0;
    state.admitted = false;
    state.front.arrived_ns = 0;
    endpoint_.consume(connection);
    is_over = ++handled == shared_.options.limits.in_flight || base::monotonic_ns() >= until_ns;
  }
  endpoint_.flush();
  if (spans_ != nullptr) spans_->flush();
  return is_over;
}

// Resume the connections; the next poll reports their frames without waiting.
void Worker::resume_blocked() {
  unblocked_.swap(blocked_);
  blocked_.clear();
  collect_due();
  for (const ConnectionId connection : unblocked_) endpoint_.resume(connection);
  if (!draining_) unblocked_.clear();  // drain() checks whether it is empty
}

// Retry parked pulls whose version is applied or whose time is over.
void Worker::collect_due() {
  if (parked_.empty()) return;
  const uint64_t now = base::monotonic_ns();
  std::erase_if(parked_, [&](const Parked& parked) {
    if (endpoint_.has_left(parked.connection)) {
      endpoint_.close(parked.connection, {});  // nobody waits, and its place is another client's
      return true;
    }
    const bool due = draining_ || now >= parked.until_ns ||
                     shared_.tables.applied_version(parked.instance) >= parked.version;
    if (due) unblocked_.push_back(parked.connection);
    return due;
  });
}

Worker::Outcome Worker::handle_frame(ConnectionId connection, std::span<const std::byte> frame) {
  if (!has_current_map()) take_map();
  Request request{connection, {}, frame, base::monotonic_ns()};
  const wire::FrameHeader& header = request.header;
  Status refusal = wire::decode_request_header(frame, request.header);
  const std::span<const std::byte> body = request.body();
  Outcome outcome = Outcome::kDone;
  bool answered = false;  // pull() posts its reply
  bool is_refused = false;
  if (refusal.ok()) refusal = admit(request, is_refused);
  if (refusal.ok()) {
    switch (static_cast<Opcode>(header.opcode)) {
      case Opcode::kPull:
        outcome = pull(request, refusal);
        if (outcome != Outcome::kDone) {
          if (spans_ != nullptr) spans_->cancel();
          return outcome;
        }
        answered = true;
        break;
      case Opcode::kPush:
        outcome = push(request, refusal);
        if (outcome != Outcome::kDone || refusal.ok()) return outcome;  // see post_pushes
        break;
      case Opcode::kControl:
        refusal = Status(Code::kUnimplemented,
                         "this port takes no switches and drops: run `petps alias` or `petps drop` "
                         "with the path of the pool on the server's machine, or with its admin "
                         "port (server.admin_port)");
        break;
      case Opcode::kHello:
        refusal = hello(header, body);
        break;
      case Opcode::kTables:
        refusal = list_tables(header, body);
        break;
      case Opcode::kStatus:
        refusal = show_status(header, body);
        break;
      case Opcode::kHotKeys:
        refusal = hot_keys(header, body);
        break;
      case Opcode::kShardMap:
        refusal = show_shard_map(header, body);
        break;
      case Opcode::kRdma:
        refusal = open_rdma(connection, header, body);
        break;
      default:
        refusal = Status(Code::kUnimplemented, "opcode " + std::to_string(header.opcode) +
                                                   " is unknown to this server (protocol version " +
                                                   std::to_string(wire::kProtocolVersion) + ")");
    }
  }
  if (!refusal.ok()) {
    reply_error(connection, header, refusal);
  } else if (!answered) {
    reply(connection);
  }
  if (spans_ != nullptr) spans_->end(refusal);
  if (is_refused) endpoint_.close(connection, {});
  const uint64_t latency_ns = base::monotonic_ns() - request.start_ns;
  if (header.opcode < stats_.latency.size()) stats_.latency[header.opcode].add(latency_ns);
  if (answered && refusal.ok()) {
    for (TableStats* stats : section_stats_) {
      if (stats != nullptr) stats->latency.add(latency_ns);
    }
  }
  return Outcome::kDone;
}

void Worker::reply(ConnectionId connection) {
  list_.assign(reply_);
  const uint32_t slot = transport::slot_of(connection);
  if (slot < connections_.size() && connections_[slot].caller != nullptr)
    connections_[slot].caller->spend_bytes(list_.bytes());
  endpoint_.post(connection, std::move(list_), epoch::Pin());
}

void Worker::reply_error(ConnectionId connection, const wire::FrameHeader& header,
                         const Status& status) {
  stats_.errors[static_cast<size_t>(status.code())].add(1);
  wire::encode_error(header.opcode, header.request_id, status, reply_);
  reply(connection);
}

table::Table* Worker::find_table(uint32_t id) {
  const uint64_t change_count = shared_.tables.change_count();
  if (change_count != tables_change_count_) {  // tables were dropped
    tables_by_id_.clear();
    models_.clear();
    table_stats_.forget_dropped(shared_.tables);
    tables_change_count_ = change_count;
  }
  if (id < tables_by_id_.size() && tables_by_id_[id].table != nullptr)
    return tables_by_id_[id].table;
  table::Table* table = shared_.tables.find(id).get();
  // Ids are small in practice; larger ids are looked up each time.
  constexpr uint32_t kCachedIds = 1u << 16;
  if (table != nullptr && id < kCachedIds) {
    if (id >= tables_by_id_.size()) tables_by_id_.resize(id + 1);
    tables_by_id_[id].table = table;
  }
  return table;
}

TableStats& Worker::stats_of(uint32_t table) {
  if (table >= tables_by_id_.size()) return table_stats_.of(table);
  TableStats*& stats = tables_by_id_[table].stats;
  if (stats == nullptr) stats = &table_stats_.of(table);
  return *stats;
}

Status Worker::unknown_table(uint32_t id) const {
  if (source_ == Source::kCalls)  // its doors know whose names they may show
    return Status(Code::kNotFound, "table " + std::to_string(id) + " is unknown: list the tables");
  constexpr size_t kNamed = 16;
  std::string text = "table " + std::to_string(id) + " is unknown; this pool has ";
  const std::vector<table::TablePointer> tables = shared_.tables.tables();
  if (tables.empty()) text += "no tables: create one with `petps create`";
  for (size_t i = 0; i < tables.size() && i < kNamed; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(tables[i]->id()) + " (" + tables[i]->record().spec.name + ")";
  }
  if (tables.size() > kNamed) text += " and " + std::to_string(tables.size() - kNamed) + " more";
  return Status(Code::kNotFound, std::move(text));
}

}  // namespace petps::server
