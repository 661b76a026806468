// One server address: its connections, its catalogue, and whether it is worth asking.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "petps_client/catalogue.h"
#include "petps_client/client.h"
#include "petps_client/connection.h"

namespace petps::client {

class Endpoint;

// A connection lent to one call; goes back, or is closed when broken.
class Lease {
 public:
  Lease(Endpoint* endpoint, std::unique_ptr<Connection> connection, const wire::HelloReply& hello)
      : endpoint_(endpoint),
        connection_(std::move(connection)),
        limits_(hello.limits),
        features_(hello.features),
        map_version_(hello.shard.map_version) {}
  Lease(Lease&& other) noexcept = default;
  Lease& operator=(Lease&&) = delete;
  ~Lease();
  Connection& operator*() const { return *connection_; }
  Connection* operator->() const { return connection_.get(); }
  const wire::Limits& limits() const { return limits_; }
  bool has(uint64_t feature) const { return (features_ & feature) != 0; }
  uint64_t map_version() const { return map_version_; }  // when the connection was opened

 private:
  Endpoint* endpoint_;
  std::unique_ptr<Connection> connection_;  // null: moved from
  wire::Limits limits_;
  uint64_t features_;
  uint64_t map_version_;
};

// Threads: every method from any thread. A call leases a connection of its own, so that rows are received by the thread
// that wants them, into its memory, without a hand-over.
class Endpoint {
 public:
  Endpoint(Address address, std::string model, const Options& options)
      : address_(std::move(address)),
        name_(address_.text()),
        model_(std::move(model)),
        options_(options) {}

  const std::string& name() const { return name_; }

  // An idle connection, or a new one after its hello; waits while all are in use.
  // Errors: kUnavailable, kDeadlineExceeded, kResourceExhausted (all in use until the deadline), kUnimplemented.
  base::Result<Lease> lease(const Deadline& deadline);
  // As last read; read now, over the caller's connection, when there is none yet. Lease first: that may find another pool.
  base::Result<std::shared_ptr<const Catalogue>> catalogue(Connection& connection,
                                                           const Deadline& deadline);
  // As the server had it at some time during this call; what was read last never goes back to an earlier state of the server.
  base::Result<std::shared_ptr<const Catalogue>> read_catalogue(Connection& connection,
                                                                const Deadline& deadline);
  std::shared_ptr<const Catalogue> last_catalogue() const;  // null: none yet
  // Version 0: the server has everything.
  base::Result<wire::ShardMap> read_shard_map(const Deadline& deadline);

  // After a failure the endpoint rests for a growing time; other calls prefer its replicas meanwhile.
  void failed();
  void answered();
  uint64_t rests_until_ns() const;
  // What the last hello asked for; 0 before any.
  uint32_t hot_set_ms() const;

 private:
  friend class Lease;
  void take_back(std::unique_ptr<Connection> connection);
  base::Result<std::unique_ptr<Connection>> open(const Deadline& deadline, wire::HelloReply& hello);
  base::Result<std::shared_ptr<const Catalogue>> ask_catalogue(Connection& connection,
                                                               const Deadline& deadline) const;

  // Of two answers whose times overlap nobody knows which is the newer state: the one that came first stays, and who waited for
  // the other asks again, unless the one that stays was asked for later.
  struct LastCatalogue {
    std::shared_ptr<const Catalogue> value;  // null: none of this pool yet
    uint64_t asked_at = 0;                   // by clock_
    uint64_t read_at = 0;
  };

  const Address address_;
  const std::string name_;
  const std::string model_;
  const Options options_;

  mutable std::mutex mutex_;  // guards everything below
  std::condition_variable returned_;
  std::vector<std::unique_ptr<Connection>> idle_;
  uint32_t leased_ = 0;
  wire::HelloReply hello_;
  bool greeted_ = false;
  LastCatalogue catalogue_;
  uint64_t clock_ = 0;  // ticks as catalogues are asked for and read
  uint64_t rests_until_ns_ = 0;
  uint64_t rest_ns_ = 0;
};

}  // namespace petps::client
