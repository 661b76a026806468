#include "server/stats.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace petps::server {

size_t HistogramSnapshot::bucket_of(uint64_t ns) {
  if (ns < kSubBuckets) return ns;
  const auto exponent = static_cast<size_t>(std::bit_width(ns) - 1);  // at least 3
  const size_t sub = (ns >> (exponent - 3)) & (kSubBuckets - 1);
  return std::min(kSubBuckets + (exponent - 3) * kSubBuckets + sub, kBuckets - 1);
}

uint64_t HistogramSnapshot::upper_ns(size_t bucket) {
  if (bucket < kSubBuckets) return bucket;
  const size_t shift = (bucket - kSubBuckets) / kSubBuckets;
  const size_t sub = bucket % kSubBuckets;
  return ((kSubBuckets + sub + 1) << shift) - 1;
}

uint64_t HistogramSnapshot::quantile_ns(double q) const {
  if (count == 0) return 0;
  const auto rank =
      static_cast<uint64_t>(std::ceil(std::clamp(q, 0.0, 1.0) * static_cast<double>(count)));
  uint64_t seen = 0;
  for (size_t i = 0; i < kBuckets; ++i) {
    seen += counts[i];
    if (seen >= std::max<uint64_t>(rank, 1)) return upper_ns(i);
  }
  return upper_ns(kBuckets - 1);
}

void HistogramSnapshot::merge(const HistogramSnapshot& other) {
  for (size_t i = 0; i < kBuckets; ++i) counts[i] += other.counts[i];
  count += other.count;
  sum_ns += other.sum_ns;
}

void Histogram::add_to(HistogramSnapshot& snapshot) const {
  for (size_t i = 0; i < counts_.size(); ++i) {
    const uint64_t n = counts_[i].read();
    snapshot.counts[i] += n;
    // The sum of the buckets, so that quantiles agree with it while the worker keeps counting.
    snapshot.count += n;
  }
  snapshot.sum_ns += sum_ns_.read();
}

void TableStats::add_to(TableSnapshot& snapshot) const {
  snapshot.pulls += pulls.read();
  snapshot.rows_found += rows_found.read();  // before the keys, so that it is never above them
  snapshot.keys += keys.read();
  latency.add_to(snapshot.latency);
}

TableStats& StatsByTable::of(uint32_t table) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<TableStats>& stats = by_id_[table];
  if (stats == nullptr) stats = std::make_unique<TableStats>();
  return *stats;
}

void StatsByTable::forget_dropped(const table::Tables& tables) {
  const std::lock_guard lock(mutex_);
  std::erase_if(by_id_, [&](const auto& entry) { return tables.find(entry.first) == nullptr; });
}

void StatsByTable::add_to(std::map<uint32_t, TableSnapshot>& snapshots) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, stats] : by_id_) stats->add_to(snapshots[id]);
}

void WorkerStats::add_to(StatsSnapshot& snapshot) const {
  snapshot.pulls += pulls.read();
  snapshot.rows_found += rows_found.read();
  snapshot.keys += keys.read();
  snapshot.misses = snapshot.keys - std::min(snapshot.keys, snapshot.rows_found);
  snapshot.pushes += pushes.read();
  snapshot.rows_pushed += rows_pushed.read();
  snapshot.rows_refused += rows_refused.read();
  snapshot.hot_sets += hot_sets.read();
  for (size_t code = 0; code < errors.size(); ++code) {
    const uint64_t n = errors[code].read();
    snapshot.errors_by_code[code] += n;
    snapshot.errors += n;
  }
  snapshot.waits_for_pin += waits_for_pin.read();
  snapshot.waits_for_version += waits_for_version.read();
  for (size_t i = 0; i < latency.size(); ++i) latency[i].add_to(snapshot.latency[i]);
}

}  // namespace petps::server
