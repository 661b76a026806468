#include "petps_client/statistics.h"

#include <mutex>

namespace petps::client {

std::shared_ptr<TableStatistics> Statistics::of(std::string_view table) {
  {
    const std::shared_lock lock(mutex_);
    if (const auto at = tables_.find(table); at != tables_.end()) {
      // Threads share the line of the flag: do not write it for each pull.
      if (!at->second->is_used.load(std::memory_order_relaxed))
        at->second->is_used.store(true, std::memory_order_relaxed);
      return at->second;
    }
  }
  const std::unique_lock lock(mutex_);
  std::shared_ptr<TableStatistics>& of_table = tables_[std::string(table)];
  if (of_table == nullptr) of_table = std::make_shared<TableStatistics>(hot_keys_);
  of_table->is_used.store(true, std::memory_order_relaxed);
  return of_table;
}

std::map<std::string, std::vector<uint64_t>> Statistics::take_hot_sets() {
  std::map<std::string, std::vector<uint64_t>> sets;
  const std::shared_lock lock(mutex_);
  for (const auto& [table, of_table] : tables_) {
    std::vector<uint64_t> keys = of_table->hot.take();
    if (!keys.empty()) sets.emplace(table, std::move(keys));
  }
  return sets;
}

void Statistics::forget_unused() {
  const std::unique_lock lock(mutex_);
  std::erase_if(tables_, [](const auto& entry) {
    return !entry.second->is_used.exchange(false, std::memory_order_relaxed);
  });
}

size_t Statistics::tables() const {
  const std::shared_lock lock(mutex_);
  return tables_.size();
}

}  // namespace petps::client
