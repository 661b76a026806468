// The state that all workers of one server share. Internal to server.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "server/calls.h"
#include "server/push_writer.h"
#include "server/server.h"
#include "server/worker.h"
#include "transport/gather_choice.h"
#include "transport/memory_budget.h"
#include "transport/rdma/rdma.h"

namespace petps::server {

// Incidents that the status lists, such as connections closed for a cause. Older ones are dropped.
inline constexpr size_t kIncidentsKept = 32;
// Of these, at most this many are about peers, so that no flood of peers hides the others.
inline constexpr size_t kIncidentsOfPeersKept = 24;
// Lines about peers that incidents_after() returns in a minute: each may be a line of a log.
inline constexpr size_t kPeerLinesAMinute = 60;

// The keys that this server owns according to its newest map. Immutable.
struct Ownership {
  wire::ShardMap map;
  wire::Shard shard;
  bool owns_all = true;
  wire::PartitionSet shared{};  // owned by other servers too: pushes to them are refused
  Pauses pauses;
};

struct Shared {
  explicit Shared(table::Tables& served_tables, const ServerOptions& server_options)
      : tables(served_tables),
        options(server_options),
        gate(options.gate != nullptr ? options.gate : std::make_shared<access::Gate>()),
        gather(std::make_shared<transport::GatherChoice>(options.gather)),
        memory(std::make_shared<transport::MemoryBudget>(
            options.memory_bytes == 0 ? transport::default_memory_bytes() : options.memory_bytes)) {
  }

  table::Tables& tables;
  const ServerOptions options;
  const std::shared_ptr<access::Gate> gate;
  const std::shared_ptr<transport::GatherChoice> gather;
  const std::shared_ptr<transport::MemoryBudget> memory;
  std::thread measuring;  // publishes its figures into `gather`
  uint64_t started_ns = 0;
  std::atomic<bool> stopping{false};
  std::atomic<uint64_t> drain_until_ns{0};
  std::unique_ptr<transport::Transport> transport;
  std::unique_ptr<Calls> calls;
  std::unique_ptr<transport::RdmaTransport> rdma;  // null: not offered
  std::unique_ptr<PushWriter> writer;
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<std::thread> threads;

  // The TCP connection over which each rdma connection was opened. Closed with the rdma connection.
  struct Door {
    size_t worker;
    transport::ConnectionId connection;
    access::CallerPointer caller;
  };
  std::mutex pairings_mutex;  // guards pairings
  std::unordered_map<uint64_t, Door> pairings;

  std::string address;  // in the shard map; set before the workers start
  // Grows with every change of `ownership`. A worker compares it with the change count of its own
  // copy: one load per request, no lock.
  std::atomic<uint64_t> map_change_count{0};
  mutable std::mutex ownership_mutex;  // guards ownership; held while the map is changed
  std::shared_ptr<const Ownership> ownership = std::make_shared<Ownership>();

  std::atomic<uint64_t> pulls_until_ns{0};  // until then, pulls of Pauses::pulls are answered

  std::mutex spans_mutex;        // one thread takes spans at a time
  size_t first_span_worker = 0;  // whose spans are taken first the next time

  std::mutex mutex;                            // guards members and incidents
  std::map<std::string, std::string> members;  // of the status, by name
  std::deque<Incident> incidents;
  uint64_t incidents_reported = 0;
  uint64_t peer_lines_since_ns = 0;  // the minute of these counts
  size_t peer_lines = 0;             // returned by incidents_after()
  size_t peer_lines_left_out = 0;
  uint64_t left_out_to = 0;  // the newest incident that was left out

  base::Status set_shard_map(const wire::ShardMap& map);
  void set_pauses(const Pauses& pauses);
  // Refuse keys that this server does not own, or whose partition is paused.
  base::Status check_owned(const Ownership& owned, std::span<const uint64_t> keys,
                           const wire::PartitionSet& paused) const;
  // Check the keys of a push again, before it is applied, if the map or the pauses have changed
  // since this change count.
  base::Status check_again(uint64_t change_count, std::span<const uint64_t> keys) const;
  base::Status open_rdma();
  size_t first_rdma_worker() const { return options.workers + calls->endpoints(); }
  void add_pairing(uint64_t pairing, const Door& door);
  void drop_pairing(uint64_t pairing);
  void close_door(uint64_t pairing);
  // Return who opened the pairing; null if the pairing is gone.
  access::CallerPointer caller_of(uint64_t pairing);
  std::shared_ptr<const Ownership> current_ownership() const {
    const std::lock_guard lock(ownership_mutex);
    return ownership;
  }
  // `peer` is the address of the peer that caused it. When there are too many lines about peers,
  // the oldest one of the peer with the most is dropped.
  void report_incident(std::string text, std::string_view peer = {});
  std::string status_json();
  std::vector<Incident> incidents_after(uint64_t number);
  StatsSnapshot stats() const;
};

// Start shared.measuring if the gather mode is to be measured.
void start_measuring(Shared& shared);

// Return the catalogue as clients receive it: what this caller may know.
wire::TablesReply describe_tables(table::Tables& tables, const wire::TablesRequest& request,
                                  const access::Caller& caller);

struct Server::Impl {
  explicit Impl(table::Tables& tables, const ServerOptions& options) : shared(tables, options) {}
  Shared shared;
  bool stopped = false;
};

}  // namespace petps::server
