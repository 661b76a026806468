#include "router/requests.h"

#include "router/pull_work.h"
#include "router/shared.h"

namespace petps::router {

using base::Code;
using base::Status;
using wire::Opcode;

namespace {

// Find the caller: of the token in a hello, or of a connection that has said none.
Status log_in(Shared& shared, Job& job) {
  std::string token;
  if (!job.is_only_login) {
    wire::HelloRequest hello;
    PETPS_RETURN_IF_ERROR(wire::decode_hello(job.header, job.body(), hello));
    token = hello.token;
  }
  auto caller = shared.callers.open(token, job.host, true);
  if (!caller.ok()) return caller.status();
  job.caller = std::move(caller).value();
  job.caller_owner = token.empty() ? 0 : owner_of(token);
  return {};
}

Status hello(Shared& shared, Job& job) {
  PETPS_RETURN_IF_ERROR(log_in(shared, job));
  wire::HelloReply out;
  out.pool_uuid = job.caller->uuid();
  out.limits = shared.options.limits;
  // Servers without these ignore what the router does not pass on.
  out.features = wire::kFeatureShardMap | wire::kFeaturePullWait | wire::kFeatureCatalogueState |
                 wire::kFeaturePushOrder | wire::kFeatureTrace;
  wire::encode_hello_reply(job.header.request_id, out, job.scratch);
  return {};
}

Status list_tables(Shared& shared, Job& job) {
  wire::TablesRequest request;
  PETPS_RETURN_IF_ERROR(wire::decode_tables(job.header, job.body(), request));
  PETPS_RETURN_IF_ERROR(job.caller->forwarder().read_names(shared.options.deadline_ms));
  wire::TablesReply reply = job.caller->names().update(job.caller->forwarder())->reply;
  if (request.with_state) {
    reply.state.pool_uuid = job.caller->uuid();
  } else {
    reply.state = {};
  }
  return wire::encode_tables_reply(job.header.request_id, reply, job.scratch);
}

Status show_status(Shared& shared, Job& job) {
  PETPS_RETURN_IF_ERROR(wire::decode_status(job.header, job.body()));
  // Who may see the status of a server may see that of the router.
  const auto status = job.caller->client().status(-1, shared.options.deadline_ms);
  if (!status.ok()) return status.status();
  return wire::encode_status_reply(job.header.request_id, shared.status_json(), job.scratch);
}

Status hot_keys(Shared& shared, Job& job) {
  wire::HotKeysRequest request;
  PETPS_RETURN_IF_ERROR(
      wire::decode_hot_keys(job.header, job.body(), shared.options.limits, request));
  const ListingPointer listing = job.caller->names().listing();
  const wire::TableInfo* table = listing->table(request.table);
  if (table == nullptr) return refuse_unknown(shared, job, unknown_table(request.table));
  const wire::InstanceInfo* instance = listing->instance(table->instance);
  if (request.keys.empty()) {  // no server would decide whether the caller may
    PETPS_RETURN_IF_ERROR(job.caller->forwarder().check_pull(table->name, instance->name,
                                                             shared.options.deadline_ms));
  }
  PETPS_RETURN_IF_ERROR(
      job.caller->forwarder().send_hot_keys(table->name, instance->name, request.keys));
  wire::encode_hot_keys_reply(job.header.request_id, job.scratch);
  return {};
}

// Without a map, a client sends all keys to the address that it knows: the router's. A server is
// asked all the same, so that it refuses a revoked token and counts the request in its limits.
Status show_shard_map(Shared& shared, Job& job) {
  PETPS_RETURN_IF_ERROR(wire::decode_shard_map(job.header, job.body()));
  PETPS_RETURN_IF_ERROR(job.caller->forwarder().check_caller(shared.options.deadline_ms));
  wire::encode_shard_map_reply(job.header.request_id, wire::ShardMap(), job.scratch);
  return {};
}

Status run(Shared& shared, Job& job) {
  if (job.is_only_login) return log_in(shared, job);
  switch (static_cast<Opcode>(job.header.opcode)) {
    case Opcode::kHello:
      return hello(shared, job);
    case Opcode::kPull:
      return pull(shared, job);
    case Opcode::kPush:
      return push(shared, job);
    case Opcode::kTables:
      return list_tables(shared, job);
    case Opcode::kStatus:
      return show_status(shared, job);
    case Opcode::kHotKeys:
      return hot_keys(shared, job);
    case Opcode::kShardMap:
      return show_shard_map(shared, job);
    default:
      return Status(Code::kInternal, "a request without an answer");  // the worker refuses others
  }
}

}  // namespace

Status unknown_table(uint32_t id) {
  return Status(Code::kNotFound, "table " + std::to_string(id) + " is unknown: list the tables");
}

Status refuse_unknown(const Shared& shared, const Job& job, Status refusal) {
  PETPS_RETURN_IF_ERROR(job.caller->forwarder().check_caller(shared.options.deadline_ms));
  return refusal;
}

Status refuse_unfit(const Shared& shared, const Job& job, std::span<const uint32_t> tables,
                    Status refusal) {
  const client::Forwarder servers = job.caller->forwarder();
  PETPS_RETURN_IF_ERROR(servers.read_names(shared.options.deadline_ms));
  const ListingPointer now = job.caller->names().update(servers);
  for (const uint32_t table : tables) {
    if (now->table(table) == nullptr) return unknown_table(table);
  }
  return refusal;
}

size_t request_bytes(const wire::FrameHeader& header, size_t frame_bytes) {
  // The rows of a push are also in the requests to the servers.
  return static_cast<Opcode>(header.opcode) == Opcode::kPush ? 2 * frame_bytes : frame_bytes;
}

bool is_login(const Job& job) {
  return job.is_only_login || static_cast<Opcode>(job.header.opcode) == Opcode::kHello;
}

void answer(Shared& shared, Job& job) {
  if (job.caller != nullptr) job.caller->note_use();
  job.scratch.clear();
  const bool has_begun = job.pull != nullptr && job.pull->is_prepared;
  if (!has_begun) job.reply.clear();
  Status status = run(shared, job);
  // To a caller it would mean that nothing is applied, and that a newer map helps. Here servers do
  // not agree on the map yet, and some may have applied their rows.
  if (status.code() == Code::kWrongShard) {
    status =
        Status(Code::kUnavailable,
               "partitions move, and the servers did not agree within router.deadline_seconds: " +
                   std::string(status.message()));
  }
  job.is_revoked = !is_login(job) && is_revoked(status) && shared.callers.end(job.caller);
  job.code = status.code();
  if (!status.ok()) {
    job.reply.clear();
    wire::encode_error(job.header.opcode, job.header.request_id, status, job.scratch);
  }
  if (!job.scratch.empty()) job.reply.assign(job.scratch);
}

}  // namespace petps::router
