// The implementation of Client; included by its own .cc files only.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "petps_client/choice.h"
#include "petps_client/client.h"
#include "petps_client/hedge.h"
#include "petps_client/host.h"
#include "petps_client/pull.h"
#include "petps_client/remote_server.h"
#include "petps_client/routing.h"
#include "petps_client/statistics.h"

namespace petps::client {

// The numbers of one client's pushes. By these numbers a server recognises a push that arrives
// after the client gave it up, and refuses it.
class PushNumbers {
 public:
  PushNumbers();
  // Return the number of a new call.
  uint64_t begin();
  void end(uint64_t number);
  // Return which of the client's calls are in flight now, for the request of call `number`.
  wire::PushOrder order(uint64_t number) const;

 private:
  const uint64_t client_;
  mutable std::mutex mutex_;  // guards the members below
  uint64_t next_ = 1;
  std::set<uint64_t> in_flight_;  // calls that have not returned
};

// The number of one push call. The destructor releases it.
struct PushNumber {
  explicit PushNumber(PushNumbers& owner) : numbers(owner), value(owner.begin()) {}
  ~PushNumber() { numbers.end(value); }
  PushNumber(PushNumber&&) = delete;
  PushNumbers& numbers;
  const uint64_t value;
};

// One push, push_stored or erase. Exactly one of `floats`, `stored` and `deletes` is set.
struct PushWork {
  std::string_view table;
  std::span<const uint64_t> keys;
  std::span<const float> floats = {};      // to be encoded to the table's dtype
  std::span<const std::byte> stored = {};  // rows as stored
  bool deletes = false;
  uint32_t dim = 0;     // of floats
  uint64_t number = 0;  // of the call (see PushNumbers)
  // The order of the call among those of the client that sent it to a router; null: number.
  const wire::PushOrder* order = nullptr;
  // Set when the keys go to several groups: every group must have this dtype, dim and instance.
  std::optional<Table> encoded_as = {};
  PushOptions options = {};
};

struct Client::Impl {
  using Hosts = std::vector<std::shared_ptr<Host>>;
  using Attempt = std::function<base::Status(RemoteServer&, const Deadline&)>;

  explicit Impl(const Options& the_options)
      : options(the_options), statistics(the_options.hot_keys) {}

  Url url;
  const Options options;
  std::shared_ptr<tls::ClientContext> tls;  // null: plain text
  Hosts seeds;                              // of the URL; fixed after connect
  std::atomic<size_t> rotation{0};
  std::atomic<uint64_t> calls{0};  // pull calls, for sampling
  std::atomic<uint64_t> pulls{0};  // these three: PullCounts
  std::atomic<uint64_t> partial_pulls{0};
  std::atomic<uint64_t> unavailable_keys{0};
  std::atomic<uint64_t> hedges{0};  // requests to a second server, and pulls' parts they answered
  std::atomic<uint64_t> hedges_won{0};
  Latencies latencies;
  HedgeBudget hedge_budget;
  pid_t process = 0;  // that created this client

  Statistics statistics;

  std::mutex background_mutex;
  std::condition_variable background_wakes;
  bool puts_off_dead = false;  // whether the last probes left out dead servers; of that thread
  bool stopping = false;
  bool has_wanted_probes = false;  // see want_probe
  std::thread background;

  // Return an error in a forked child: the background thread and the connections are the parent's.
  base::Status check_process() const;
  Deadline deadline(uint32_t ms) const {
    return Deadline::in_ms(ms != 0 ? ms : options.deadline_ms);
  }
  std::shared_ptr<Host> make_host(Address address) const;
  RemoteServers seed_servers() const;
  // Return what a pull with these options does with keys that no server answers for.
  OnUnavailable on_unavailable(const PullOptions& pull) const {
    const OnUnavailable of_client =
        options.on_unavailable.value_or(url.on_unavailable.value_or(OnUnavailable::kError));
    return pull.on_unavailable.value_or(of_client);
  }
  void count_pull(const PullReport& report);

  std::mutex routing_mutex;  // guards these four
  std::shared_ptr<const Routing> routing;
  wire::ShardMap shard_map;  // of routing; version 0: none
  std::string map_peer;      // the server that sent it
  Hosts map_hosts;           // of its addresses that are not in seeds
  base::Status route_locked(wire::ShardMap map, const std::string& peer);
  // Look up the names whose addresses are old, or have a dead server, and route to the servers that
  // they have now. Return when the next lookup is due.
  uint64_t refresh_hosts(const Deadline& deadline);
  std::shared_ptr<const Routing> current_routing() {
    const std::lock_guard lock(routing_mutex);
    return routing;
  }
  // Read one server's shard map, and use it if it is newer than the current one.
  base::Status read_shard_map(RemoteServer& server, const Deadline& deadline);
  // Look for a newer map at servers outside `group`, which is unreachable or has no newer one.
  // Return whether the current map is newer than `than`.
  bool find_newer_map(const Routing& than, const RemoteServers& group, const Deadline& deadline);
  // Run `attempt` with the current map, and again with a newer one while servers reply
  // WRONG_SHARD and time is left: servers do not read a changed map at the same moment.
  base::Status by_shard_map(const Deadline& deadline,
                            const std::function<base::Status(const Routing&)>& attempt);

  // Run `attempt` on the server, with 1 of `shares` parts of the time that is left. Repeat it
  // once if the server had closed the connection while it was idle.
  static base::Status try_once(RemoteServer& server, const Deadline& deadline, size_t shares,
                               const Attempt& attempt);

