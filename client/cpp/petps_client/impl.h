// What a Client is made of; included by its own .cc files only.
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
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "petps_client/choice.h"
#include "petps_client/client.h"
#include "petps_client/dedup.h"
#include "petps_client/endpoint.h"
#include "petps_client/hot_keys.h"
#include "petps_client/pull.h"
#include "petps_client/routing.h"

namespace petps::client {

// What the client remembers of a table, whichever server answered.
struct TableMemory {
  explicit TableMemory(size_t hot_keys) : hot(hot_keys) {}
  DedupGauge dedup;
  HotKeys hot;
};

// Numbers the pushes of one client, so that servers can refuse one that was given up and comes late.
class PushNumbers {
 public:
  PushNumbers();
  uint64_t begin();
  void end(uint64_t number);
  wire::PushOrder order(uint64_t number) const;  // as it is now

 private:
  const uint64_t client_;
  mutable std::mutex mutex_;  // guards the two below
  uint64_t next_ = 1;
  std::set<uint64_t> under_way_;  // calls that have not ended
};

// One call's number, for as long as the call lasts.
struct PushNumber {
  explicit PushNumber(PushNumbers& of) : numbers(of), value(of.begin()) {}
  ~PushNumber() { numbers.end(value); }
  PushNumber(PushNumber&&) = delete;
  PushNumbers& numbers;
  const uint64_t value;
};

// One kind of rows for all three verbs of push.
struct PushWork {
  std::string_view table;
  std::span<const uint64_t> keys;
  std::span<const float> floats;      // encoded to the table's dtype, or
  std::span<const std::byte> stored;  // as given, or
  bool deletes = false;               // neither
  uint32_t dim = 0;                   // of floats
  uint64_t number = 0;                // of the call: see PushNumbers
  // For several groups: all of them take it so, by the name of its instance.
  std::optional<Table> encoded_as;
  PushOptions options;
};

struct Client::Impl {
  using Attempt = std::function<base::Status(Endpoint&, const Deadline&)>;

  Url url;
  Options options;
  Endpoints seeds;  // of the URL; fixed after connect
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

  std::mutex routing_mutex;  // guards routing
  std::shared_ptr<const Routing> routing;
  std::shared_ptr<const Routing> current_routing() {
    const std::lock_guard lock(routing_mutex);
    return routing;
  }
  // Asks one server for its shard map, and takes it if it is newer than the one in use.
  base::Status read_shard_map(Endpoint& endpoint, const Deadline& deadline);
  // The same of servers outside `group`, which does not answer or has no news. True: `than` is no longer the newest.
  bool find_newer_map(const Routing& than, const Endpoints& group, const Deadline& deadline);
  // Runs `attempt` by the current map, and again by a newer one as long as servers answer WRONG_SHARD and time is left:
  // servers do not read a changed map at the same moment.
  base::Status by_shard_map(const Deadline& deadline,
                            const std::function<base::Status(const Routing&)>& attempt);

  // Runs `attempt` on one of the replicas after another until it succeeds. Unreachable or silent ones rest and are tried again
  // until the deadline, or until a newer map is found, or until `is_moot`: nobody should be asked for this any more. Other errors
  // are final once every replica gave one.
  base::Status try_endpoints(std::string_view what, const Routing& by, const Endpoints& replicas,
                             const Deadline& deadline, const Attempt& attempt,
                             const std::function<bool()>& is_moot = nullptr);
  base::Status try_any(std::string_view what, const Deadline& deadline, const Attempt& attempt);
  size_t next_turn() { return rotation.fetch_add(1, std::memory_order_relaxed); }
  // From the one whose turn it is, those in doubt last. The groups of one call share a turn, or with two of each the same ones would always be first.
  static std::vector<Endpoint*> awake_endpoints(const Endpoints& of, size_t turn);

  Answered answered;  // what pulls were answered with: no later one is of something older

  // The instance that all servers are asked for by name (choice.h). Empty with one server in all,
  // where its own meaning counts, and while nothing is known of any.
  // Errors: kStale when the servers that answer only have older rows than were answered before, and
  // no other comes back by the deadline.
  base::Status choose_instance(const Routing& by, const Deadline& deadline, Choice& choice);
  Choice choose_now(const Routing& by) const;
  void note_answer(const Routing& by, const std::string& instance);
  // Reads a catalogue where none is known yet; asks no server that rests.
  static void read_missing_catalogues(const Routing& by, const Deadline& deadline);
  // Of all servers that do not rest; a silent one leaves time for the others, and for `spare` parts more.
  static void read_catalogues(const Routing& by, const Deadline& deadline, size_t spare);
  // In the background: also finds out which servers are gone. False: the client is stopping.
  bool read_catalogue_in_background(Endpoint& endpoint);
  bool pause_background(uint64_t until_ns);
  // Those that can be asked for the instance, or of which nothing is known; all, when there are none.
  // `some` holds them where they are not all.
  static const Endpoints& replicas_with(const Endpoints& replicas, const Choice& choice,
                                        Endpoints& some);

  PushNumbers push_numbers;
  base::Result<PushReport> push(const PushWork& work);
  base::Status push_to(Endpoint& endpoint, const Deadline& deadline, const PushWork& work,
                       PushReport& report, size_t& acknowledged);
  static base::Status refuse_replicas(const Routing& by, const PushWork& work);
  base::Status push_to_owner(Endpoint& owner, const Deadline& deadline, const PushWork& work,
                             PushReport& report, size_t& acknowledged);
  base::Status encode_push(const Routing& by, const Deadline& deadline, PushWork& work,
                           std::vector<std::byte>& encoded);
  base::Status push_by(const Routing& by, const Deadline& deadline, const PushWork& work,
                       PushReport& report, std::vector<uint32_t>& left);

  base::Status control(const wire::ControlRequest& request, uint32_t deadline_ms);
  base::Status send_hot_sets();
  base::Status send_hot_set(Endpoint& endpoint, const std::string& table,
                            std::span<const uint64_t> keys);
  void run_background();
};

// Finds the table, over the lease's connection if need be: a table that is not in the last catalogue may be new.
base::Result<const CatalogueTable*> find_table(Endpoint& endpoint, Connection& connection,
                                               std::string_view table, const Deadline& deadline,
                                               std::shared_ptr<const Catalogue>& catalogue,
                                               std::string_view instance = {});

bool is_unreachable(base::Code code);
// Another replica would say the same, or the map has to be read first.
bool is_final(base::Code code);

}  // namespace petps::client
