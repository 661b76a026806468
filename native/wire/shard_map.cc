// Key -> partition -> shard, and the shard map.
#include <algorithm>

#include "base/hash.h"
#include "wire/bytes.h"
#include "wire/wire.h"

namespace petps::wire {

using base::Code;
using base::Status;

namespace {

struct ShardMapHead {
  uint64_t version;
  uint32_t partitions;
  uint32_t servers;
};
static_assert(sizeof(ShardMapHead) == 16, "copied whole: see FORMAT.md, shard_map");

// An error that names more addresses than this is unreadable.
constexpr size_t kServersNamed = 8;

Status wrong_map(std::string fault) {
  return Status(Code::kInvalidArgument, "shard map: " + std::move(fault));
}

bool has_zones(const ShardMap& map) {
  return std::any_of(map.servers.begin(), map.servers.end(),
                     [](const ShardServer& server) { return !server.zone.empty(); });
}

bool is_name(std::string_view name) { return !name.empty() && name.size() <= kMaxNameBytes; }

Status check_server(const ShardMap& map, const ShardServer& server) {
  if (!is_name(server.address))
    return wrong_map("the address of a server must have 1 to 255 bytes, got " +
                     std::to_string(server.address.size()));
  if (server.zone.size() > kMaxNameBytes)
    return wrong_map("the zone of " + server.address + " must have at most 255 bytes, got " +
                     std::to_string(server.zone.size()));
  bool owns_any = false;
  for (uint32_t p = 0; p < kMaxPartitions; ++p) {
    if (!has_partition(server.partitions, p)) continue;
    owns_any = true;
    if (p >= map.partitions) {
      return wrong_map(server.address + " owns partition " + std::to_string(p) +
                       ", but the partitions are 0 to " + std::to_string(map.partitions - 1));
    }
  }
  if (owns_any) return {};
  return wrong_map(server.address + " owns no partition: remove it from the map");
}

Status check_owners(const ShardMap& map) {
  PartitionSet owned{};
  for (const ShardServer& server : map.servers) {
    for (size_t word = 0; word < owned.size(); ++word) owned[word] |= server.partitions[word];
  }
  for (uint32_t p = 0; p < map.partitions; ++p) {
    if (!has_partition(owned, p))
      return wrong_map("partition " + std::to_string(p) + " is owned by no server");
  }
  return {};
}

}  // namespace

uint32_t partition_of(uint64_t key, uint32_t partitions) {
  return partitions <= 1 ? 0 : static_cast<uint32_t>(base::partition_hash(key) % partitions);
}

std::string partitions_text(const PartitionSet& set) {
  std::string text;
  for (uint32_t p = 0; p < kMaxPartitions; ++p) {
    if (!has_partition(set, p)) continue;
    uint32_t last = p;
    while (last + 1 < kMaxPartitions && has_partition(set, last + 1)) ++last;
    text.append(text.empty() ? "" : ", ").append(std::to_string(p));
    if (last > p) text.append("-").append(std::to_string(last));
    p = last;
  }
  return text.empty() ? "none" : text;
}

bool Shard::owns_all() const {
  for (uint32_t p = 0; p < partitions; ++p) {
    if (!owns(p)) return false;
  }
  return true;
}

Status check_shard_map(const ShardMap& map) {
  if (map.partitions == 0 || map.partitions > kMaxPartitions) {
    return wrong_map("partitions is " + std::to_string(map.partitions) + ", expected 1 to " +
                     std::to_string(kMaxPartitions));
  }
  if (map.version == 0) {
    if (map.servers.empty()) return {};
    return wrong_map("version 0 means no map: begin with 1 and raise it with every change");
  }
  if (!is_name(map.model))
    return wrong_map("the model's name must have 1 to 255 bytes, got " +
                     std::to_string(map.model.size()));
  if (map.servers.size() > kMaxShardServers) {
    return wrong_map(std::to_string(map.servers.size()) + " servers are too many: at most " +
                     std::to_string(kMaxShardServers));
  }
  std::vector<std::string_view> addresses;
  for (const ShardServer& server : map.servers) {
    PETPS_RETURN_IF_ERROR(check_server(map, server));
    addresses.push_back(server.address);
  }
  std::sort(addresses.begin(), addresses.end());
  const auto repeated = std::adjacent_find(addresses.begin(), addresses.end());
  if (repeated != addresses.end()) return wrong_map(std::string(*repeated) + " appears twice");
  return check_owners(map);
}

Shard shard_of(const ShardMap& map, std::string_view address) {
  Shard shard;
  shard.partitions = map.partitions;
  shard.map_version = map.version;
  if (map.version == 0) {
    for (uint32_t p = 0; p < map.partitions; ++p) shard.owned[p / 64] |= uint64_t{1} << (p % 64);
    return shard;
  }
  shard.shards = static_cast<uint32_t>(map.servers.size());
  shard.owned = {};
  for (uint32_t i = 0; i < shard.shards; ++i) {
    if (map.servers[i].address != address) continue;
    shard.shard = i;
    shard.owned = map.servers[i].partitions;
  }
  return shard;
}

std::vector<std::string> owners_of(const ShardMap& map, uint32_t partition) {
  std::vector<std::string> owners;
  for (const ShardServer& server : map.servers) {
    if (has_partition(server.partitions, partition)) owners.push_back(server.address);
  }
  return owners;
}

PartitionSet shared_partitions(const ShardMap& map, std::string_view address) {
  PartitionSet own{};
  PartitionSet others{};
  for (const ShardServer& server : map.servers) {
    PartitionSet& set = server.address == address ? own : others;
    for (size_t word = 0; word < set.size(); ++word) set[word] |= server.partitions[word];
  }
  for (size_t word = 0; word < own.size(); ++word) own[word] &= others[word];
  return own;
}

Status refuse_replicated_push(std::string_view table, std::span<const std::string> servers) {
  std::string names;
  for (size_t i = 0; i < std::min(servers.size(), kServersNamed); ++i)
    names.append(names.empty() ? "" : ", ").append(servers[i]);
  if (servers.size() > kServersNamed)
    names += " and " + std::to_string(servers.size() - kServersNamed) + " more";
  return Status(
      Code::kFailedPrecondition,
      "push to '" + std::string(table) + "': servers " + names +
          " are replicas, and pushes have no order across servers: two clients could "
          "leave replicas different forever. No row of this push was written. Publish deltas "
          "through a log (petps publish) to a table of feed 'delta', or push to partitions "
          "that have one server");
}

// ---- Frames

void encode_shard_map(uint64_t request_id, Frame& frame) {
  start_frame(Opcode::kShardMap, request_id, frame);
}

Status decode_shard_map(const FrameHeader& header, std::span<const std::byte> body) {
  PETPS_RETURN_IF_ERROR(expect_request(header, Opcode::kShardMap, body));
  return expect_end(Cursor(body), "shard map", "header");
}

void encode_shard_map_reply(uint64_t request_id, const ShardMap& map, Frame& frame) {
  start_reply(Opcode::kShardMap, request_id, frame);
  append(ShardMapHead{map.version, map.partitions, static_cast<uint32_t>(map.servers.size())},
         frame);
  append_name(map.model, frame);
  for (const ShardServer& server : map.servers) {
    append_name(server.address, frame);
    append_bytes(server.partitions.data(), bitmap_words(map.partitions) * sizeof(uint64_t), frame);
  }
  // The release before refuses a reply that goes on here, so a map without zones ends here.
  if (has_zones(map)) {
    for (const ShardServer& server : map.servers) append_name(server.zone, frame);
  }
  finish_frame(frame);
}

Status decode_shard_map_reply(const FrameHeader& header, std::span<const std::byte> body,
                              ShardMap& map) {
  PETPS_RETURN_IF_ERROR(expect_reply(header, Opcode::kShardMap, body));
  Cursor cursor(body);
  ShardMapHead head{};
  std::string_view name;
  if (!cursor.take(head) || !cursor.take_name(name))
    return truncated("shard map reply", "head", body.size());
  if (head.partitions > kMaxPartitions || head.servers > kMaxShardServers) {
    return bad_frame("shard map reply: " + std::to_string(head.partitions) + " partitions on " +
                     std::to_string(head.servers) + " servers are above the limits");
  }
  map = {std::string(name), head.version, head.partitions, {}};
  for (uint32_t i = 0; i < head.servers; ++i) {
    ShardServer server;
    std::span<const std::byte> words;
    if (!cursor.take_name(name) ||
        !cursor.take_bytes(bitmap_words(map.partitions) * sizeof(uint64_t), words)) {
      return truncated("shard map reply", "servers", body.size());
    }
    server.address = name;
    if (!words.empty()) std::memcpy(server.partitions.data(), words.data(), words.size());
    map.servers.push_back(std::move(server));
  }
  if (cursor.left() > 0) {
    for (ShardServer& server : map.servers) {
      if (!cursor.take_name(name)) return truncated("shard map reply", "zones", body.size());
      server.zone = name;
    }
    if (!has_zones(map)) return bad_frame("shard map reply: it has zones, but all are empty");
  }
  PETPS_RETURN_IF_ERROR(expect_end(cursor, "shard map reply", "servers and zones"));
  return check_shard_map(map);
}

}  // namespace petps::wire
