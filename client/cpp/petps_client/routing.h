// Routing: which servers receive the requests for which keys.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "petps_client/remote_server.h"
#include "wire/wire.h"

namespace petps::client {

using RemoteServers = std::vector<std::shared_ptr<RemoteServer>>;

// Groups of servers. The servers of a group own the same keys, so they are replicas.
// ASSUMPTIONS: immutable. Calls in flight keep the routing that they began with.
struct Routing {
  // Grows with each routing of a client, also when only addresses changed; 0: none of a client.
  uint64_t generation = 0;
  uint64_t version = 0;  // of the shard map; 0: no map, one group owns all keys
  uint32_t partitions = 1;
  std::vector<RemoteServers> groups;
  std::vector<uint32_t> group_of;  // by partition
  RemoteServers all;               // every server once

  size_t group(uint64_t key) const {
    return groups.size() == 1 ? 0 : group_of[wire::partition_of(key, partitions)];
  }
};

// Return the routing without a map: every server has all keys.
std::shared_ptr<Routing> route_to_all(const RemoteServers& servers);
// Return the routing of a map. `servers_at` returns the servers of an address of the map.
// Errors: kUnavailable when the map of server `peer` contains an invalid address.
base::Result<std::shared_ptr<Routing>> route_by_map(
    const wire::ShardMap& map, const std::string& peer,
    const std::function<RemoteServers(const Address&)>& servers_at);

// The keys of a list that go to one group, and their positions in the list.
struct Slice {
  std::vector<uint64_t> keys;
  std::vector<uint32_t> positions;
};
// Split the keys by group, in one pass over them.
std::vector<Slice> split(const Routing& routing, std::span<const uint64_t> keys);

}  // namespace petps::client
