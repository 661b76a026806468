#include "petps_client/routing.h"

#include <algorithm>

namespace petps::client {

using base::Code;
using base::Result;
using base::Status;

std::shared_ptr<Routing> route_to_all(const RemoteServers& servers) {
  auto routing = std::make_shared<Routing>();
  routing->groups = {servers};
  routing->group_of = {0};
  routing->all = servers;
  return routing;
}

Result<std::shared_ptr<Routing>> route_by_map(
    const wire::ShardMap& map, const std::string& peer,
    const std::function<RemoteServers(const Address&)>& servers_at) {
  auto routing = std::make_shared<Routing>();
  routing->version = map.version;
  routing->partitions = map.partitions;
  routing->group_of.resize(map.partitions);
  std::vector<wire::PartitionSet> sets;  // by group
  for (const wire::ShardServer& entry : map.servers) {
    auto address = parse_address(entry.address, entry.address);
    if (!address.ok()) {
      return Status(Code::kUnavailable, peer + ": its shard map has a wrong server address: " +
                                            std::string(address.status().message()));
    }
    const RemoteServers servers = servers_at(address.value());
    routing->all.insert(routing->all.end(), servers.begin(), servers.end());
    // The decoder has checked the map: servers that share one partition share all of them.
    const auto at = std::find(sets.begin(), sets.end(), entry.partitions);
    const auto group = static_cast<size_t>(at - sets.begin());
    if (at == sets.end()) {
      sets.push_back(entry.partitions);
      routing->groups.emplace_back();
      for (uint32_t p = 0; p < map.partitions; ++p) {
        if (wire::has_partition(entry.partitions, p))
          routing->group_of[p] = static_cast<uint32_t>(group);
      }
    }
    RemoteServers& replicas = routing->groups[group];
    replicas.insert(replicas.end(), servers.begin(), servers.end());
  }
  return routing;
}

std::vector<Slice> split(const Routing& routing, std::span<const uint64_t> keys) {
  std::vector<Slice> slices(routing.groups.size());
  for (Slice& slice : slices) {
    const size_t likely_size = keys.size() / slices.size() + keys.size() / 8 + 1;
    slice.keys.reserve(likely_size);
    slice.positions.reserve(likely_size);
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    Slice& slice = slices[routing.group(keys[i])];
    slice.keys.push_back(keys[i]);
    slice.positions.push_back(static_cast<uint32_t>(i));
  }
  return slices;
}

}  // namespace petps::client
