// Room server: answers requests over a transport from the tables of one pool.
//
// Owns:        worker threads (run to completion), the push writer, backpressure, which keys this
//              server owns, what the caller of a connection may do, pulls that wait for a
//              version, statistics, the status text.
// Never does:  decode rows, open pools, touch an index; let one connection's fault reach another.
// Called by:   bindings (Python's `petps serve`), tests, bench.
// Invariants:  a pull takes its pin, then reads the applied version, then looks up; the pin moves
//              into the transport with the rows; a push is answered after it is durable; every
//              request gets exactly one reply, or its connection is closed; a request sees one
//              shard map, and its applied version counts the partitions of that map; a push is
//              applied only if its partition is owned, and not paused, at that moment.
// Threads:     one thread calls start and stop; any thread may call the other functions.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "access/access.h"
#include "base/status.h"
#include "server/calls.h"
#include "server/spans.h"
#include "table/table.h"
#include "tls/tls.h"
#include "transport/rdma/verbs.h"
#include "transport/transport.h"
#include "wire/wire.h"

namespace petps::server {

// Partitions that change their server. Pushes to `pushes` are refused with WRONG_SHARD, so that
// clients repeat them. So are pulls of `pulls`, once the time of Server::keep_pulls() is over.
struct Pauses {
  wire::PartitionSet pushes{};
  wire::PartitionSet pulls{};
};

// A key that a push wrote or deleted.
struct PushedKey {
  uint32_t table = 0;
  uint64_t key = 0;
};

struct ServerOptions {
  std::string host = "127.0.0.1";  // numeric IPv4 or IPv6 address
  uint16_t port = 7070;            // 0: any free port, see Server::port()
  uint32_t workers = 1;            // 1..kMaxWorkers
  uint32_t call_workers = 0;       // 0..kMaxWorkers: workers for Server::calls()
  uint32_t real_time = 0;          // 1..99: priority of the workers, see check_real_time; 0: none
  uint32_t busy_poll_us = 0;       // TcpOptions::busy_poll_us
  // kAuto: measured while the server answers its first requests, see transport/GATHER.md.
  transport::GatherMode gather = transport::GatherMode::kAuto;
  wire::Limits limits;  // each at most the constant of room wire
  transport::Limits transport;
  // Bytes that the requests and replies of all connections may hold (transport/memory_budget.h):
  // at least four frames of the largest size. 0: an eighth of the machine's memory, at most 2 GiB.
  uint64_t memory_bytes = 0;
  // The certificates of the port: clients must use TLS. Null: plain text.
  std::shared_ptr<const tls::ServerContext> tls;
  // An open device (transport::open_verbs), for clients that use rdma. `workers` more workers serve
  // them. Null: no rdma.
  std::shared_ptr<transport::Verbs> rdma;
  wire::ShardMap shard_map;            // version 0: this server owns everything
  std::string address;                 // this server's address in the map; empty: host:port
  Pauses pauses;                       // in force from the first request on
  uint32_t hot_set_seconds = 10;       // sent to clients
  uint64_t drain_ms = 5'000;           // how long stop() waits for requests in flight
  std::string software;                // version text for the status
  std::shared_ptr<access::Gate> gate;  // who may do what; null: everybody may do everything
  // Record the spans of sampled pulls, for take_spans().
  bool trace = false;
  double trace_sample = 0;  // the share of pulls without a caller's context to record, 0 to 1
};

// Pulls of one worker that may wait for a version. Each occupies its connection and costs one check
// per millisecond. One host has at most half of them. A further pull gets STALE at once.
inline constexpr size_t kMaxParkedPulls = 1024;

// No machine needs more workers; a larger number is a mistake in the configuration.
inline constexpr uint32_t kMaxWorkers = 256;

inline constexpr size_t kCodesEnd = static_cast<size_t>(base::Code::kUnauthenticated) + 1;

// Latencies in nanoseconds. Each power of two has 8 buckets, so a quantile is at most 12.5 % too
// high.
struct HistogramSnapshot {
  static constexpr size_t kSubBuckets = 8;
  static constexpr size_t kBuckets = 8 + 37 * kSubBuckets;  // up to 2^40 ns = 18 minutes
  std::array<uint64_t, kBuckets> counts{};
  uint64_t count = 0;
  uint64_t sum_ns = 0;
  static size_t bucket_of(uint64_t ns);
  static uint64_t upper_ns(size_t bucket);  // largest value in the bucket
  uint64_t quantile_ns(double q) const;     // 0 if empty
  void merge(const HistogramSnapshot& other);
};

// Pulls of one table since the start. A pull that names the table twice counts twice.
struct TableSnapshot {
  uint64_t pulls = 0;
  uint64_t keys = 0;
  uint64_t rows_found = 0;
  // Of whole pulls, from the decoded request to the posted reply: what the clients of the table
  // wait for, also if another table of the same pull is the slow one.
  HistogramSnapshot latency;
  uint64_t misses() const { return keys - std::min(keys, rows_found); }
};

struct StatsSnapshot {
  uint64_t pulls = 0;
  uint64_t keys = 0;
  uint64_t rows_found = 0;
  uint64_t misses = 0;
  uint64_t pushes = 0;
  uint64_t rows_pushed = 0;
  uint64_t rows_refused = 0;  // new keys that full tables did not take
  uint64_t hot_sets = 0;
  uint64_t errors = 0;  // error replies
  std::array<uint64_t, kCodesEnd> errors_by_code{};
  uint64_t errors_of(base::Code code) const { return errors_by_code[static_cast<size_t>(code)]; }
  uint64_t waits_for_pin = 0;      // times a pull waited because its worker's epoch list was full
  uint64_t waits_for_version = 0;  // times a pull was parked until its version was applied
  uint64_t bytes_received = 0;
  uint64_t bytes_sent = 0;
  // Replies over tcp, by the way their rows were sent (transport::Counters).
  uint64_t lists_copied = 0;
  uint64_t lists_gathered = 0;
  uint64_t lists_zerocopy = 0;
  uint64_t zerocopy_sends = 0;
  uint64_t zerocopy_copied = 0;
  uint64_t zerocopy_refused = 0;
  uint64_t connections = 0;         // open now
  uint64_t connections_opened = 0;  // ever
  uint64_t connections_refused = 0;
  uint64_t connections_closed_for_cause = 0;
  uint64_t connections_closed_idle = 0;      // no frame arrived for transport::Limits::idle_ms
  uint64_t connections_closed_for_room = 0;  // idle, and a new connection needed the place
  uint64_t connections_kernel_tls = 0;       // of those opened: the kernel encrypts
  uint64_t handshakes_finished = 0;          // of TLS
  uint64_t handshakes_failed = 0;
  uint64_t handshakes_refused = 0;  // too many at once
  uint64_t refused_for_memory = 0;  // requests and replies beyond memory_limit_bytes
  uint64_t memory_used_bytes = 0;   // held by requests and replies now
  uint64_t memory_limit_bytes = 0;
  uint64_t pushes_waiting = 0;  // in the writer's queue
  uint64_t push_groups = 0;     // pushes of a group are written together
  // By opcode number (wire::Opcode): from the decoded request to the posted reply.
  std::array<HistogramSnapshot, wire::kOpcodesEnd> latency;
  std::map<uint32_t, TableSnapshot> tables;  // by id: those that were pulled and still exist
};

// The counters that the status and the metrics show, by name.
struct StatField {
  const char* name;
  uint64_t StatsSnapshot::*value;
};
extern const std::span<const StatField> kStatFields;

// Something that the operator may want to know, such as a connection closed for a cause.
struct Incident {
  uint64_t number;  // of all incidents of the server, from 1 on
  std::string text;
  std::string host;  // of the peer that caused it; empty: none did
};

// Counts that show whether the threads make progress.
struct Progress {
  std::vector<uint64_t> workers;  // each grows at least twice a second
  uint64_t pushes = 0;            // odd while pushes are applied, and grows then
};

class Server {
 public:
  // Listen and serve. `tables` must outlive the Server.
  // Errors: kInvalidArgument (names the option, or the host is not an address), kUnavailable
  // (address in use), kIoError (another failed system call), kResourceExhausted (no epoch list
  // left), kFailedPrecondition (rdma from memory that no device may keep; real_time not permitted).
  static base::Result<std::unique_ptr<Server>> start(table::Tables& tables,
                                                     const ServerOptions& options);
  // Serve over the given transport, which must use frame_rules(options.limits). For tests.
  static base::Result<std::unique_ptr<Server>> start(
      table::Tables& tables, const ServerOptions& options,
      std::unique_ptr<transport::Transport> transport);
  static transport::FrameRules frame_rules(const wire::Limits& limits);

