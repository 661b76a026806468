// Counters of one worker: written by that worker only, read by any thread. Internal to server and
// router.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "server/server.h"
#include "table/table.h"

namespace petps::server {

// Only one thread writes, so a load and a store suffice: no locked instruction on the data path.
class Counter {
 public:
  void add(uint64_t n) {
    value_.store(value_.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
  uint64_t read() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

class Histogram {
 public:
  void add(uint64_t ns) {
    counts_[HistogramSnapshot::bucket_of(ns)].add(1);
    sum_ns_.add(ns);
  }
  void add_to(HistogramSnapshot& snapshot) const;

 private:
  std::array<Counter, HistogramSnapshot::kBuckets> counts_;
  Counter sum_ns_;
};

// Pulls of one table. On its own cache lines, as WorkerStats.
struct alignas(64) TableStats {
  Counter pulls;
  Counter keys;
  Counter rows_found;
  Histogram latency;
  void add_to(TableSnapshot& snapshot) const;
};

// The TableStats of one worker. Only the worker changes them; any thread may add them up.
class StatsByTable {
 public:
  // Return those of a table, from zero at its first pull. They stay where they are until forgotten.
  TableStats& of(uint32_t table);
  void forget_dropped(const table::Tables& tables);
  void add_to(std::map<uint32_t, TableSnapshot>& snapshots) const;

 private:
  mutable std::mutex mutex_;  // guards the map; a pull takes it only at a worker's first of a table
  std::map<uint32_t, std::unique_ptr<TableStats>> by_id_;
};

// On its own cache lines, so that another worker's counting does not slow this worker down.
struct alignas(64) WorkerStats {
  Counter pulls;
  Counter keys;
  Counter rows_found;
  Counter pushes;
  Counter rows_pushed;
  Counter rows_refused;
  Counter hot_sets;
  std::array<Counter, kCodesEnd> errors;  // by code
  Counter waits_for_pin;
  Counter waits_for_version;
  std::array<Histogram, wire::kOpcodesEnd> latency;
  void add_to(StatsSnapshot& snapshot) const;
};

// Add the counters of one endpoint, and those of a transport beside its endpoints.
void add_counters(const transport::Counters& counters, StatsSnapshot& snapshot);
void add_transport(const transport::Transport& transport, StatsSnapshot& snapshot);

}  // namespace petps::server
