// One server: its connections, its catalogue, and its state (live, in doubt, in backoff).
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "petps_client/backoff.h"
#include "petps_client/catalogue.h"
#include "petps_client/client.h"
#include "petps_client/connection.h"
#include "petps_client/dial.h"

namespace petps::client {

class RemoteServer;

// A connection leased to one call. The destructor returns it, or closes it if it is broken.
class Lease {
 public:
  Lease(RemoteServer* server, std::unique_ptr<Connection> connection)
      : server_(server), connection_(std::move(connection)) {}
  Lease(Lease&& other) noexcept = default;
  Lease& operator=(Lease&&) = delete;
  ~Lease();
  Connection& operator*() const { return *connection_; }
  Connection* operator->() const { return connection_.get(); }
  // The limits in the server's hello on this connection.
  const wire::Limits& limits() const { return connection_->hello.limits; }
  bool has(uint64_t feature) const { return (connection_->hello.features & feature) != 0; }
  uint64_t map_version() const { return connection_->hello.shard.map_version; }

 private:
  RemoteServer* server_;
  std::unique_ptr<Connection> connection_;  // null: moved from
};

// The purpose of a lease. A server may close an idle connection at any moment. The client retries a
// read that fails because of that. It cannot retry a write, which the server may have applied, so
// a write uses no connection that was idle for long.
enum class Use : uint8_t { kRead, kWrite };

// How long a call waits for a server.
enum class Patience : uint8_t { kUntilDeadline, kShort };

// One server, at an address or at one of several addresses of a name.
// Threads: every method from any thread. Each call leases a connection of its own, so the calling
// thread receives the rows itself, straight into its memory.
class RemoteServer {
 public:
  // `at`: the one socket address of this server, of several that its name has; null: resolve the
  // name.
  RemoteServer(Address address, std::string model, const Options& options,
               const BackoffOptions& backoff_options = {}, HostLookup::Resolve resolve = nullptr,
               std::shared_ptr<tls::ClientContext> tls = nullptr, const SocketAddress* at = nullptr)
      : name_(address.text() + (at == nullptr ? "" : " (" + text_of(*at) + ")")),
        host_name_(address.text()),
        is_one_of_several_(at != nullptr),
        tls_(std::move(tls)),
        certificate_name_(options.tls.server_name.empty() ? address.host : options.tls.server_name),
        model_(std::move(model)),
        options_(options),
        backoff_options_(backoff_options),
        host_(at == nullptr ? HostLookup(std::move(address), std::move(resolve))
                            : HostLookup(std::move(address), *at)),
        backoff_(backoff_options),
        doubt_(backoff_options) {}

  const std::string& name() const { return name_; }
  // Return whether the name of host() has further servers. Then the client looks the name up again
  // when this one is dead.
  bool is_one_of_several() const { return is_one_of_several_; }
  // Return the "host:port" that leads to this server, and perhaps to others.
  const std::string& host() const { return host_name_; }

  // Lease an idle connection, or open a new one; wait while all are in use. For a write, skip
  // connections that were idle for longer than kIdleForWriteNs.
  // `patience`: kShort for a call that may leave out the keys of this server. It waits for the
  // server no longer than BackoffOptions::patience_ns, and not at all once the server is dead.
  // `opens_in_short`: open a connection within that time, or give up.
  // Errors: kUnavailable, kDeadlineExceeded, kResourceExhausted (all in use until the deadline),
  // kUnimplemented.
  base::Result<Lease> lease(const Deadline& deadline, Use use = Use::kRead,
                            Patience patience = Patience::kUntilDeadline,
                            bool opens_in_short = false);
  // Return the last catalogue of the pool behind the connection. Read it now if this connection has
  // not read one yet, because the address may lead to another server, or to a restored pool.
  base::Result<std::shared_ptr<const Catalogue>> catalogue(Connection& connection,
                                                           const Deadline& deadline);
  // The same, without reading it; null: this connection has not read one yet.
  std::shared_ptr<const Catalogue> known_catalogue(const Connection& connection) const;
  // Read the catalogue. The result is a state that the server had at some time during this call.
  // The kept catalogue of a pool never goes back to an earlier state.
  // Errors: those of a request; kUnavailable while the pool is an older copy of itself, until its
  // counter has passed the one seen.
  base::Result<std::shared_ptr<const Catalogue>> read_catalogue(Connection& connection,
                                                                const Deadline& deadline);
  // Return the catalogue of the newest connection's pool; null: none yet.
  std::shared_ptr<const Catalogue> last_catalogue() const;
  // Read the server's shard map. Version 0: no map, the server owns all keys.
  base::Result<wire::ShardMap> read_shard_map(const Deadline& deadline);

