// Routing: which servers receive the requests for which keys.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "petps_client/remote_server.h"
#include "wire/wire.h"

namespace petps::client {

using RemoteServers = std::vector<std::shared_ptr<RemoteServer>>;

// Groups: the partitions that have the same owners. A server may be in several groups.
// ASSUMPTIONS: immutable. Calls in flight keep the routing that they began with.
struct Routing {
  // Grows with each routing of a client, also when only addresses changed; 0: none of a client.
  uint64_t generation = 0;
  uint64_t version = 0;  // of the shard map; 0: no map, one group owns all keys
  uint32_t partitions = 1;
  std::vector<uint32_t> group_of;             // by partition
  std::vector<std::vector<uint32_t>> owners;  // by group: numbers of servers in `all`
  std::vector<RemoteServers> groups;          // by group: the same servers
  RemoteServers all;                          // every server once
  std::vector<bool> is_near;                  // by server: in the client's zone

  // Add a server, and return its number. A map may name one twice ("h1:7070" and "h1:07070").
  uint32_t add_server(std::shared_ptr<RemoteServer> server, bool is_in_zone = true);
  // Add a group with these owners, and return its number.
  uint32_t add_group(std::vector<uint32_t> servers);

  size_t group(uint64_t key) const {
    return groups.size() == 1 ? 0 : group_of[wire::partition_of(key, partitions)];
  }
};

// Return the routing without a map: every server has all keys.
std::shared_ptr<Routing> route_to_all(const RemoteServers& servers);
// Return the routing of a map for a client in `zone` (empty: in none). `servers_at` returns the
// servers of an address of the map.
// Errors: kUnavailable when the map of server `peer` contains an invalid address.
base::Result<std::shared_ptr<Routing>> route_by_map(
    const wire::ShardMap& map, std::string_view zone, const std::string& peer,
    const std::function<RemoteServers(const Address&)>& servers_at);

// The keys of a list that go to one server, and their positions in the list.
struct Slice {
  std::vector<uint64_t> keys;
  std::vector<uint32_t> positions;
};

}  // namespace petps::client