  // Run `attempt` on one replica after another until it succeeds. Retry unreachable or silent
  // replicas, with backoff, until the deadline, until a newer map is found, or until `is_outdated`
  // returns true. Other errors are final once every replica that is not in backoff gave one.
  // `call` names the call in errors. With short patience ask no dead replica, and give up once all
  // of them are dead. `earlier`: an error of the call before, which explains more than a passed
  // deadline.
  base::Status try_servers(std::string_view call, const Routing& by, const RemoteServers& replicas,
                           const Deadline& deadline, const Attempt& attempt,
                           const std::function<bool()>& is_outdated = nullptr,
                           Patience patience = Patience::kUntilDeadline,
                           const base::Status& earlier = {});
  base::Status try_any(std::string_view call, const Deadline& deadline, const Attempt& attempt);
  size_t next_rotation() { return rotation.fetch_add(1, std::memory_order_relaxed); }
  // Return a number that differs from call to call; its low bits are not evenly distributed.
  uint64_t next_random() { return (next_rotation() + 1) * 0x9E3779B97F4A7C15u; }
  // Return the replicas that are not in backoff, beginning with number `first`: the good ones, then
  // those in doubt, then the dead ones, which the background thread contacts. All groups of a call
  // have one `first`: with one each, two groups of two replicas would always start with the same
  // ones.
  std::vector<RemoteServer*> awake_servers(const RemoteServers& replicas, size_t first);
  static bool are_all_dead(const RemoteServers& servers);

  // Let the background thread contact a server that a call does without, once its backoff is over.
  void want_probe(RemoteServer& server);
  // Contact the wanted servers whose backoff is over, all at the same time, and look for a newer
  // shard map if one of them does not reply. Return when the next backoff of a wanted one ends;
  // UINT64_MAX: there is none.
  uint64_t probe_servers();

  NewestAnswer newest_answer;  // later pulls return no older instance

  // Choose the instance that is requested by name from all servers (choice.h). It is empty with a
  // single server, whose own current instance counts, and while no server is known.
  // Errors: kStale when all live servers have only older rows than the client has returned, and
  // no other server comes back by the deadline.
  base::Status choose_instance(const Routing& by, const Deadline& deadline, Choice& choice);
  Choice choose_now(const Routing& by) const;
  void record_answer(const Routing& by, const std::string& instance);
  // Read the catalogue of one server, and record whether it replied or failed.
  static base::Status read_catalogue_of(RemoteServer& server, const Deadline& deadline);
  // Read the catalogues of servers that have none yet. Skip dead ones and those in backoff, and
  // wait for none longer than BackoffOptions::patience_ns.
  static void read_missing_catalogues(const Routing& by, const Deadline& deadline);
  // Read the catalogues of all servers that are not in backoff. A silent server leaves time for
  // the others and for `spare` further shares.
  static void read_catalogues(const Routing& by, const Deadline& deadline, size_t spare);
  // Return false when the client is stopping.
  bool read_catalogue_in_background(RemoteServer& server);
  bool pause_background(uint64_t until_ns, bool ends_with_probes = false);
  // Return the replicas that can serve the instance or whose catalogue is unknown; all replicas if
  // there are none. `able` holds the result when it is not `replicas`.
  static const RemoteServers& replicas_with(const RemoteServers& replicas, const Choice& choice,
                                            RemoteServers& able);

  PushNumbers push_numbers;
  base::Result<PushReport> push(PushWork work);
  base::Status push_to(RemoteServer& server, const Deadline& deadline, const PushWork& work,
                       PushReport& report, size_t& acknowledged);
  static base::Status refuse_replicas(const Routing& by, const Deadline& until,
                                      const PushWork& work);
  base::Status push_to_owner(RemoteServer& owner, const Deadline& deadline, const PushWork& work,
                             PushReport& report, size_t& acknowledged, base::Status& full);
  base::Status encode_push(const Routing& by, const Deadline& deadline, PushWork& work,
                           std::vector<std::byte>& encoded);
  base::Status push_by(const Routing& by, const Deadline& deadline, const PushWork& work,
                       PushReport& report, std::vector<uint32_t>& left, base::Status& full);

  base::Status send_hot_sets();
  // Send the hot keys of a table to the servers that own them. `instance` is empty for the current
  // one.
  base::Status send_hot_keys(std::string_view table, std::string_view instance,
                             std::span<const uint64_t> keys);
  base::Status send_hot_set(RemoteServer& server, std::string_view table, std::string_view instance,
                            std::span<const uint64_t> keys);
  void run_background();
};

// Find the table in the server's last catalogue. If it is missing there it may be new: read the
// catalogue again over `connection`.
base::Result<const CatalogueTable*> find_table(RemoteServer& server, Connection& connection,
                                               std::string_view table, const Deadline& deadline,
                                               std::shared_ptr<const Catalogue>& catalogue,
                                               std::string_view instance = {});

bool is_unreachable(base::Code code);
// Return whether the server surely has replied with this code. kResourceExhausted may mean that
// all its connections were in use.
bool is_reply(base::Code code);
// Return whether a retry on another replica cannot help: it would give the same error, or the
// client must read the map first.
bool is_final(base::Code code);
// Return the WRONG_SHARD by which a call begins again with the newest map.
base::Status map_has_changed();

}  // namespace petps::client
