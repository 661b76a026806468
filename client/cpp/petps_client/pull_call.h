// One call of Client::pull_many: the keys are split over the groups of servers that own them.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "petps_client/impl.h"

namespace petps::client {

// ASSUMPTIONS: one thread; pulls and options outlive it. run() may be called again with another
// routing.
class PullCall {
 public:
  PullCall(Client::Impl& client, std::span<const TablePull> pulls, const PullOptions& options,
           const Deadline& deadline);
  ~PullCall();
  base::Status run(const Routing& by, PullReport& report);

 private:
  struct Plan;
  struct Share;
  struct Flight;

  base::Status run_once(const Routing& by, PullReport& report);
  base::Status plan(const Routing& by);
  base::Status find_catalogue(const Routing& by, CataloguePointer& catalogue, bool& was_known);
  bool is_outdated(const Routing& by) const;
  base::Status check_instance(Flight& flight) const;
  static bool is_switched(const Routing& by,
                          const std::vector<std::shared_ptr<const Catalogue>>& before);
  std::vector<Share> split_by_group(const Routing& by) const;
  uint32_t wait_ms(const Flight& flight, bool may_wait) const;
  base::Status start(Flight& flight, bool may_wait);
  // Record the result of a completed flight in its share.
  static void finish(const Flight& flight);
  base::Status pull_group(const Routing& by, Share& share);
  base::Status pull_from(Share& share, RemoteServer& server, const Deadline& until, bool may_wait);
  base::Status pull_all_groups(const Routing& by, std::vector<Share>& shares);
  static void wait_for_any(std::span<const std::unique_ptr<Flight>> flights);

  Client::Impl& client_;
  const std::span<const TablePull> pulls_;
  const PullOptions& options_;
  const Deadline deadline_;
  const uint64_t wait_until_ns_;
  Choice choice_;                  // instance empty: each server's own current instance
  std::vector<Plan> plans_;        // by table of the call
  std::vector<size_t> row_bytes_;  // of `out`, by table of the call
};

}  // namespace petps::client