  // Record a failure of the server: it refused or reset a connection, broke the protocol, or was
  // silent for BackoffOptions::silence_ns. Calls skip the server during its backoff, which grows
  // with each failure.
  void record_failure();
  // Record a reply, which ends backoff and doubt.
  void record_reply();
  // Return an idle connection that needs no exchange before a pull; none: open none, do not wait.
  std::optional<Lease> lease_idle();
  bool has_idle() const;  // whether lease_idle() may return one
  // What a call considers when it chooses among servers.
  struct Condition {
    bool is_awake = false;  // not in backoff
    bool is_in_doubt = false;
    bool is_dead = false;
    bool needs_probe = false;  // unless a call asks it now
    uint32_t in_flight = 0;
    uint64_t latency_ns = 0;  // as Candidate::latency_ns
  };
  Condition condition(uint64_t now_ns) const;
  // Record how long the first reply to a pull of `keys` keys took.
  void record_latency(uint64_t keys, uint64_t latency_ns);
  // Return the end of the backoff, by base::monotonic_ns; 0: none.
  uint64_t backoff_until_ns() const;
  // Return whether a caller recently gave up after less than BackoffOptions::silence_ns, or did so
  // since the last reply and no connection is left: a call would wait for a greeting that may
  // never come. Calls try other servers first, but none fails because of this.
  bool is_in_doubt() const;
  // Return how often the server failed or timed out since this object was made.
  uint64_t failures() const;
  // Return whether the server is live: fewer than kFailuresUntilGone failures since its last reply.
  bool is_live() const;
  // Return whether the server is dead: it is not live, or its last failure was a silence. A call
  // that may leave out keys does not ask a dead server.
  bool is_dead() const;
  // Ask the background thread to contact the server, because a call did without it. Return whether
  // this is the first request since the last contact.
  bool want_probe() { return !is_probe_wanted_.exchange(true, std::memory_order_acq_rel); }
  bool is_probe_wanted() const { return is_probe_wanted_.load(std::memory_order_acquire); }
  void begin_probe() { is_probe_wanted_.store(false, std::memory_order_release); }
  uint64_t patience_ns() const { return backoff_options_.patience_ns(); }
  // Return how many leased connections the server had closed while they were idle.
  uint64_t idle_losses() const;
  // Return the period that the last hello requested; 0 before the first hello.
  uint32_t hot_set_ms() const;

 private:
  friend class Lease;
  using Uuid = std::array<uint8_t, 16>;
  // The newest catalogue of one pool. A catalogue with a higher counter is newer. Servers of
  // earlier releases send no counter: then the later request wins.
  struct KeptCatalogue {
    std::shared_ptr<const Catalogue> value;
    uint64_t requested_at = 0;  // these three by clock_
    uint64_t read_at = 0;
    uint64_t used_at = 0;
  };

  void take_back(std::unique_ptr<Connection> connection);
  void record_timeout_locked(uint64_t waited_ns);
  void record_failure_locked();
  bool is_in_doubt_locked(uint64_t now_ns) const {
    return doubt_until_ns_ > now_ns || has_lost_all_locked();
  }
  bool has_lost_all_locked() const { return doubt_until_ns_ != 0 && idle_.empty(); }
  bool has_idle_locked() const;
  bool is_dead_locked() const {
    return is_silent_ || failures_ >= backoff_options_.failures_until_gone;
  }
  base::Status no_connection_error(const Deadline& deadline, uint64_t since_ns,
                                   Patience patience) const;
  base::Result<std::unique_ptr<Connection>> open(const Deadline& deadline);
  base::Result<std::unique_ptr<Connection>> open_as(const std::string& token,
                                                    const Deadline& deadline);
  base::Result<std::shared_ptr<Catalogue>> request_catalogue(Connection& connection,
                                                             const Deadline& deadline) const;
  KeptCatalogue& kept_for_locked(const Uuid& pool);
  base::Status restored_pool_error(const Catalogue& seen, const Catalogue& now) const;

  const std::string name_;
  const std::string host_name_;
  const bool is_one_of_several_;
  const std::shared_ptr<tls::ClientContext> tls_;  // null: plain text
  const std::string certificate_name_;             // that the server's certificate must have
  const std::string model_;
  const Options options_;
  const BackoffOptions backoff_options_;
  HostLookup host_;
  std::atomic<bool> is_probe_wanted_{false};

  mutable std::mutex mutex_;  // guards everything below
  std::condition_variable returned_;
  std::vector<std::unique_ptr<Connection>> idle_;
  uint32_t leased_ = 0;
  uint32_t waiters_ = 0;  // calls in lease() that wait for a connection to be returned
  wire::HelloReply hello_;
  bool has_hello_ = false;
  std::map<Uuid, KeptCatalogue> kept_;  // by pool: one address may lead to several
  uint64_t clock_ = 0;                  // counts catalogue requests and replies
  Backoff backoff_;
  Backoff doubt_;
  uint64_t backoff_until_ns_ = 0;
  uint64_t doubt_until_ns_ = 0;
  uint32_t failures_ = 0;      // since the last reply
  uint64_t all_failures_ = 0;  // with the timeouts that put it in doubt only
  bool is_silent_ = false;     // a failure since the last reply was a silence
  uint64_t last_reply_ns_ = 0;
  uint64_t latency_ns_ = 0;  // of recent replies, as if all had kLatencyKeys keys
  uint64_t latency_at_ns_ = 0;
  uint64_t idle_losses_ = 0;
};

}  // namespace petps::client
