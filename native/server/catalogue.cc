// The requests beside pulls and pushes: hello, tables, status, hot keys.
#include <algorithm>

#include "base/clock.h"
#include "server/shared.h"
#include "server/worker.h"

namespace petps::server {

using base::Status;

namespace {

// A status that takes longer than this is sent again to whoever asks within nine times as long, so
// that askers have at most a tenth of a worker.
constexpr uint64_t kCostlyStatusNs = 1'000'000;
constexpr uint64_t kStatusRest = 9;

}  // namespace

Status Worker::hello(const wire::FrameHeader& header, std::span<const std::byte> body) {
  wire::HelloRequest request;
  PETPS_RETURN_IF_ERROR(wire::decode_hello(header, body, request));
  wire::HelloReply out;
  const std::array<uint8_t, 16>& uuid = shared_.tables.pool().uuid();
  std::copy(uuid.begin(), uuid.end(), out.pool_uuid.begin());
  out.limits = shared_.options.limits;
  out.shard = ownership_->shard;
  out.features = wire::kFeatureShardMap | wire::kFeaturePullWait | wire::kFeatureCatalogueState |
                 wire::kFeaturePushOrder;
  if (shared_.rdma != nullptr) out.features |= wire::kFeatureRdma;
  if (shared_.options.trace) out.features |= wire::kFeatureTrace;
  out.hot_set_seconds = shared_.options.hot_set_seconds;
  wire::encode_hello_reply(header.request_id, out, reply_);
  return {};
}

// Describe the catalogue. If an instance is dropped in between, read names and tables again, so
// that every listed instance has its tables.
wire::TablesReply describe_tables(table::Tables& tables, const wire::TablesRequest& request,
                                  const access::Caller& caller) {
  wire::TablesReply out;
  uint64_t change_count = 0;
  pool::Names names;
  std::vector<table::TablePointer> found;
  do {
    change_count = tables.change_count();
    names = tables.pool().names();
    found = tables.tables();
  } while (tables.change_count() != change_count);
  std::erase_if(names.instances, [&](const pool::InstanceRecord& instance) {
    return !caller.knows(instance.model);
  });
  const auto is_named = [&](uint32_t id) {
    return std::any_of(names.instances.begin(), names.instances.end(),
                       [&](const pool::InstanceRecord& instance) { return instance.id == id; });
  };
  for (const pool::InstanceRecord& record : names.instances) {
    out.instances.push_back({record.id, record.model, record.name, record.partitions,
                             tables.applied_version(record.id)});
  }
  for (const pool::AliasRecord& alias : names.aliases) {
    if (is_named(alias.instance))
      out.aliases.push_back({alias.name, alias.instance, alias.previous});
  }
  if (request.with_state) out.state = {tables.pool().uuid(), names.sequence};
  for (const table::TablePointer& table : found) {
    const pool::TableRecord& record = table->record();
    const pool::TableSpec& spec = record.spec;
    // Not named: created since the names were read, or of a model that the caller may not know.
    if (!is_named(spec.instance)) continue;
    out.tables.push_back({record.id, spec.instance, spec.name, spec.dtype,
                          static_cast<uint8_t>(spec.feed), spec.dim, spec.row_bytes,
                          table->capacity(), table->status().rows, spec.default_row});
  }
  return out;
}

Status Worker::list_tables(const wire::FrameHeader& header, std::span<const std::byte> body) {
  wire::TablesRequest request;
  PETPS_RETURN_IF_ERROR(wire::decode_tables(header, body, request));
  return wire::encode_tables_reply(header.request_id,
                                   describe_tables(shared_.tables, request, *caller_), reply_);
}

Status Worker::show_status(const wire::FrameHeader& header, std::span<const std::byte> body) {
  PETPS_RETURN_IF_ERROR(wire::decode_status(header, body));
  if (!caller_->may_see_all()) {
    shared_.gate->count_denied();
    return caller_->refuse(access::Role::kRead, "all models, which the status shows");
  }
  const uint64_t begin = base::monotonic_ns();
  if (begin >= status_until_ns_) {
    status_ = shared_.status_json();
    const uint64_t end = base::monotonic_ns();
    // With many tables it takes milliseconds, and others wait: then it is sent again for a while.
    status_until_ns_ = end - begin < kCostlyStatusNs ? 0 : end + kStatusRest * (end - begin);
  }
  return wire::encode_status_reply(header.request_id, status_, reply_);
}

Status Worker::hot_keys(const wire::FrameHeader& header, std::span<const std::byte> body) {
  wire::HotKeysRequest request;
  PETPS_RETURN_IF_ERROR(wire::decode_hot_keys(header, body, shared_.options.limits, request));
  const table::TablePointer table = shared_.tables.find(request.table);
  PETPS_RETURN_IF_ERROR(check_right(access::Role::kRead, request.table, table.get()));
  if (table == nullptr) return unknown_table(request.table);
  table->set_hot_keys(std::vector<uint64_t>(request.keys.begin(), request.keys.end()));
  stats_.hot_sets.add(1);
  wire::encode_hot_keys_reply(header.request_id, reply_);
  return {};
}

}  // namespace petps::server
