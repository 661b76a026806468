// Checks of the records of tables, instances and aliases, new ones and those of a superblock.
#include <set>
#include <unordered_set>

#include "pool/catalogue.h"

namespace petps::pool {

using base::Code;
using base::Status;

Status check_name(const std::string& kind, const std::string& name, bool at_sign) {
  if (name.empty() || name.size() > kMaxNameBytes) {
    return Status(Code::kInvalidArgument, kind + " name '" + name.substr(0, 80) +
                                              "' must have 1 to " + std::to_string(kMaxNameBytes) +
                                              " characters");
  }
  for (const char c : name) {
    const bool is_allowed = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                            (c >= '0' && c <= '9') || c == '_' || c == '-' || c == '.' ||
                            (at_sign && c == '@');
    if (!is_allowed) {
      return Status(Code::kInvalidArgument,
                    kind + " name '" + name + "' may hold only letters, digits, '_', '-' and '.'");
    }
  }
  return Status();
}

Status check_shape(const TableSpec& spec) {
  const std::string prefix = "table '" + spec.name + "': ";
  PETPS_RETURN_IF_ERROR(check_name("table", spec.name, /*at_sign=*/false));
  if (spec.dim == 0 || spec.dim > kMaxDim) {
    return Status(Code::kInvalidArgument, prefix + "dim " + std::to_string(spec.dim) +
                                              " is outside 1.." + std::to_string(kMaxDim));
  }
  if (spec.row_bytes == 0 || spec.row_bytes > kMaxDim * 8 + 64) {
    return Status(Code::kInvalidArgument,
                  prefix + "a row of " + std::to_string(spec.row_bytes) + " bytes is impossible");
  }
  if (spec.capacity == 0 || spec.capacity > kMaxCapacity) {
    return Status(Code::kInvalidArgument, prefix + "capacity must be 1 to 2^40 rows, it is " +
                                              std::to_string(spec.capacity));
  }
  return Status();
}

Status Pool::Catalogue::check(const layout::Map& map) const {
  const auto wrong = [](const std::string& what) { return Status(Code::kDataLoss, what); };
  if (tables.size() > map.max_tables || instances.size() > kMaxInstances ||
      aliases.size() > kMaxAliases)
    return wrong("it has more tables, instances or aliases than a pool can have");
  std::unordered_set<uint64_t> ids;
  std::set<std::pair<uint64_t, std::string>> names;
  for (const InstanceRecord& instance : instances) {
    PETPS_RETURN_IF_ERROR(check_name("model", instance.model, /*at_sign=*/false));
    PETPS_RETURN_IF_ERROR(check_name("instance", instance.name, /*at_sign=*/true));
    if (instance.id == 0 || instance.id >= next_instance || !ids.insert(instance.id).second ||
        !names.emplace(0, instance.name).second)
      return wrong("instance '" + instance.name + "' has another one's id or name");
    if (instance.partitions == 0 || instance.partitions > kMaxPartitions)
      return wrong("instance '" + instance.name + "' has " + std::to_string(instance.partitions) +
                   " partitions");
  }
  for (const AliasRecord& alias : aliases) {
    PETPS_RETURN_IF_ERROR(check_name("alias", alias.name, /*at_sign=*/false));
    if (!ids.contains(alias.instance))
      return wrong("alias '" + alias.name + "' refers to no instance");
  }
  std::unordered_set<uint32_t> table_ids;
  for (const TableRecord& table : tables) {
    PETPS_RETURN_IF_ERROR(check_shape(table.spec));
    if (!ids.contains(table.spec.instance))
      return wrong("table '" + table.spec.name + "' belongs to no instance");
    if (table.id == 0 || table.id >= next_table || !table_ids.insert(table.id).second ||
        !names.emplace(table.spec.instance, table.spec.name).second)
      return wrong("table '" + table.spec.name + "' has another one's id or name");
    if (table.bucket_count == 0 || table.spec.feed > Feed::kDelta ||
        table.spec.expire_after > kMaxExpireAfter)
      return wrong("table '" + table.spec.name + "' has impossible numbers");
  }
  return Status();
}

}  // namespace petps::pool
