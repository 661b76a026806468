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
  // One table of a call, and the positions of its distinct keys.
  struct Plan {
    const TablePull* pull = nullptr;
    PullPart part;                   // the table and the form; keys of the caller
    std::span<const uint64_t> keys;  // distinct after dedup
    uint8_t* mask = nullptr;
    Distinct distinct;
    bool is_deduped = false;
    std::vector<uint8_t> own_mask;  // to count found keys when the caller has no mask
    // By key, 1: unavailable. The caller's, or own_unavailable, or null while every key has an
    // answer.
    uint8_t* unavailable = nullptr;
    std::vector<uint8_t> own_unavailable;

    void dedup(Dedup option, DedupEstimate& estimate);
    // Give the keys at these positions of `keys` (null: all of them) the default row, and mark
    // them as unavailable.
    void leave_out(const std::vector<uint32_t>* positions);
    uint64_t finish(uint64_t found_count);
    uint64_t count_unavailable() const;
  };

  // The part of a call for one group of servers, and its result.
  struct Share {
    size_t group = 0;
    std::vector<Slice> slices;  // by table of the call; empty: all keys, in order
    bool is_done = false;
    bool is_left_out = false;  // its keys are unavailable
    base::Status failure;      // the last one
    uint64_t applied_version = 0;
    std::vector<uint64_t> found_counts;  // by table of the call
    std::string instance;
  };

  // One share in flight at one server.
  struct Flight {
    Flight(Share& its_share, RemoteServer& its_server, Lease lease, const Deadline& deadline)
        : share(its_share), server(its_server), leased(std::move(lease)), until(deadline) {}
    Share& share;
    RemoteServer& server;
    Lease leased;
    Deadline until;
    std::shared_ptr<const Catalogue> catalogue;
    std::vector<PullPart> parts;
    std::unique_ptr<PullExchange> exchange;
    bool is_ready = false;  // bytes can be read, or the exchange is done
  };

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

  // For calls that may leave out keys (client_partial.cc).
  Patience patience() const { return may_leave_out_ ? Patience::kShort : Patience::kUntilDeadline; }
  Deadline limit(const Deadline& deadline, const RemoteServer& server) const;
  bool leave_out_if_dead(const Routing& by, Share& share);
  void leave_out(Share& share, base::Status failure);
  base::Status pull_or_leave_out(const Routing& by, std::vector<Share>& shares);
  base::Status check_any_answers(const Routing& by, const std::vector<Share>& shares) const;

  static void wait_for_any(std::span<const std::unique_ptr<Flight>> flights);

  Client::Impl& client_;
  const std::span<const TablePull> pulls_;
  const PullOptions& options_;
  const Deadline deadline_;
  const uint64_t wait_until_ns_;
  const bool may_leave_out_;    // keys that no server answers for
  Choice choice_;               // instance empty: each server's own current instance
  CataloguePointer catalogue_;  // of the tables of plans_
  std::vector<Plan> plans_;     // by table of the call
};

}  // namespace petps::client
