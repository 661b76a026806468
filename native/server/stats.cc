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

void add_counters(const transport::Counters& counters, StatsSnapshot& snapshot) {
  const auto add = [](uint64_t& sum, const std::atomic<uint64_t>& counter) {
    sum += counter.load(std::memory_order_relaxed);
  };
  const uint64_t opened = counters.opened.load(std::memory_order_relaxed);
  const uint64_t closed = counters.closed.load(std::memory_order_relaxed);
  snapshot.connections_opened += opened;
  snapshot.connections += opened - std::min(opened, closed);
  add(snapshot.connections_closed_for_cause, counters.closed_for_cause);
  add(snapshot.connections_closed_idle, counters.closed_idle);
  add(snapshot.connections_closed_for_room, counters.closed_for_room);
  add(snapshot.connections_kernel_tls, counters.opened_kernel_tls);
  add(snapshot.bytes_received, counters.bytes_received);
  add(snapshot.bytes_sent, counters.bytes_sent);
  add(snapshot.lists_copied, counters.lists_copied);
  add(snapshot.lists_gathered, counters.lists_gathered);
  add(snapshot.lists_zerocopy, counters.lists_zerocopy);
  add(snapshot.zerocopy_sends, counters.zerocopy_sends);
  add(snapshot.zerocopy_copied, counters.zerocopy_copied);
  add(snapshot.zerocopy_refused, counters.zerocopy_refused);
}

void add_transport(const transport::Transport& transport, StatsSnapshot& snapshot) {
  snapshot.connections_refused = transport.refused();
  const transport::Handshakes handshakes = transport.handshakes();
  snapshot.handshakes_finished = handshakes.finished;
  snapshot.handshakes_failed = handshakes.failed;
  snapshot.handshakes_refused = handshakes.refused;
}

}  // namespace petps::server
