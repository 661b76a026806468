// One server address: its connections, its catalogue, and whether it is worth asking.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "petps_client/backoff.h"
#include "petps_client/catalogue.h"
#include "petps_client/client.h"
#include "petps_client/connection.h"
#include "petps_client/dial.h"

namespace petps::client {

class Endpoint;

// A connection lent to one call; goes back, or is closed when broken.
class Lease {
 public:
  Lease(Endpoint* endpoint, std::unique_ptr<Connection> connection)
      : endpoint_(endpoint), connection_(std::move(connection)) {}
  Lease(Lease&& other) noexcept = default;
  Lease& operator=(Lease&&) = delete;
  ~Lease();
  Connection& operator*() const { return *connection_; }
  Connection* operator->() const { return connection_.get(); }
  // As the server said when the connection was opened.
  const wire::Limits& limits() const { return connection_->hello.limits; }
  bool has(uint64_t feature) const { return (connection_->hello.features & feature) != 0; }
  uint64_t map_version() const { return connection_->hello.shard.map_version; }

 private:
  Endpoint* endpoint_;
  std::unique_ptr<Connection> connection_;  // null: moved from
};

// What a connection is leased for. A server may close a connection that has been idle, and a write
// that meets that moment may have been taken or not; a read is asked again.
enum class Use : uint8_t { kRead, kWrite };

// Threads: every method from any thread. A call leases a connection of its own, so that rows are received by the thread
// that wants them, into its memory, without a hand-over.
class Endpoint {
 public:
  Endpoint(Address address, std::string model, const Options& options,
           const Patience& patience = {}, HostLookup::Resolve resolve = nullptr)
      : name_(address.text()),
        model_(std::move(model)),
        options_(options),
        patience_(patience),
        host_(std::move(address), std::move(resolve)),
        rest_(patience),
        doubt_(patience) {}

  const std::string& name() const { return name_; }

  // An idle connection, or a new one after its hello; waits while all are in use. For a write: none
  // that was idle for longer than kIdleForWriteNs.
  // Errors: kUnavailable, kDeadlineExceeded, kResourceExhausted (all in use until the deadline), kUnimplemented.
  base::Result<Lease> lease(const Deadline& deadline, Use use = Use::kRead);
  // The tables of the pool behind the connection, as last read; read now when nothing was read over
  // this connection yet: its server may be another one, or may have been restored since.
  base::Result<std::shared_ptr<const Catalogue>> catalogue(Connection& connection,
                                                           const Deadline& deadline);
  // As the server had it at some time during this call. What is kept of a pool never goes back to
  // an earlier state. Errors: as of a request; kUnavailable when the pool was restored from an
  // older copy, until it has passed the state that was seen.
  base::Result<std::shared_ptr<const Catalogue>> read_catalogue(Connection& connection,
                                                                const Deadline& deadline);
  // Of the pool that the last connection led to; null: none yet.
  std::shared_ptr<const Catalogue> last_catalogue() const;
  // Version 0: the server has everything.
  base::Result<wire::ShardMap> read_shard_map(const Deadline& deadline);

  // The server failed (refused, reset, broke the protocol, silent for longer than our patience): it
  // rests for a growing time. Other calls prefer its replicas meanwhile.
  void failed();
  void answered();
  uint64_t rests_until_ns() const;
  // A caller's time passed before it answered, less than our patience: others are asked first, but
  // no call fails for it.
  bool is_in_doubt() const;
  // False from kFailuresUntilGone failures in a row until the next answer.
  bool answers() const;
  // Counts connections that were closed while idle: a read that met one is asked again.
  uint64_t idle_losses() const;
  // What the last hello asked for; 0 before any.
  uint32_t hot_set_ms() const;

 private:
  friend class Lease;
  using Uuid = std::array<uint8_t, 16>;
  // The newest catalogue of one pool. The counter says which of two is newer. Servers of earlier
  // releases tell none: then it is the one that was asked for later.
  struct Kept {
    std::shared_ptr<const Catalogue> value;
    uint64_t asked_at = 0;  // by clock_
    uint64_t read_at = 0;
    uint64_t used_at = 0;
  };

  void take_back(std::unique_ptr<Connection> connection);
  void timed_out(uint64_t waited_ns);  // under mutex_
  void fail();                         // under mutex_
  base::Result<std::unique_ptr<Connection>> open(const Deadline& deadline);
  base::Result<std::shared_ptr<Catalogue>> ask_catalogue(Connection& connection,
                                                         const Deadline& deadline) const;
  Kept& kept_of(const Uuid& pool);  // under mutex_
  base::Status restored(const Catalogue& seen, const Catalogue& now) const;

  const std::string name_;
  const std::string model_;
  const Options options_;
  const Patience patience_;
  HostLookup host_;

  mutable std::mutex mutex_;  // guards everything below
  std::condition_variable returned_;
  std::vector<std::unique_ptr<Connection>> idle_;
  uint32_t leased_ = 0;
  wire::HelloReply hello_;
  bool greeted_ = false;
  std::map<Uuid, Kept> kept_;  // by pool: several may stand behind one address
  uint64_t clock_ = 0;         // ticks as catalogues are asked for and read
  Backoff rest_;
  Backoff doubt_;
  uint64_t rests_until_ns_ = 0;
  uint64_t doubted_until_ns_ = 0;
  uint32_t failures_ = 0;  // in a row
  uint64_t idle_losses_ = 0;
};

}  // namespace petps::client
