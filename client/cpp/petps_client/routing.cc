#include "petps_client/routing.h"

#include <algorithm>
#include <map>
#include <utility>

namespace petps::client {

using base::Code;
using base::Result;
using base::Status;

uint32_t Routing::add_server(std::shared_ptr<RemoteServer> server, bool is_in_zone) {
  const auto known = std::find(all.begin(), all.end(), server);
  if (known != all.end()) {
    const auto number = static_cast<uint32_t>(known - all.begin());
    is_near[number] = is_near[number] || is_in_zone;
    return number;
  }
  all.push_back(std::move(server));
  is_near.push_back(is_in_zone);
  return static_cast<uint32_t>(all.size() - 1);
}

uint32_t Routing::add_group(std::vector<uint32_t> servers) {
  groups.emplace_back();
  for (const uint32_t server : servers) groups.back().push_back(all[server]);
  owners.push_back(std::move(servers));
  return static_cast<uint32_t>(groups.size() - 1);
}

std::shared_ptr<Routing> route_to_all(const RemoteServers& servers) {
  auto routing = std::make_shared<Routing>();
  std::vector<uint32_t> owners;
  for (const auto& server : servers) owners.push_back(routing->add_server(server));
  routing->group_of = {routing->add_group(std::move(owners))};
  return routing;
}

Result<std::shared_ptr<Routing>> route_by_map(
    const wire::ShardMap& map, std::string_view zone, const std::string& peer,
    const std::function<RemoteServers(const Address&)>& servers_at) {
  auto routing = std::make_shared<Routing>();
  routing->version = map.version;
  routing->partitions = map.partitions;
  std::vector<std::vector<uint32_t>> owners(map.partitions);
  for (const wire::ShardServer& entry : map.servers) {
    auto address = parse_address(entry.address, entry.address);
    if (!address.ok()) {
      return Status(Code::kUnavailable, peer + ": its shard map has a wrong server address: " +
                                            std::string(address.status().message()));
    }
    const bool is_in_zone = zone.empty() || entry.zone == zone;
    for (const auto& server : servers_at(address.value())) {
      const uint32_t number = routing->add_server(server, is_in_zone);
      for (uint32_t p = 0; p < map.partitions; ++p) {
        if (!wire::has_partition(entry.partitions, p)) continue;
        std::vector<uint32_t>& known = owners[p];
        if (std::find(known.begin(), known.end(), number) == known.end()) known.push_back(number);
      }
    }
  }
  std::map<std::vector<uint32_t>, uint32_t> group_of;
  for (std::vector<uint32_t>& of_partition : owners) {
    const auto known = group_of.find(of_partition);
    if (known != group_of.end()) {
      routing->group_of.push_back(known->second);
      continue;
    }
    const uint32_t group = routing->add_group(of_partition);
    group_of.emplace(std::move(of_partition), group);
    routing->group_of.push_back(group);
  }
  return routing;
}

}  // namespace petps::client
