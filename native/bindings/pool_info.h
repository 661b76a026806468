// The description of an open pool that Python receives.
#pragma once

#include <cstdint>
#include <string>

#include "table/table.h"

namespace petps::bindings {

struct PoolInfo {
  std::string path;
  std::string medium;
  std::string durability;
  bool is_volatile = false;
  bool read_only = false;
  bool failed = false;
  std::string uuid;
  uint32_t generation = 0;
  bool was_clean = false;
  bool lost_power = false;
  uint64_t size_bytes = 0;
  uint64_t allocated_bytes = 0;
  uint64_t free_bytes = 0;
  uint64_t unit_bytes = 0;
  std::string readers_refused;
  uint64_t epoch_current = 0;
  uint64_t epoch_retired_items = 0;
};

PoolInfo pool_info(table::Tables& tables);

const char* feed_name(pool::Feed feed);
pool::Feed parse_feed(const std::string& name);
media::Durability parse_durability(const std::string& name);

}  // namespace petps::bindings
