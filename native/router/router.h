// Room router: takes requests of the native protocol and has the servers of a cluster answer them,
// so that a client which knows one address reaches every partition.
//
// Owns:        worker threads of its transport, threads that ask servers, a client of the servers
//              for each token, the ids under which callers know tables, its statistics.
// Never does:  keep rows, decode them, or decide what a token may do: the servers do, for each
//              request; give one caller's connections, names or answers to another; queue without
//              bound.
// Called by:   bindings (Python's `petps router`), tests, bench.
// Invariants:  every request gets exactly one reply, or its connection is closed; a caller without
//              a token asks the servers with none; a row is copied from a server's socket into the
//              reply and from there into the caller's socket, and nowhere else while the caller
//              reads.
// Threads:     one thread calls start and stop; any thread may call the other functions.
//              docs/decisions/0117-a-router-asks-as-its-callers.md describes the threads within.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "petps_client/client.h"
#include "server/server.h"
#include "tls/tls.h"
#include "transport/transport.h"
#include "wire/wire.h"

namespace petps::router {

class Caller;

struct RouterOptions {
  std::string servers;                // "petps://h1:7070,h2:7070", any servers of the cluster
  std::string host = "127.0.0.1";     // numeric IPv4 or IPv6 address
  uint16_t port = 7080;               // 0: any free port, see Router::port()
  uint32_t workers = 1;               // 1..server::kMaxWorkers
  uint32_t calls = 64;                // requests that may be at the servers at once, 1..kMaxCalls
  uint32_t callers = 256;             // tokens served at once, 1..kMaxCallers
  uint64_t caller_idle_ms = 300'000;  // a token without requests for this time is forgotten
  // How long a request may take, without the time that a pull may wait for its version. It is
  // shorter than the 2 s that clients allow, so that they receive the reason.
  uint32_t deadline_ms = 1'500;
  uint64_t drain_ms = 5'000;  // how long stop() waits for requests in flight
  wire::Limits limits;        // each at most the constant of room wire
  transport::Limits transport;
  uint64_t memory_bytes = 0;  // as server::ServerOptions::memory_bytes
  // The certificates of the port: callers must use TLS. Null: plain text.
  std::shared_ptr<const tls::ServerContext> tls;
  client::TlsOptions server_tls;  // for servers of a petps+tls:// URL; no certificate of our own
  std::string zone;               // servers of this zone of the map are preferred; empty: none
  // Serve nobody if the servers ask nobody for credentials, because the port is beyond loopback.
  bool needs_token = false;
  std::string software;  // version text for the status
};

struct Listing;  // names.h

// Each token has a client, with a thread and connections to the servers.
inline constexpr uint32_t kMaxCallers = 4096;

struct RouterSnapshot {
  server::StatsSnapshot stats;  // of requests and connections
  uint32_t callers = 0;
  uint32_t calls_in_flight = 0;
  uint32_t logins_in_flight = 0;      // of the native port
  uint64_t pulls_without_thread = 0;  // of stats.pulls: they went well at once
  uint64_t logins_failed = 0;
  uint64_t hedges = 0;
  uint64_t hedges_won = 0;
  std::vector<client::ServerCounts> servers;  // as the callers of now have seen them
};

class Router {
 public:
  // Listen and serve. The servers need not answer yet.
  // Errors: kInvalidArgument (names the option), kUnavailable (address in use), kIoError,
  // kResourceExhausted (no threads).
  static base::Result<std::unique_ptr<Router>> start(const RouterOptions& options);
  ~Router();  // calls stop()

  uint16_t port() const;
  // Accept no more connections, answer the requests that have arrived, and stop. A second call does
  // nothing. Errors: kDeadlineExceeded (requests were still in flight after drain_ms; their
  // connections are closed).
  base::Status stop();
  // Forget tokens that have had no requests for caller_idle_ms. Call it about every second.
  void tend();

  // The names that a token sees, and the caller whose ids they have. A token that is forgotten
  // and comes back gets other ids. `has_left` ends the waits of calls with these names: set it when
  // nobody waits for their replies.
  struct Seen {
    std::shared_ptr<const Listing> listing;
    std::shared_ptr<Caller> caller;
    std::shared_ptr<std::atomic<bool>> has_left = std::make_shared<std::atomic<bool>>(false);
  };
  // Return the names that this token (empty: none) sees, at most about a second old. Errors: those
  // of a login; kResourceExhausted at once if the host guesses tokens and another login runs.
  base::Result<Seen> names(const std::string& token, const std::string& host);
  // Return whether the router knows the token, so that names() asks for no login.
  bool knows(const std::string& token, const std::string& host) const;
  // Answer one request of the native protocol, with ids of `seen`, which is of this token. The
  // reply may be an error. It waits for servers.
  wire::Frame call(const Seen& seen, const std::string& token, const std::string& host,
                   wire::Frame request);

  // Count bytes that a door of this process holds, until release(). Errors: kResourceExhausted.
  base::Status hold(size_t bytes);
  void release(size_t bytes);

  RouterSnapshot snapshot() const;
  std::vector<uint64_t> progress() const;  // of each worker; grows at least twice a second
  // Return whether the servers let this token see a server's status; then it may see the router's.
  // Errors: those of the servers. It may wait for them.
  base::Status check_sight(const std::string& token, const std::string& host);
  std::string status_json() const;  // one JSON object

  struct Impl;

 private:
  explicit Router(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace petps::router
