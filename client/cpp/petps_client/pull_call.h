// One call of Client::pull_many: the keys are split over the servers that own them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "petps_client/forward.h"
#include "petps_client/impl.h"
#include "petps_client/spread.h"

namespace petps::client {

// ASSUMPTIONS: one thread; pulls and options outlive it. run() may be called again with another
// routing.
class PullCall {
 public:
  PullCall(Client::Impl& client, std::span<const TablePull> pulls, const PullOptions& options,
           const Deadline& deadline);
  ~PullCall();
  base::Status run(const Routing& by, PullReport& report);
  // Send the requests of the first round. Return false if that would have to wait, or if something
  // is unusual; then nothing was sent. run() with the same routing goes on from here.
  bool start_now(const Routing& by);
  // Take what has arrived on the connection with this file, without waiting.
  StartedPull::State advance(const Routing& by, int file);
  // After start_now(): the connections that are waited for, and until when (by
  // base::monotonic_ns).
  void awaited(std::vector<pollfd>& entries);
  uint64_t due_ns() const;
  // Close the parts that have no answer: the call has ended.
  static void trace_failure(PullTrace& trace, const base::Status& status);

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
    // Give the keys of these groups the default row, and mark them as unavailable. group_of: the
    // group of each key; empty: all keys are left out.
    void leave_out(std::span<const uint32_t> group_of, const std::vector<bool>& is_left_out);
    uint64_t finish(uint64_t found_count);
    uint64_t count_unavailable() const;
  };

  // Keys of a call that one server answers, and its answer.
  struct Share {
    uint32_t server = 0;           // its number in the routing
    std::vector<uint32_t> groups;  // whose keys these are
    std::vector<Slice> slices;     // by table of the call; empty: all keys of the call, in order
    uint64_t keys = 0;
    uint64_t applied_version = 0;
    std::vector<uint64_t> found_counts;  // by table of the call
    std::string instance;
  };

  // One share in flight at its server. A hedge asks another server for keys of the original, which
  // has sent no byte of a reply yet. Only one of the two writes to the caller's arrays at a time:
  // the hedges end before the original begins to read a reply, and the original ends, without
  // having read anything, when all its hedges are answered.
  struct Flight {
    Flight(Share its_share, RemoteServer& its_server, Lease lease, const Deadline& deadline)
        : share(std::move(its_share)),
          server(its_server),
          leased(std::move(lease)),
          until(deadline) {}
    Share share;
    RemoteServer& server;
    Lease leased;
    Deadline until;
    std::shared_ptr<const Catalogue> catalogue;
    std::vector<PullPart> parts;
    std::unique_ptr<PullExchange> exchange;
    bool is_ready = false;  // bytes can be read, or the exchange is done
    bool has_reply = false;
    bool is_over = false;
    bool is_answered = false;    // a hedge that waits for the other hedges of its original
    uint64_t begun_ns = 0;       // when the first request was sent
    uint64_t hedge_at_ns = 0;    // 0: never
    bool is_very_late = false;   // no hedge was possible when it was late, or it has failed
    Flight* original = nullptr;  // of a hedge
    uint32_t hedges_left = 0;    // of an original: hedges that are not answered
  };
  using Flights = std::vector<std::unique_ptr<Flight>>;

  // The groups of the call's keys, and what became of them.
  struct Groups {
    std::vector<uint32_t> waiting;               // without an answer
    std::vector<uint32_t> left_out;              // their keys are unavailable
    size_t count = 0;                            // of groups that have keys
    std::vector<uint32_t> keys;                  // the number of keys, by group
    std::vector<std::vector<uint32_t>> of_keys;  // by table, by key; empty: there is one group
    std::vector<Share> answers;
    // By server: the last error, and whether it answered with one, so that another owner is better.
    std::vector<base::Status> failures;
    std::vector<bool> has_refused;
    // By server: whether it answered that it lacks keys (Worker::check_loaded). It may answer for
    // other groups, and is asked for one group at a time. Then the group and the server are a pair.
    std::vector<bool> lacks_some;
    std::vector<std::pair<uint32_t, uint32_t>> lacking;
    // By server, for owners of waiting groups: as they were at the beginning of this round.
    std::vector<RemoteServer::Condition> conditions;
    std::vector<bool> is_able;  // to serve the instance of the call, as far as the client knows
  };

  // Requests to several servers at the same time.
  struct Round {
    Flights flights;
    base::Status refusal;  // that fails the call
    RemoteServer* wrong_shard = nullptr;
    bool has_asked = false;
  };

