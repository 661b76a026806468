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
                                                "', and this pool also holds '" + record.name +
                                                "': a server with a map serves one model");
    }
    if (record.partitions != map.partitions) {
      return Status(Code::kInvalidArgument, "the shard map has " + std::to_string(map.partitions) +
                                                " partitions, instance '" + record.name + "' " +
                                                std::to_string(record.partitions) +
                                                ": the number is fixed for ever");
    }
  }
  return {};
}

}  // namespace

// No reply mixes two maps. A request reads the applied version (acquire) and then checks that the
// generation is still that of the map its keys were checked by. This function raises the
// generation before the versions count the new partitions (release), so a request that read such
// a version sees the new generation and starts again. A worker takes the new map under the lock
// held here, so only after the versions count its partitions.
Status Shared::set_shard_map(const wire::ShardMap& map) {
  PETPS_RETURN_IF_ERROR(wire::check_shard_map(map));
  PETPS_RETURN_IF_ERROR(check_against_pool(map, tables.pool()));
  const std::lock_guard lock(ownership_mutex);
  const Ownership& old = *ownership;
  if (map.version <= old.map.version) {
    return Status(Code::kFailedPrecondition,
                  "the shard map has version " + std::to_string(map.version) + ", in use is " +
                      std::to_string(old.map.version) + ": a changed map needs a higher version");
  }
  auto next = std::make_shared<Ownership>();
  next->map = map;
  next->shard = wire::shard_of(map, address);
  next->owns_all = next->shard.owns_all();
  next->replicas = wire::replicas_of(map, address);
  ownership = next;
  ownership_generation.fetch_add(1, std::memory_order_release);
  tables.count_partitions(next->shard.owned);
  return {};
}

bool Worker::has_current_map() const {
  return shared_.ownership_generation.load(std::memory_order_acquire) == ownership_generation_;
}

void Worker::take_map() {
  const std::lock_guard lock(shared_.ownership_mutex);
  ownership_ = shared_.ownership;
  ownership_generation_ = shared_.ownership_generation.load(std::memory_order_relaxed);
}

Status Worker::check_owned(std::span<const uint64_t> keys) const {
  if (ownership_->owns_all) return {};
  const wire::Shard& shard = ownership_->shard;
  for (const uint64_t key : keys) {
    const uint32_t partition = wire::partition_of(key, shard.partitions);
    if (shard.owns(partition)) continue;
    return Status(Code::kWrongShard,
                  "key " + std::to_string(key) + " is of partition " + std::to_string(partition) +
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