  ~Server();  // calls stop()

  uint16_t port() const;
  transport::Transport& transport();
  // Requests from this process; refused if call_workers is 0.
  Calls& calls();
  // Accept no more connections, answer the requests that have arrived, and stop the workers. A
  // second call does nothing. Errors: kDeadlineExceeded (requests were still in flight after
  // drain_ms; their connections are closed).
  base::Status stop();
  base::Status stop(uint64_t drain_ms);  // with another drain_ms than the options'

  // Use this map from now on. Each request uses this map or the one before it, never both.
  // Errors: kInvalidArgument (the map is invalid, or its model or partitions differ from those of
  // the pool's instances), kFailedPrecondition (its version is not above that of the map in use).
  base::Status set_shard_map(const wire::ShardMap& map);
  // Replace the pauses. When it returns, every push that was accepted before is applied or refused:
  // no row of a partition of `pauses.pushes` changes by a push any more.
  void set_pauses(const Pauses& pauses);
  // Answer pulls of Pauses::pulls until this moment of base::monotonic_ns. A moment and not a time
  // from now on, so that a process that is stopped and goes on answers none later. At first: 0.
  void keep_pulls(uint64_t until_ns);
  // Begin, or end, to remember the keys that pushes to a partition write. Pushes that were applied
  // before it returns may be missing: read all rows afterwards.
  void track_pushes(uint32_t partition, bool is_tracked);
  // Move the keys of pushes to a tracked partition since the last call into `out`. Return false if
  // there were too many: then some are lost.
  bool take_pushed(uint32_t partition, std::vector<PushedKey>& out);
  wire::Shard shard() const;
  std::string address() const;  // this server's address in the shard map

  StatsSnapshot stats() const;
  // Return the newest incidents after this number. Older ones, and some of a flood, are missing.
  std::vector<Incident> incidents_after(uint64_t number) const;
  // Return how many peers were refused for each reason, in words (transport::Transport::refusals).
  std::vector<std::string> refusals() const;
  Progress progress() const;
  // Move at most `most` recorded spans into `out`, the oldest of each worker first. Return the
  // number of spans that were dropped since the start because nobody took them in time. Also after
  // stop(). Any thread, one at a time.
  uint64_t take_spans(size_t most, std::vector<Span>& out);
  // Return what `petps status` shows: one JSON object.
  std::string status_json() const;
  // Add or replace a member of the status object. `json` must be a JSON value (Python's ingest
  // reports its state here).
  void set_status_member(const std::string& name, std::string json);

  struct Impl;

 private:
  explicit Server(std::unique_ptr<Impl> impl);
  static base::Result<std::unique_ptr<Server>> start_over(
      std::unique_ptr<Impl> impl, std::unique_ptr<transport::Transport> transport);
  std::unique_ptr<Impl> impl_;
};

}  // namespace petps::server
