// Which servers are asked for which keys.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "petps_client/endpoint.h"
#include "wire/wire.h"

namespace petps::client {

using Endpoints = std::vector<std::shared_ptr<Endpoint>>;

// Groups of servers that own the same keys: each is a replica of the others of its group. Immutable; calls under way keep the
// one they began with.
struct Routing {
  uint64_t version = 0;  // of the shard map; 0: none, one group has everything
  uint32_t partitions = 1;
  std::vector<Endpoints> groups;
  std::vector<uint32_t> group_of;  // by partition
  Endpoints all;                   // every server once

  size_t group(uint64_t key) const {
    return groups.size() == 1 ? 0 : group_of[wire::partition_of(key, partitions)];
  }
};

// Without a map: each of these has everything.
std::shared_ptr<const Routing> route_to_all(const Endpoints& endpoints);
// By a map; endpoints that are known already keep their connections and catalogues, others come from `make`.
// Errors: kUnavailable when `peer`, who gave the map, names something that is no address.
base::Result<std::shared_ptr<const Routing>> route_by_map(
    const wire::ShardMap& map, const std::string& peer, std::span<const Endpoints> known,
    const std::function<std::shared_ptr<Endpoint>(Address)>& make);

// The part of a list of keys that goes to one group, and where each stood.
struct Slice {
  std::vector<uint64_t> keys;
  std::vector<uint32_t> positions;
};
// By group, in one pass over the keys.
std::vector<Slice> split(const Routing& routing, std::span<const uint64_t> keys);

}  // namespace petps::client
