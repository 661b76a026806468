// Which keys this server owns: the shard map, which may change while requests run.
#include "server/shared.h"
#include "server/worker.h"

namespace petps::server {

using base::Code;
using base::Status;

namespace {

Status check_against_pool(const wire::ShardMap& map, const pool::Pool& pool) {
  for (const pool::InstanceRecord& record : pool.instances()) {
    if (record.model != map.model) {
      return Status(Code::kInvalidArgument, "the shard map is of model '" + map.model +
                                                "', but this pool also has instance '" +
                                                record.name +
                                                "': a server with a map serves one model");
    }
    if (record.partitions != map.partitions) {
      return Status(Code::kInvalidArgument, "the shard map has " + std::to_string(map.partitions) +
                                                " partitions, but instance '" + record.name +
                                                "' has " + std::to_string(record.partitions) +
                                                ": the number of partitions never changes");
    }
  }
  return {};
}

}  // namespace

// No reply mixes two maps. A request checks its keys against the worker's map, reads the applied
// version (acquire), and then checks that the change count is still that of this map. This function
// raises the change count (release) before the versions count the new partitions. So a request that
// read such a version sees the new change count and starts again. A worker takes the new map under
// the lock that this function holds, which is after the versions count the map's partitions.
Status Shared::set_shard_map(const wire::ShardMap& map) {
  PETPS_RETURN_IF_ERROR(wire::check_shard_map(map));
  PETPS_RETURN_IF_ERROR(check_against_pool(map, tables.pool()));
  const std::lock_guard lock(ownership_mutex);
  const Ownership& old = *ownership;
  if (map.version <= old.map.version) {
    return Status(Code::kFailedPrecondition,
                  "the shard map has version " + std::to_string(map.version) + ", but version " +
                      std::to_string(old.map.version) +
                      " is in use: a changed map needs a higher version");
  }
  auto next = std::make_shared<Ownership>();
  next->map = map;
  next->shard = wire::shard_of(map, address);
  next->owns_all = next->shard.owns_all();
  next->replicas = wire::replicas_of(map, address);
  ownership = next;
  map_change_count.fetch_add(1, std::memory_order_release);
  tables.count_partitions(next->shard.owned);
  return {};
}

bool Worker::has_current_map() const {
  return shared_.map_change_count.load(std::memory_order_acquire) == map_change_count_;
}

void Worker::take_map() {
  const std::lock_guard lock(shared_.ownership_mutex);
  ownership_ = shared_.ownership;
  map_change_count_ = shared_.map_change_count.load(std::memory_order_relaxed);
}

Status Worker::check_owned(std::span<const uint64_t> keys) const {
  if (ownership_->owns_all) return {};
  const wire::Shard& shard = ownership_->shard;
  for (const uint64_t key : keys) {
    const uint32_t partition = wire::partition_of(key, shard.partitions);
    if (shard.owns(partition)) continue;
    return Status(Code::kWrongShard,
                  "key " + std::to_string(key) + " is in partition " + std::to_string(partition) +
                      ", which " + shared_.address + " does not own (map version " +
                      std::to_string(shard.map_version) + "): read the shard map again");
  }
  return {};
}

Status Worker::show_shard_map(const wire::FrameHeader& header, std::span<const std::byte> body) {
  PETPS_RETURN_IF_ERROR(wire::decode_shard_map(header, body));
  wire::encode_shard_map_reply(header.request_id, ownership_->map, reply_);
  return {};
}

}  // namespace petps::server