  base::Status run_once(const Routing& by, PullReport& report);
  void report_to(const Routing& by, PullReport& report);
  base::Status plan(const Routing& by);
  void take_choice();
  base::Status plan_tables();
  bool lists_all(const Catalogue& catalogue) const;
  bool find_known_catalogue(const Routing& by);
  base::Status find_catalogue(const Routing& by, bool& was_known);
  bool is_outdated(const Routing& by) const;
  // Return whether the server of this catalogue can serve the instance of the call.
  bool can_serve(const Catalogue& catalogue) const;
  base::Status check_instance(Flight& flight) const;
  static bool is_switched(const Routing& by,
                          const std::vector<std::shared_ptr<const Catalogue>>& before);
  uint32_t keys_per_request(const Share& share) const;
  uint32_t wait_ms(const Flight& flight, bool may_wait) const;
  base::Status start(Flight& flight, bool may_wait);
  base::Status request(Flight& flight, bool may_wait);
  // Record the answer of a completed flight.
  void finish(Flight& flight);
  bool have_all_refused(const Routing& by, uint32_t group) const;
  // Pull the keys of a group that is left, and those of others from the same servers, from one
  // server after another.
  base::Status pull_group(const Routing& by, uint32_t group);
  bool others_can_serve(const RemoteServers& owners, const RemoteServers& able) const;
  base::Status pull_replicas(const Routing& by, uint32_t group, const RemoteServers& replicas,
                             const std::function<bool()>& is_outdated, base::Status status);
  bool wait_for_backoff(const RemoteServers& replicas, uint64_t since_ns) const;
  base::Status pull_from(const Routing& by, RemoteServer& server, const Deadline& until,
                         bool may_wait);

  base::Status exchange(Flight& flight, bool may_wait);
  bool record_lack(const Routing& by, const Share& share, const base::Status& status);
  bool lacks(uint32_t group, uint32_t server) const;
  void erase_lacking(const Routing& by, uint32_t group, RemoteServers& owners) const;

  // client_pull_shares.cc: which server answers which keys.
  void find_groups(const Routing& by);
  void look_at_servers(const Routing& by);
  // Return the servers as candidates. hedged: the server that does not answer; null: for the
  // requests of a round.
  std::vector<Candidate> candidates(const Routing& by, int round, const Share* hedged) const;
  // Return the shares by which these servers answer these groups.
  std::vector<Share> make_shares(const Routing& by, std::span<const uint32_t> groups,
                                 std::span<const uint32_t> servers) const;
  std::vector<Share> shares_of_round(const Routing& by, int round);
  Share rest_for(const Routing& by, const RemoteServer& server) const;
  static bool has_only_owner(const Routing& by, const Share& share);
  void commit(Share share);

  // client_pull_groups.cc: requests to several servers at the same time.
  base::Status pull_at_once(const Routing& by, int number, bool& has_asked);
  base::Status finish_round(const Routing& by, Round& round, bool& has_asked);
  Deadline time_for(const Routing& by, const Share& share, bool& has_others) const;
  void ask(const Routing& by, Share share, Round& round);
  void add_flight(const Routing& by, std::unique_ptr<Flight> flight, const Deadline& until,
                  const base::Status& status, Round& round);
  void record_error(const Routing& by, const Share& share, const base::Status& status,
                    Round& round);
  void read_replies(const Routing& by, Round& round);
  void read_reply(const Routing& by, Flight& flight, Round& round);
  void take_reply(const Routing& by, Flight& flight, base::Status status, Round& round);
  void record_latency(Flight& flight);
  static void wait_for_any(const Flights& flights);
  // client_pull_started.cc
  bool is_complete(const Round& round) const;
  // client_hedge.cc
  uint64_t hedge_at_ns(const Routing& by, const Flight& flight) const;
  void hedge(const Routing& by, Flight& original, Round& round);
  Flights hedges_of(const Routing& by, const Share& share, const Deadline& until,
                    bool is_very_late);
  static void hedge_later(Flight& original, Round& round);
  static void drop_hedges(const Flight& original, Round& round);
  void take_hedge(Flight& hedge, Round& round);

  // For calls that may leave out keys (client_pull_partial.cc).
  Patience patience() const { return may_leave_out_ ? Patience::kShort : Patience::kUntilDeadline; }
  Deadline limit(const Deadline& deadline, const RemoteServer& server) const;
  bool are_owners_dead(const Routing& by, uint32_t group) const;
  void leave_out_dead(const Routing& by);
  void leave_out(const Routing& by, std::span<const uint32_t> groups);
  void give_up(const Routing& by, uint32_t group, const base::Status& status);
  base::Status failure_of(const Routing& by, uint32_t group) const;
  static base::Status no_reply(const RemoteServers& owners);
  base::Status check_any_answers(const Routing& by) const;

  // For traced calls only: client_trace.cc. A part is what the call asked of one server.
  void trace_servers(const Routing& by);
  void trace_attempt(const Share& share, const RemoteServer& server);
  void trace_request(Flight& flight);
  void trace_end(const Share& share, base::Code code);

  Client::Impl& client_;
  const std::span<const TablePull> pulls_;
  const PullOptions& options_;
  const Deadline deadline_;
  const uint64_t wait_until_ns_;
  const bool may_leave_out_;      // keys that no server answers for
  Choice choice_;                 // instance empty: each server's own current instance
  CataloguePointer catalogue_;    // of the tables of plans_
  size_t first_traced_part_ = 0;  // of the current routing
  std::vector<Plan> plans_;       // by table of the call
  Groups groups_;
  std::optional<Round> started_;  // by start_now()
};

}  // namespace petps::client
