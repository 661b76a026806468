// Which keys this server owns: the shard map, which may change while requests run.
#include "base/clock.h"
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
  next->shared = wire::shared_partitions(map, address);
  next->pauses = old.pauses;
  ownership = next;
  map_change_count.fetch_add(1, std::memory_order_release);
  tables.count_partitions(next->shard.owned);
  return {};
}

// The writer calls check_again() inside its round, and this function changes the ownership before
// it reads the writer's round. Both lock ownership_mutex. So if the writer checked a push before
// the change, its round is seen here, and waited for. Else the push is checked by the new pauses.
void Shared::set_pauses(const Pauses& pauses) {
  {
    const std::lock_guard lock(ownership_mutex);
    auto next = std::make_shared<Ownership>(*ownership);
    next->pauses = pauses;
    ownership = next;
    map_change_count.fetch_add(1, std::memory_order_release);
  }
  if (writer != nullptr) writer->wait_for_round();
}

Status Shared::check_owned(const Ownership& owned, std::span<const uint64_t> keys,
                           const wire::PartitionSet& paused) const {
  const bool has_paused = paused != wire::PartitionSet{};
  if (owned.owns_all && !has_paused) return {};
  for (const uint64_t key : keys) {
    const uint32_t partition = wire::partition_of(key, owned.shard.partitions);
    const bool is_owned = owned.owns_all || owned.shard.owns(partition);
    if (is_owned && !(has_paused && wire::has_partition(paused, partition))) continue;
    std::string text =
        "key " + std::to_string(key) + " is in partition " + std::to_string(partition) + ", which ";
    text +=
        is_owned ? "moves to or from " + address + " now: try again" : address + " does not own";
    text += " (map version " + std::to_string(owned.shard.map_version) +
            "): read the shard map again (gRPC: ReadShardMap)";
    return Status(Code::kWrongShard, std::move(text));
  }
  return {};
}

Status Shared::check_again(uint64_t change_count, std::span<const uint64_t> keys) const {
  std::shared_ptr<const Ownership> owned;
  {
    const std::lock_guard lock(ownership_mutex);
    if (map_change_count.load(std::memory_order_relaxed) == change_count) return {};
    owned = ownership;
  }
  return check_owned(*owned, keys, owned->pauses.pushes);
}

bool Worker::has_current_map() const {
  return shared_.map_change_count.load(std::memory_order_acquire) == map_change_count_;
}

void Worker::take_map() {
  const std::lock_guard lock(shared_.ownership_mutex);
  ownership_ = shared_.ownership;
  map_change_count_ = shared_.map_change_count.load(std::memory_order_relaxed);
}

Status Worker::check_pulled(std::span<const uint64_t> keys) const {
  const Pauses& pauses = ownership_->pauses;
  const bool is_over =
      pauses.pulls != wire::PartitionSet{} &&
      base::monotonic_ns() >= shared_.pulls_until_ns.load(std::memory_order_acquire);
  return shared_.check_owned(*ownership_, keys, is_over ? pauses.pulls : wire::PartitionSet{});
}

// Refuse a push if any of its keys has several owners.
Status Worker::check_one_owner(std::string_view table, std::span<const uint64_t> keys) const {
  if (ownership_->shared == wire::PartitionSet{}) return {};
  for (const uint64_t key : keys) {
    const uint32_t partition = wire::partition_of(key, ownership_->shard.partitions);
    if (!wire::has_partition(ownership_->shared, partition)) continue;
    return wire::refuse_replicated_push(table, wire::owners_of(ownership_->map, partition));
  }
  return {};
}

Status Worker::show_shard_map(const wire::FrameHeader& header, std::span<const std::byte> body) {
  PETPS_RETURN_IF_ERROR(wire::decode_shard_map(header, body));
  const wire::ShardMap& map = ownership_->map;
  const bool may_know = map.version == 0 || caller_->knows(map.model);
  wire::encode_shard_map_reply(header.request_id, may_know ? map : wire::ShardMap(), reply_);
  return {};
}

}  // namespace petps::server
