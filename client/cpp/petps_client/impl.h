// What a Client is made of; included by its own .cc files only.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "petps_client/client.h"
#include "petps_client/dedup.h"
#include "petps_client/endpoint.h"
#include "petps_client/hot_keys.h"
#include "petps_client/pull.h"

namespace petps::client {

// What the client remembers of a table, whichever server answered.
struct TableMemory {
  explicit TableMemory(size_t hot_keys) : hot(hot_keys) {}
  DedupGauge dedup;
  HotKeys hot;
};

// One kind of rows for all three verbs of push.
struct PushWork {
  std::string_view table;
  std::span<const uint64_t> keys;
  std::span<const float> floats;      // encoded to the table's dtype, or
  std::span<const std::byte> stored;  // as given, or
  bool deletes = false;               // neither
  uint32_t dim = 0;                   // of floats
  PushOptions options;
};

struct Client::Impl {
  using Attempt = std::function<base::Status(Endpoint&, const Deadline&)>;

  Url url;
  Options options;
  std::vector<std::unique_ptr<Endpoint>> endpoints;  // fixed after connect
  std::atomic<size_t> rotation{0};
  std::atomic<uint64_t> calls{0};  // of pull, for sampling
  pid_t process = 0;               // that made this client

  std::shared_mutex memories_mutex;
  std::map<std::string, std::unique_ptr<TableMemory>, std::less<>>
      memories;  // grows by known tables only

  std::mutex background_mutex;
  std::condition_variable background_wakes;
  bool stopping = false;
  std::thread background;

  // In a forked child the background thread and the connections are the parent's.
  base::Status check_process() const;
  Deadline deadline(uint32_t ms) const {
    return Deadline::in_ms(ms != 0 ? ms : options.deadline_ms);
  }
  TableMemory& memory(std::string_view table);

  // Runs `attempt` on one replica after another until it succeeds. Unreachable or silent ones rest and are tried again
  // until the deadline; other errors are final once every replica gave one.
  base::Status try_endpoints(std::string_view what, const Deadline& deadline,
                             const Attempt& attempt);
  std::vector<Endpoint*> awake_endpoints();  // in this call's order
  uint64_t next_wake_ns() const;

  base::Status pull_from(Endpoint& endpoint, const Deadline& deadline,
                         std::span<const TablePull> pulls, const PullOptions& options,
                         PullReport& report);
  base::Result<PushReport> push(const PushWork& work);
  base::Status push_to(Endpoint& endpoint, const Deadline& deadline, const PushWork& work,
                       PushReport& report);

  base::Status control(const wire::ControlRequest& request, uint32_t deadline_ms);
  base::Status send_hot_sets();
  void run_background();
};

// Finds the table, over the lease's connection if need be: a table that is not in the last catalogue may be new.
base::Result<const CatalogueTable*> find_table(Endpoint& endpoint, Connection& connection,
                                               std::string_view table, const Deadline& deadline,
                                               std::shared_ptr<const Catalogue>& catalogue);

}  // namespace petps::client
