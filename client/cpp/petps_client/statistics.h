// What a client knows of its pulls, by table.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <vector>

#include "petps_client/dedup.h"
#include "petps_client/hot_keys.h"

namespace petps::client {

// The statistics of a table, over all servers.
struct TableStatistics {
  explicit TableStatistics(size_t hot_keys) : hot(hot_keys) {}
  DedupEstimate dedup;
  HotKeys hot;
  std::atomic<bool> is_used{false};  // by a call, since the last forget_unused()
};

// Threads: all methods from any.
class Statistics {
 public:
  explicit Statistics(size_t hot_keys) : hot_keys_(hot_keys) {}  // of the longest hot set
  // Return the statistics of a table. ASSUMPTION: the table exists, so that names that a caller
  // makes up take no memory.
  std::shared_ptr<TableStatistics> of(std::string_view table);
  // Return the hot keys of each table that has some, and clear their counts.
  std::map<std::string, std::vector<uint64_t>> take_hot_sets();
  // Forget the tables that no call has used since the last time: they may have been dropped.
  void forget_unused();
  size_t tables() const;

 private:
  const size_t hot_keys_;
  mutable std::shared_mutex mutex_;
  std::map<std::string, std::shared_ptr<TableStatistics>, std::less<>> tables_;
};

}  // namespace petps::client
