// petps._native.ShardMap: the servers and the partitions that each owns.
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <map>

#include "bindings/bindings.h"
#include "wire/wire.h"

namespace petps::bindings {

namespace {

using Owner = std::pair<std::string, std::vector<uint32_t>>;  // address, partitions

wire::ShardMap create(std::string model, uint64_t version, uint32_t partitions,
                      const std::vector<Owner>& servers,
                      const std::map<std::string, std::string>& zones) {
  wire::ShardMap map{std::move(model), version, partitions, {}};
  for (const auto& [address, owned] : servers) {
    wire::ShardServer server{address, {}};
    if (const auto zone = zones.find(address); zone != zones.end()) server.zone = zone->second;
    for (const uint32_t partition : owned) {
      if (partition >= wire::kMaxPartitions) {
        invalid("shard map: " + address + " owns partition " + std::to_string(partition) +
                ", a model has at most " + std::to_string(wire::kMaxPartitions));
      }
      const uint64_t bit = uint64_t{1} << (partition % 64);
      if ((server.partitions[partition / 64] & bit) != 0) {
        invalid("shard map: " + address + " names partition " + std::to_string(partition) +
                " twice");
      }
      server.partitions[partition / 64] |= bit;
    }
    map.servers.push_back(std::move(server));
  }
  check(wire::check_shard_map(map));
  return map;
}

std::vector<uint32_t> partitions_of(const wire::PartitionSet& set, uint32_t partitions) {
  std::vector<uint32_t> owned;
  for (uint32_t p = 0; p < partitions; ++p) {
    if (wire::has_partition(set, p)) owned.push_back(p);
  }
  return owned;
}

std::vector<Owner> servers_of(const wire::ShardMap& map) {
  std::vector<Owner> servers;
  for (const wire::ShardServer& server : map.servers)
    servers.emplace_back(server.address, partitions_of(server.partitions, map.partitions));
  return servers;
}

std::map<std::string, std::string> zones_of(const wire::ShardMap& map) {
  std::map<std::string, std::string> zones;
  for (const wire::ShardServer& server : map.servers) {
    if (!server.zone.empty()) zones.emplace(server.address, server.zone);
  }
  return zones;
}

std::vector<uint32_t> owned_by(const wire::ShardMap& map, const std::string& address) {
  const wire::Shard shard = wire::shard_of(map, address);
  return partitions_of(shard.owned, shard.partitions);
}

}  // namespace

void bind_shard_map(py::module_& module) {
  module.attr("MAX_PARTITIONS") = wire::kMaxPartitions;
  module.attr("MAX_SHARD_SERVERS") = wire::kMaxShardServers;
  py::class_<wire::ShardMap>(module, "ShardMap",
                             "The servers and the partitions that each owns; always valid.")
      .def(py::init(&create), py::kw_only(), py::arg("model"), py::arg("version"),
           py::arg("partitions"), py::arg("servers"),
           py::arg("zones") = std::map<std::string, std::string>())
      .def_readonly("model", &wire::ShardMap::model)
      .def_readonly("version", &wire::ShardMap::version)
      .def_readonly("partitions", &wire::ShardMap::partitions)
      .def_property_readonly("servers", servers_of)
      .def_property_readonly("zones", zones_of)
      .def("owned_by", owned_by, py::arg("address"))
      .def(py::self == py::self);
}

}  // namespace petps::bindings
