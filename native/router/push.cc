// A push: rows and deletions go to the servers that own their keys.
#include <cstring>
#include <unordered_map>

#include "router/requests.h"
#include "router/shared.h"

namespace petps::router {

using base::Code;
using base::Status;

namespace {

Status check_push(const wire::PushRequest& push, const wire::TableInfo& table) {
  const std::string name = "table " + std::to_string(table.id) + " (" + table.name + ")";
  if (push.instance != 0 && push.instance != table.instance) {
    return Status(Code::kInvalidArgument, name + " is of instance " +
                                              std::to_string(table.instance) +
                                              ", not of instance " + std::to_string(push.instance));
  }
  if (push.row_bytes == 0 && push.rows.empty()) return {};
  if (push.dim != table.dim || push.dtype != table.dtype || push.row_bytes != table.row_bytes) {
    return Status(Code::kInvalidArgument,
                  name + " stores dim " + std::to_string(table.dim) + " and dtype " +
                      std::to_string(table.dtype) + " in " + std::to_string(table.row_bytes) +
                      " bytes a row, the push has dim " + std::to_string(push.dim) + " and dtype " +
                      std::to_string(push.dtype) + " in " + std::to_string(push.row_bytes) +
                      ": encode rows as the table list says");
  }
  return {};
}

bool is_deleted(const wire::PushRequest& push, size_t i) {
  if (push.row_bytes == 0) return true;
  return !push.deletions.empty() && ((push.deletions[i / 64] >> (i % 64)) & 1) != 0;
}

// The rows, or the deletions, of a push that has both.
struct Part {
  std::vector<uint64_t> keys;
  std::vector<std::byte> rows;
};

// Divide the push. Of a repeated key only the last place counts, because the parts have no order.
void divide(const wire::PushRequest& push, Part& written, Part& deleted) {
  std::unordered_map<uint64_t, size_t> last;
  for (size_t i = 0; i < push.keys.size(); ++i) last[push.keys[i]] = i;
  for (size_t i = 0; i < push.keys.size(); ++i) {
    if (last[push.keys[i]] != i) continue;
    if (is_deleted(push, i)) {
      deleted.keys.push_back(push.keys[i]);
      continue;
    }
    written.keys.push_back(push.keys[i]);
    const auto row = push.rows.subspan(i * push.row_bytes, push.row_bytes);
    written.rows.insert(written.rows.end(), row.begin(), row.end());
  }
}

void add(const client::PushReport& report, wire::PushReply& reply) {
  reply.inserted += report.inserted;
  reply.updated += report.updated;
  reply.deleted += report.deleted;
  reply.absent += report.absent;
  reply.refused += report.refused;
}

// Send one part. A full table is no error here: the reply has the number of refused keys.
Status send(const client::Forwarder& servers, client::ForwardedPush part,
            std::span<const uint64_t> keys, std::span<const std::byte> rows, bool deletes,
            wire::PushReply& reply) {
  part.keys = keys;
  part.rows = rows;
  part.deletes = deletes;
  client::PushReport report;
  const Status status = servers.push(part, report);
  add(report, reply);
  return report.is_complete ? Status() : status;
}

}  // namespace

Status push(Shared& shared, Job& job) {
  wire::PushRequest push;
  PETPS_RETURN_IF_ERROR(wire::decode_push(job.header, job.body(), shared.options.limits, push));
  const ListingPointer listing = job.caller->names().listing();
  const wire::TableInfo* table = listing->table(push.table);
  if (table == nullptr) return refuse_unknown(shared, job, unknown_table(push.table));
  if (Status unfit = check_push(push, *table); !unfit.ok())
    return refuse_unfit(shared, job, {&push.table, 1}, std::move(unfit));
  client::ForwardedPush part;
  part.table = table->name;
  part.instance = listing->instance(table->instance)->name;
  part.stamp = push.stamp;
  part.order = push.order;
  size_t deletions = 0;
  for (size_t i = 0; i < push.keys.size(); ++i) deletions += is_deleted(push, i) ? 1 : 0;
  const client::Forwarder servers = job.caller->forwarder();
  wire::PushReply reply;
  job.keys = push.keys.size();
  if (push.keys.empty())  // no server would see it, refuse a revoked token and count the request
    PETPS_RETURN_IF_ERROR(servers.check_caller(shared.options.deadline_ms));
  if (deletions == push.keys.size()) {
    PETPS_RETURN_IF_ERROR(send(servers, part, push.keys, {}, true, reply));
  } else if (deletions == 0) {
    PETPS_RETURN_IF_ERROR(send(servers, part, push.keys, push.rows, false, reply));
  } else {
    Part written;
    Part deleted;
    divide(push, written, deleted);
    PETPS_RETURN_IF_ERROR(send(servers, part, written.keys, written.rows, false, reply));
    PETPS_RETURN_IF_ERROR(send(servers, part, deleted.keys, {}, true, reply));
  }
  job.rows = reply.inserted + reply.updated;
  job.refused = reply.refused;
  wire::encode_push_reply(job.header.request_id, reply, job.scratch);
  return {};
}

}  // namespace petps::router
