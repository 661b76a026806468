// Pushes and control: the worker checks and answers them, the writer's thread performs them.
#include "base/clock.h"
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
                      "make a table that takes pushes");
  }
  if (ownership_->replicas.size() > 1)
    return wire::refuse_replicated_push(spec.name, ownership_->replicas);
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

Worker::Outcome Worker::push(transport::ConnectionId connection, const wire::FrameHeader& header,
                             std::span<const std::byte> frame, uint64_t start_ns, Status& refusal) {
  wire::PushRequest request;
  refusal =
      wire::decode_push(header, frame.subspan(wire::kHeaderBytes), shared_.options.limits, request);
  if (!refusal.ok()) return Outcome::kDone;
  refusal = check_owned(request.keys);
  if (!refusal.ok()) return Outcome::kDone;
  const table::TablePointer table = shared_.tables.find(request.table);
  refusal = table == nullptr ? unknown_table(request.table) : check_push(request, *table);
  if (!refusal.ok()) return Outcome::kDone;
  return queue(connection, header, frame, start_ns, table);
}

Worker::Outcome Worker::control(transport::ConnectionId connection, const wire::FrameHeader& header,
                                std::span<const std::byte> frame, uint64_t start_ns,
                                Status& refusal) {
  wire::ControlRequest request;
  refusal = wire::decode_control(header, frame.subspan(wire::kHeaderBytes), request);
  if (!refusal.ok()) return Outcome::kDone;
  return queue(connection, header, frame, start_ns, nullptr);
}

Worker::Outcome Worker::queue(transport::ConnectionId connection, const wire::FrameHeader& header,
                              std::span<const std::byte> frame, uint64_t start_ns,
                              const table::TablePointer& table) {
  ConnectionState& state = state_of(connection);
  if (state.pushes_in_flight >= shared_.options.limits.in_flight) return Outcome::kWait;
  PushJob job;
  job.worker = number_;
  job.connection = connection;
  job.request_id = header.request_id;
  job.start_ns = start_ns;
  job.opcode = header.opcode;
  job.table = table;
  job.frame.assign(frame.begin(), frame.end());
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
    ConnectionState& state = connections_[transport::slot_of(done.connection)];
    if (state.id == done.connection) --state.pushes_in_flight;
    const bool is_push = done.opcode == static_cast<uint16_t>(wire::Opcode::kPush);
    stats_.pushes.add(is_push ? 1 : 0);
    if (done.status.ok() && !is_push) {
      wire::encode_control_reply(done.request_id, reply_);
      reply(done.connection);
    } else if (done.status.ok()) {
      stats_.rows_pushed.add(done.reply.inserted + done.reply.updated);
      stats_.rows_refused.add(done.reply.refused);
      wire::encode_push_reply(done.request_id, done.reply, reply_);
      reply(done.connection);
    } else {
      wire::FrameHeader header;
      header.opcode = done.opcode;
      header.request_id = done.request_id;
      reply_error(done.connection, header, done.status);
    }
    stats_.latency[done.opcode].add(base::monotonic_ns() - done.start_ns);
  }
  done_now_.clear();
  endpoint_.flush();
}

}  // namespace petps::server
