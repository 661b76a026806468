// The superblock's contents in DRAM. Internal to room pool.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pool/layout.h"
#include "pool/pool.h"
#include "pool/slots.h"

namespace petps::pool {

struct ExtentPlace {
  uint32_t table;  // 0: free
  uint32_t kind;
  uint64_t offset;
  uint64_t bytes;
  bool shrinks = false;  // free, but its blocks are being given back
  bool is_hole = false;  // free, and it may lack blocks (false is also what an open assumes)
};

struct ProgressPlace {
  uint64_t turn;  // of the newest valid record
  Progress value;
  uint32_t pair;  // number of the 128-byte pair
};

// The event times of a table whose rows expire, or did.
struct Clocks {
  struct Place {
    uint64_t turn = 0;  // of the newest whole record
    EventClock value;
  };
  uint32_t expire_after = 0;  // of the table; 0: nothing is counted now
  Feed feed = Feed::kDelta;
  uint64_t offset = 0;  // of the first pair of records
  uint64_t bytes = 0;
  std::vector<Place> partitions;
};

struct Pool::Catalogue {
  uint64_t sequence = 0;
  int newest = 1;  // the number of the copy written last
  bool clean = false;
  media::Durability durability = media::Durability::kPower;
  std::array<uint8_t, 16> boot_id{};
  uint32_t next_table = 1;
  uint32_t next_instance = 1;
  std::vector<TableRecord> tables;
  std::vector<InstanceRecord> instances;
  std::vector<AliasRecord> aliases;
  std::vector<ExtentPlace> extents;  // by record number; see Pool::state_mutex_
  std::unordered_map<uint32_t, std::unique_ptr<Slots>> slots;
  std::map<std::pair<uint32_t, uint32_t>, ProgressPlace> progress;
  std::vector<ProgressPlace> free_progress;  // pairs of dropped instances, and torn pairs
  uint32_t progress_pairs = 0;
  std::unordered_map<uint32_t, Clocks> clocks;  // by table; see Pool::state_mutex_

  InstanceRecord* instance(uint32_t id);  // null if unknown
  TableRecord* table(uint32_t id);        // likewise
  AliasRecord* alias(const std::string& name);
  const InstanceRecord* newest_of(const std::string& model);

  std::vector<std::byte> serialise(const Pool& pool) const;
  base::Status parse(const std::byte* copy, const layout::Superblock& header, int number,
                     const std::string& path);
  // Check what create_table() and create_instance() promise of every record, because a checksum
  // does not tell who wrote it.
  base::Status check(const layout::Map& map) const;
};

// Check a name. at_sign: it may hold '@'.
base::Status check_name(const std::string& kind, const std::string& name, bool at_sign);
// Check the spec of a table without what it shares with others, and without its default row.
base::Status check_shape(const TableSpec& spec);

}  // namespace petps::pool
