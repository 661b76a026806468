// The status text that `petps status` shows, and the counters of all workers.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "base/clock.h"
#include "base/peer.h"
#include "server/json.h"
#include "server/shared.h"

namespace petps::server {

namespace {

const TableSnapshot kNotPulled;

std::string uuid_text(const std::array<uint8_t, 16>& uuid) {
  std::string text;
  for (size_t i = 0; i < uuid.size(); ++i) {
    char digits[4];
    std::snprintf(digits, sizeof(digits), "%02x", uuid[i]);
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += digits;
  }
  return text;
}

void write_gather(const transport::GatherChoice& gather, const StatsSnapshot& stats,
                  JsonWriter& json) {
  json.begin_object("gather");
  json.member("mode", transport::gather_mode_name(gather.configured()));
  json.member("lists_copied", stats.lists_copied);
  json.member("lists_gathered", stats.lists_gathered);
  json.member("lists_zerocopy", stats.lists_zerocopy);
  json.member("zerocopy_sends", stats.zerocopy_sends);
  json.member("zerocopy_copied", stats.zerocopy_copied);
  json.member("zerocopy_refused", stats.zerocopy_refused);
  const transport::GatherCosts* costs = gather.costs();
  json.member("measured", costs != nullptr);
  if (costs != nullptr) {
    json.member("measuring_ms", costs->milliseconds);
    json.member("measured_whole", costs->complete);
    json.begin_array("choices");
    for (size_t r = 0; r < costs->cells.size(); ++r) {
      for (size_t b = 0; b < costs->cells[r].size(); ++b) {
        const transport::GatherCosts::Cell& cell = costs->cells[r][b];
        json.begin_object();
        json.member("row_bytes", costs->kRowBytes[r]);
        json.member("rows", costs->kBatches[b]);
        json.member("mode", transport::gather_mode_name(cell.cheapest(r)));
        for (size_t m = 0; m < cell.ns.size(); ++m) {
          json.member(std::string(transport::gather_mode_name(transport::kGatherModes[m])) + "_us",
                      static_cast<double>(cell.ns[m]) / 1e3);
        }
        json.member("zerocopy_copied", cell.zerocopy_copied);
        json.end_object();
      }
    }
    json.end_array();
  }
  json.end_object();
}

void write_pool(table::Tables& tables, JsonWriter& json) {
  const pool::Pool& pool = tables.pool();
  const media::Media& medium = pool.medium();
  json.begin_object("pool");
  json.member("uuid", uuid_text(pool.uuid()));
  json.member("path", medium.path());
  json.member("medium", media::kind_name(medium.kind()));
  json.member("durability",
              medium.is_volatile() ? "volatile" : media::durability_name(medium.durability()));
  json.member("volatile", medium.is_volatile());
  json.member("read_only", pool.read_only());
  json.member("failed", medium.failed());
  json.member("bytes", medium.size());
  json.member("allocated_bytes", medium.allocated_bytes());
  json.member("free_bytes", pool.free_bytes());
  if (const auto pages = medium.sample_pages()) {
    json.begin_object("sampled_pages");
    json.member("mapped_bytes", pages->mapped);
    json.member("huge_bytes", pages->huge);
    json.end_object();
  }
  json.member("generation", pool.generation());
  json.member("was_clean", pool.was_clean());
  json.member("walked", tables.walked());
  json.member("readers_refused", tables.readers_refused());
  json.end_object();
}

void write_tables(table::Tables& tables, const StatsSnapshot& stats, JsonWriter& json) {
  json.begin_array("tables");
  for (const table::TablePointer& table : tables.tables()) {
    const pool::TableSpec& spec = table->record().spec;
    const table::TableStatus status = table->status();
    json.begin_object();
    json.member("id", table->id());
    json.member("name", spec.name);
    json.member("instance", spec.instance);
    json.member("feed", spec.feed == pool::Feed::kDelta ? "delta" : "push");
    json.member("dim", spec.dim);
    json.member("dtype", uint32_t{spec.dtype});
    json.member("row_bytes", spec.row_bytes);
    json.member("rows", status.rows);
    json.member("capacity", status.capacity);
    json.member("slots", status.slots);
    json.member("free_slots", status.free_slots);
    json.member("retired_slots", status.retired_slots);
    json.member("displaced", status.displaced);
    json.member("index_bytes", status.index_bytes);
    json.member("header_bytes", status.header_bytes);
    json.member("allocator_bytes", status.allocator_bytes);
    json.member("walked", status.walked);
    json.member("expire_after", status.expire_after);
    json.member("event_time_ns", status.event_time_ns);
    json.member("expired", status.expired);
    json.member("expiry_delay", status.expiry_delay);
    json.member("evicted", status.evicted);
    json.member("missing_rows", status.missing_rows);
    json.member("damaged_slots", status.damaged_slots);
    json.member("heat_bytes", status.heat_bytes);
    const auto pulled = stats.tables.find(table->id());
    const TableSnapshot& counts = pulled == stats.tables.end() ? kNotPulled : pulled->second;
    json.member("pulls", counts.pulls);
    json.member("keys", counts.keys);
    json.member("misses", counts.misses());
    json.end_object();
  }
  json.end_array();
}

void write_shard(const Ownership& ownership, const std::string& address, JsonWriter& json) {
  json.begin_object("shard");
  json.member("address", address);
  json.member("map_version", ownership.map.version);
  json.member("partitions", ownership.map.partitions);
  json.member("owned", ownership.map.version == 0 ? std::string("all")
                                                  : wire::partitions_text(ownership.shard.owned));
  for (const wire::ShardServer& server : ownership.map.servers) {
    if (server.address == address && !server.zone.empty()) json.member("zone", server.zone);
  }
  json.end_object();
}

void write_catalogue(table::Tables& tables, JsonWriter& json) {
  const std::vector<pool::Progress> progresses = tables.pool().all_progress();
  const auto [instances, aliases, sequence] = tables.pool().names();
  json.member("catalogue_counter", sequence);
  json.begin_array("instances");
  for (const pool::InstanceRecord& record : instances) {
    json.begin_object();
    json.member("id", record.id);
    json.member("model", record.model);
    json.member("name", record.name);
    json.member("partitions", record.partitions);
    json.member("frozen", record.frozen);
    json.member("applied_version", tables.applied_version(record.id));
    uint64_t run = 0;  // the newest run that any partition has applied
    for (const pool::Progress& progress : progresses)
      run = std::max(run, progress.instance == record.id ? progress.run : 0);
    json.member("run", run);
    json.end_object();
  }
  json.end_array();
  json.begin_object("aliases");
  for (const pool::AliasRecord& alias : aliases) json.member(alias.name, alias.instance);
  json.end_object();
  json.begin_object("previous_of_aliases");
  for (const pool::AliasRecord& alias : aliases) {
    if (alias.previous != 0) json.member(alias.name, alias.previous);
  }
  json.end_object();
}

void write_latency(const StatsSnapshot& stats, JsonWriter& json) {
  json.begin_object("latency");
  for (size_t opcode = 1; opcode < stats.latency.size(); ++opcode) {
    const HistogramSnapshot& histogram = stats.latency[opcode];
    if (histogram.count == 0) continue;
    json.begin_object(wire::opcode_name(static_cast<uint16_t>(opcode)));
    json.member("count", histogram.count);
    json.member("mean_us",
                static_cast<double>(histogram.sum_ns) / static_cast<double>(histogram.count) / 1e3);
    json.member("p50_us", static_cast<double>(histogram.quantile_ns(0.5)) / 1e3);
    json.member("p99_us", static_cast<double>(histogram.quantile_ns(0.99)) / 1e3);
    json.member("p999_us", static_cast<double>(histogram.quantile_ns(0.999)) / 1e3);
    json.end_object();
  }
  json.end_object();
}

void write_stats(const StatsSnapshot& stats, JsonWriter& json) {
  json.begin_object("stats");
  for (const StatField& field : kStatFields) json.member(field.name, stats.*field.value);
  json.end_object();
  json.begin_object("errors_by_code");
  for (size_t code = 1; code < stats.errors_by_code.size(); ++code) {
    json.member(std::string(base::code_name(static_cast<base::Code>(code))),
                stats.errors_by_code[code]);
  }
  json.end_object();
}

using Stats = StatsSnapshot;
constexpr StatField kFields[] = {
    {"pulls", &Stats::pulls},
    {"keys", &Stats::keys},
    {"rows_found", &Stats::rows_found},
    {"misses", &Stats::misses},
    {"pushes", &Stats::pushes},
    {"push_groups", &Stats::push_groups},
    {"rows_pushed", &Stats::rows_pushed},
    {"rows_refused", &Stats::rows_refused},
    {"pushes_waiting", &Stats::pushes_waiting},
    {"hot_sets", &Stats::hot_sets},
    {"errors", &Stats::errors},
    {"waits_for_pin", &Stats::waits_for_pin},
    {"waits_for_version", &Stats::waits_for_version},
    {"bytes_received", &Stats::bytes_received},
    {"bytes_sent", &Stats::bytes_sent},
    {"connections", &Stats::connections},
    {"connections_opened", &Stats::connections_opened},
    {"connections_refused", &Stats::connections_refused},
    {"connections_closed_for_cause", &Stats::connections_closed_for_cause},
    {"connections_closed_idle", &Stats::connections_closed_idle},
    {"connections_closed_for_room", &Stats::connections_closed_for_room},
    {"connections_kernel_tls", &Stats::connections_kernel_tls},
    {"handshakes_finished", &Stats::handshakes_finished},
    {"handshakes_failed", &Stats::handshakes_failed},
    {"handshakes_refused", &Stats::handshakes_refused},
    {"refused_for_memory", &Stats::refused_for_memory},
    {"memory_used_bytes", &Stats::memory_used_bytes},
    {"memory_limit_bytes", &Stats::memory_limit_bytes}};

}  // namespace

const std::span<const StatField> kStatFields = kFields;

std::string Shared::status_json() {
  JsonWriter json;
  const StatsSnapshot snapshot = stats();
  json.begin_object();
  json.member("software", options.software);
  json.member("pid", static_cast<int64_t>(getpid()));
  json.member("uptime_s", static_cast<double>(base::monotonic_ns() - started_ns) / 1e9);
  json.member("transport", transport->name());
  json.member("host", options.host);
  json.member("port", uint32_t{transport->port()});
  write_gather(*gather, snapshot, json);
  json.member("workers", options.workers);
  json.member("call_workers", options.call_workers);
  json.member("real_time", options.real_time);
  json.member("busy_poll_us", options.busy_poll_us);
  json.member("rdma", options.rdma == nullptr ? std::string("off") : options.rdma->device().name);
  json.member("rdma_unavailable", std::string(transport::load_verbs_library().message()));
  write_pool(tables, json);
  write_shard(*current_ownership(), address, json);
  write_catalogue(tables, json);
  write_tables(tables, snapshot, json);
  write_stats(snapshot, json);
  write_latency(snapshot, json);
  const std::lock_guard lock(mutex);
  json.begin_array("incidents");
  for (const Incident& incident : incidents) json.element(incident.text);
  for (const std::string& line : transport->refusals()) json.element(line);
  json.end_array();
  for (const auto& [name, value] : members) json.raw(name, value);
  json.end_object();
  return json.take();
}

void Shared::report_incident(std::string text, std::string_view peer) {
  const std::lock_guard lock(mutex);
  incidents.push_back({++incidents_reported, std::move(text), base::host_of(peer)});
  std::map<std::string_view, size_t> of_host;
  size_t of_peers = 0;
  for (const Incident& incident : incidents) {
    if (incident.host.empty()) continue;
    ++of_peers;
    ++of_host[incident.host];
  }
  auto dropped = incidents.end();
  if (of_peers > kIncidentsOfPeersKept) {
    for (auto at = incidents.begin(); at != incidents.end(); ++at) {
      if (at->host.empty()) continue;
      if (dropped == incidents.end() || of_host[at->host] > of_host[dropped->host]) dropped = at;
    }
  } else if (incidents.size() > kIncidentsKept) {
    dropped = incidents.begin();
    while (!dropped->host.empty()) ++dropped;
  }
  if (dropped != incidents.end()) incidents.erase(dropped);
}

std::vector<Incident> Shared::incidents_after(uint64_t number) {
  const std::lock_guard lock(mutex);
  std::vector<Incident> after;
  const uint64_t now = base::monotonic_ns();
  if (now - peer_lines_since_ns >= 60'000'000'000) {
    if (peer_lines_left_out > 0) {
      after.push_back({number,
                       std::to_string(peer_lines_left_out) +
                           " more lines about peers were left out within a minute",
                       ""});
    }
    peer_lines_since_ns = now;
    peer_lines = peer_lines_left_out = 0;
  }
  for (const Incident& incident : incidents) {
    if (incident.number <= number) continue;
    if (!incident.host.empty()) {
      if (incident.number <= left_out_to) continue;
      if (peer_lines >= kPeerLinesAMinute) {
        ++peer_lines_left_out;
        left_out_to = incident.number;
        continue;
      }
      ++peer_lines;
    }
    after.push_back(incident);
  }
  return after;
}

StatsSnapshot Shared::stats() const {
  StatsSnapshot snapshot;
  for (const auto& worker : workers) {
    worker->stats().add_to(snapshot);
    worker->table_stats().add_to(snapshot.tables);
    add_counters(worker->endpoint().counters(), snapshot);
  }
  add_transport(*transport, snapshot);
  if (rdma != nullptr) snapshot.connections_refused += rdma->refused();
  snapshot.pushes_waiting = writer->waiting();
  snapshot.push_groups = writer->groups();
  snapshot.refused_for_memory = memory->refused();
  snapshot.memory_used_bytes = memory->used();
  snapshot.memory_limit_bytes = memory->limit();
  return snapshot;
}

}  // namespace petps::server
