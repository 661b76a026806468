// Pushes: the worker checks and answers them; the writer's thread performs them.
#include <functional>

#include "base/clock.h"
#include "base/peer.h"
#include "server/shared.h"
#include "server/worker.h"

namespace petps::server {

using base::Code;
using base::Status;

namespace {

std::string name_of(const table::Table& table) {
  return "table " + std::to_string(table.id()) + " (" + table.record().spec.name + ")";
}

}  // namespace

Status Worker::check_push(const wire::PushRequest& push, const table::Table& table) const {
  const pool::TableSpec& spec = table.record().spec;
  if (push.instance != 0 && push.instance != spec.instance) {
    return Status(Code::kInvalidArgument, name_of(table) + " is of instance " +
                                              std::to_string(spec.instance) + ", not of instance " +
                                              std::to_string(push.instance));
  }
  if (spec.feed == pool::Feed::kDelta) {
    return Status(Code::kFailedPrecondition,
                  name_of(table) +
                      " is fed by deltas: a push to it is refused; publish a delta, or "
                      "create a table that takes pushes");
  }
  PETPS_RETURN_IF_ERROR(check_one_owner(spec.name, push.keys));
  if (push.row_bytes == 0 && push.rows.empty())
    return {};  // deletions only: there are no rows whose shape could be wrong
  if (push.dim != spec.dim) {
    return Status(Code::kInvalidArgument, name_of(table) + " has rows of dim " +
                                              std::to_string(spec.dim) + ", the push has dim " +
                                              std::to_string(push.dim));
  }
  if (push.dtype != spec.dtype || push.row_bytes != spec.row_bytes) {
    return Status(Code::kInvalidArgument,
                  name_of(table) + " stores dtype " + std::to_string(spec.dtype) + " in " +
                      std::to_string(spec.row_bytes) + " bytes a row, the push has dtype " +
                      std::to_string(push.dtype) + " in " + std::to_string(push.row_bytes) +
                      ": encode rows as the table list says");
  }
  return {};
}

Worker::Outcome Worker::push(const Request& request, Status& refusal) {
  ConnectionState& state = state_of(request.connection);
  if (state.push_owner == 0) state.push_owner = push_owner_of(request.connection, *caller_);
  // It is retried each millisecond: look for room before the frame is decoded or copied.
  if (!shared_.writer->has_room(state.push_owner, request.frame.size())) return Outcome::kWait;
  wire::PushRequest push;
  refusal = wire::decode_push(request.header, request.body(), shared_.options.limits, push);
  if (!refusal.ok()) return Outcome::kDone;
  const table::TablePointer table = shared_.tables.find(push.table);
  refusal = check_right(access::Role::kWrite, push.table, table.get());
  if (!refusal.ok()) return Outcome::kDone;
  refusal = shared_.check_owned(*ownership_, push.keys, ownership_->pauses.pushes);
  if (!refusal.ok()) return Outcome::kDone;
  refusal = table == nullptr ? unknown_table(push.table) : check_push(push, *table);
  return refusal.ok() ? queue(request, table, push.stamp, push.keys.size()) : Outcome::kDone;
}

// Return whose turn a push of the connection takes; never 0.
uint64_t Worker::push_owner_of(transport::ConnectionId connection,
                               const access::Caller& caller) const {
  const std::string owner =
      caller.is_anyone() ? base::host_of(endpoint_.peer(connection)) : "grant " + caller.name();
  return std::hash<std::string>()(owner) | 1;
}

Worker::Outcome Worker::queue(const Request& request, const table::TablePointer& table,
                              uint32_t stamp, size_t keys) {
  ConnectionState& state = state_of(request.connection);
  if (state.pushes_in_flight >= shared_.options.limits.in_flight) return Outcome::kWait;
  PushJob job{{number_, request.connection, request.header, request.start_ns},
              state.push_owner,
              table,
              stamp,
              keys,
              map_change_count_,
              {request.frame.begin(), request.frame.end()}};
  if (!shared_.writer->queue(job)) return Outcome::kWait;
  ++state.pushes_in_flight;
  ++pushes_in_flight_;
  return Outcome::kDone;
}

void Worker::finish_push(PushDone done) {
  {
    const std::lock_guard lock(done_mutex_);
    done_.push_back(std::move(done));
  }
  has_done_.store(true, std::memory_order_release);
  endpoint_.wake();
}

void Worker::post_pushes() {
  {
    const std::lock_guard lock(done_mutex_);
    has_done_.store(false, std::memory_order_relaxed);
    done_now_.swap(done_);
  }
  for (const PushDone& done : done_now_) {
    --pushes_in_flight_;
    const auto& [worker, connection, header, start_ns] = done.origin;
    ConnectionState& state = connections_[transport::slot_of(connection)];
    if (state.id == connection) --state.pushes_in_flight;
    stats_.pushes.add(1);
    if (!done.status.ok()) {
      reply_error(connection, header, done.status);
    } else {
      stats_.rows_pushed.add(done.reply.inserted + done.reply.updated);
      stats_.rows_refused.add(done.reply.refused);
      wire::encode_push_reply(header.request_id, done.reply, reply_);
      reply(connection);
    }
    stats_.latency[header.opcode].add(base::monotonic_ns() - start_ns);
  }
  done_now_.clear();
  endpoint_.flush();
}

}  // namespace petps::server
