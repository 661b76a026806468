// Client::pull and pull_many: the caller's arrays, split into exchanges with one or more servers.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "petps_client/pull_call.h"

namespace petps::client {

using base::Code;
using base::Result;
using base::Status;

namespace {

// A call plans again when servers have switched, died or come back during the call. More plans
// than this in one call point to another error.
constexpr int kMaxPlans = 8;
// How often a call asks for all keys without an answer at the same time, each time other servers.
// After that it asks for one group after another.
constexpr int kRoundsAtOnce = 3;

// Rows of one answer have one type. Those of equal bytes would be read as something else.
Status check_same_type(const std::string& server, const CatalogueTable& one,
                       const CatalogueTable& other) {
  if (one.table.dtype == other.table.dtype && one.table.dim == other.table.dim) return {};
  const auto text = [](const Table& table) {
    return std::to_string(table.dim) + " " + std::string(codec::dtype_name(table.dtype));
  };
  return Status(Code::kFailedPrecondition,
                server + ": table '" + other.table.name + "' has rows of " + text(other.table) +
                    ", and another server's has " + text(one.table) +
                    ": create it with the same dtype and dim on all servers of the model");
}

Status check_arguments(std::span<const TablePull> pulls, OnUnavailable on_unavailable) {
  for (const TablePull& pull : pulls) {
    const std::string name = "pull from '" + std::string(pull.table) + "': ";
    if (!pull.unavailable.empty() && pull.unavailable.size() != pull.keys.size()) {
      return Status(Code::kInvalidArgument, name + "the mask of unavailable keys has " +
                                                std::to_string(pull.unavailable.size()) +
                                                " bytes for " + std::to_string(pull.keys.size()) +
                                                " keys");
    }
    if (on_unavailable == OnUnavailable::kDefault && !pull.mask.empty() &&
        pull.unavailable.empty()) {
      return Status(Code::kInvalidArgument,
                    name +
                        "with on_unavailable 'default', a mask of the keys that were found must "
                        "come with a mask of the keys that are unavailable (TablePull.unavailable; "
                        "in Python unavailable=, or pull_answer): without it, a key that was not "
                        "asked for looks like a missing one");
    }
    if (!pull.mask.empty() && pull.mask.size() != pull.keys.size()) {
      return Status(Code::kInvalidArgument, name + "the mask has " +
                                                std::to_string(pull.mask.size()) + " bytes for " +
                                                std::to_string(pull.keys.size()) + " keys");
    }
    if (pull.keys.size() > std::numeric_limits<uint32_t>::max()) {
      return Status(Code::kInvalidArgument, name + "more than 4,294,967,295 keys in one call");
    }
    if (pull.form == Form::kFloat32 &&
        reinterpret_cast<uintptr_t>(pull.out.data()) % alignof(float) != 0) {
      return Status(Code::kInvalidArgument,
                    name + "the array of float32 is not aligned to 4 bytes");
    }
  }
  return {};
}

Status check_size(const TablePull& pull, const PullPart& part) {
  const size_t wanted = pull.keys.size() * part.out_row_bytes();
  if (pull.out.size() == wanted) return {};
  return Status(Code::kInvalidArgument, "pull from '" + std::string(pull.table) +
                                            "': the array has " + std::to_string(pull.out.size()) +
                                            " bytes; " + std::to_string(pull.keys.size()) +
                                            " rows of " + std::to_string(part.out_row_bytes()) +
                                            " bytes (dim " + std::to_string(part.table->table.dim) +
                                            ") need " + std::to_string(wanted));
}

bool wants_dedup(Dedup option, DedupEstimate& estimate, const PullPart& part) {
  if (option != Dedup::kWhenItPays) return option == Dedup::kAlways;
  return estimate.pays(part.keys.size(), part.table->table.row_bytes);
}

}  // namespace

void PullCall::Plan::dedup(Dedup option, DedupEstimate& estimate) {
  if (keys.size() < 2 || !wants_dedup(option, estimate, part)) return;
  distinct.build(keys);
  estimate.record(keys.size(), distinct.keys().size());
  if (distinct.keys().size() == keys.size()) return;
  is_deduped = true;
  if (mask == nullptr) {
    own_mask.resize(keys.size());
    mask = own_mask.data();
  }
  keys = distinct.keys();
}

// Copy the row and the mask of every distinct key to all positions of the key. Return the number
// of positions found.
uint64_t PullCall::Plan::finish(uint64_t found_count) {
  if (!is_deduped) return found_count;
  const std::span<const uint32_t> positions = distinct.positions();
  spread(positions, part.out_row_bytes(), pull->out.data());
  for (size_t i = unavailable == nullptr ? 0 : positions.size(); i-- > 0;)
    unavailable[i] = unavailable[positions[i]];
  found_count = 0;
  for (size_t i = positions.size(); i-- > 0;) {
    mask[i] = mask[positions[i]];
    found_count += mask[i];
  }
  return found_count;
}

PullCall::PullCall(Client::Impl& client, std::span<const TablePull> pulls,
                   const PullOptions& options, const Deadline& deadline)
    : client_(client),
      pulls_(pulls),
      options_(options),
      deadline_(deadline),
      wait_until_ns_(base::monotonic_ns() + uint64_t{options.wait_ms} * 1'000'000),
      may_leave_out_(client.on_unavailable(options) == OnUnavailable::kDefault) {}

Status PullCall::run(const Routing& by, PullReport& report) {
  if (options_.trace != nullptr) {
    // Parts of an older shard map have ended, and the groups of this one have parts of their own.
    trace_failure(*options_.trace, Status(Code::kWrongShard, ""));
    first_traced_part_ = options_.trace->parts.size();
  }
  std::vector<std::shared_ptr<const Catalogue>> before;
  if (options_.min_version != 0) {
    for (const auto& server : by.all) before.push_back(server->last_catalogue());
  }
  bool was_stale = false;
  for (int plans = 1;; ++plans) {
    const Status status = run_once(by, report);
    // A server may have dropped the requested instance, or may have frozen it at an older version.
    // The alias may resolve to another instance by now.
    const bool is_dropped = status.code() == Code::kNotFound && !choice_.instance.empty();
    const bool is_stale = status.code() == Code::kStale && options_.min_version != 0 &&
                          !std::exchange(was_stale, true);
    if (is_dropped || is_stale) Client::Impl::read_catalogues(by, deadline_, 1);
    if (is_stale && is_switched(by, before)) continue;
    // Servers may also have switched, died or come back since the instance was chosen.
    const bool may_be_outdated =
        is_dropped || status.code() == Code::kStale || is_unreachable(status.code());
    if (!may_be_outdated || plans == kMaxPlans || deadline_.passed() || !is_outdated(by))
      return status;
  }
}

bool PullCall::is_outdated(const Routing& by) const {
  if (!options_.instance.empty() || choice_.instance.empty()) return false;
  return client_.choose_now(by).instance != choice_.instance;
}

bool PullCall::can_serve(const Catalogue& catalogue) const {
  return options_.instance.empty() ? catalogue.can_serve(choice_.instance)
                                   : catalogue.instance(choice_.instance) != 0;
}

// Return whether the alias resolves to another instance than in `before` at any server. Another
// thread may have read the newer catalogue.
bool PullCall::is_switched(const Routing& by,
                           const std::vector<std::shared_ptr<const Catalogue>>& before) {
  for (size_t i = 0; i < by.all.size(); ++i) {
    const auto last = by.all[i]->last_catalogue();
    if (last == nullptr) continue;
    if (before[i] == nullptr || before[i]->instance_name() != last->instance_name()) return true;
  }
  return false;
}

Status PullCall::run_once(const Routing& by, PullReport& report) {
  bool has_asked = true;
  int round = 0;
  if (std::optional<Round> first = std::exchange(started_, std::nullopt)) {
    PETPS_RETURN_IF_ERROR(finish_round(by, *first, has_asked));
    round = 1;
  } else {
    PETPS_RETURN_IF_ERROR(plan(by));
    find_groups(by);
    if (options_.trace != nullptr) trace_servers(by);
  }
  for (; round < kRoundsAtOnce && has_asked && !groups_.waiting.empty(); ++round) {
    if (round > 0 && deadline_.passed()) break;
    PETPS_RETURN_IF_ERROR(pull_at_once(by, round, has_asked));
  }
  while (!groups_.waiting.empty()) {
    const uint32_t group = groups_.waiting.front();
    look_at_servers(by);
    if (may_leave_out_ && are_owners_dead(by, group)) {
      leave_out_dead(by);
      continue;
    }
    const Status failure = failure_of(by, group);
    const bool is_late = may_leave_out_ && deadline_.passed() && is_unreachable(failure.code());
    const Status status = is_late ? failure : pull_group(by, group);
    if (status.ok()) continue;
    // Owners that lag may be those of an older map, and may not know the newer one either. A silent
    // server must not delay the answer for long.
    const RemoteServers& owners = by.groups[group];
    if (status.code() == Code::kStale && by.version != 0 &&
        client_.find_newer_map(by, owners, deadline_.limited(owners[0]->patience_ns())))
      return map_has_changed();
    if (may_leave_out_) look_at_servers(by);
    if (may_leave_out_ && are_owners_dead(by, group)) continue;  // all that do not lack its keys
    if (!may_leave_out_ || !is_unreachable(status.code())) return status;
    give_up(by, group, status);
  }
  if (may_leave_out_) PETPS_RETURN_IF_ERROR(check_any_answers(by));
  report_to(by, report);
  return {};
}

void PullCall::report_to(const Routing& by, PullReport& report) {
  report = {};
  for (size_t i = 0; i < plans_.size(); ++i) {
    uint64_t found_count = 0;
    for (const Share& share : groups_.answers) found_count += share.found_counts[i];
    report.found += plans_[i].finish(found_count);
    report.unavailable += plans_[i].count_unavailable();
  }
  report.applied_version = UINT64_MAX;
  for (Share& share : groups_.answers) {
    report.applied_version = std::min(report.applied_version, share.applied_version);
    if (report.instance.empty()) report.instance = std::move(share.instance);
  }
  if (report.applied_version == UINT64_MAX) report.applied_version = 0;  // no server has answered
  if (report.instance.empty()) report.instance = choice_.instance;
  if (options_.instance.empty()) client_.record_answer(by, report.instance);
}

bool PullCall::lists_all(const Catalogue& catalogue) const {
  return std::all_of(pulls_.begin(), pulls_.end(), [&](const TablePull& pull) {
    return catalogue.find(pull.table, choice_.instance).ok();
  });
}

// Find a known catalogue that lists all tables of the call in the chosen instance.
bool PullCall::find_known_catalogue(const Routing& by) {
  return std::any_of(by.all.begin(), by.all.end(), [&](const auto& server) {
    catalogue_ = server->last_catalogue();
    return catalogue_ != nullptr && lists_all(*catalogue_);
  });
}

// The same, or else take the catalogue of a server that replies now. Set `was_known` to false in
// the second case.
Status PullCall::find_catalogue(const Routing& by, bool& was_known) {
  was_known = find_known_catalogue(by);
  if (was_known) return {};
  const auto attempt = [&](RemoteServer& server, const Deadline& until) -> Status {
    auto leased = server.lease(until);
    if (!leased.ok()) return leased.status();
    for (const TablePull& pull : pulls_) {
      const auto entry =
          find_table(server, **leased, pull.table, until, catalogue_, choice_.instance);
      if (!entry.ok()) return entry.status();
    }
    return {};
  };
  return client_.try_servers("pull", by, by.all, deadline_, attempt);
}

// Choose the instance, look up the tables' shapes and dedup the keys. With several servers the
// instance is then requested by name from each, so that no answer mixes two.
Status PullCall::plan(const Routing& by) {
  for (int plans = 1;; ++plans) {
    if (options_.instance.empty()) {
      PETPS_RETURN_IF_ERROR(client_.choose_instance(by, deadline_, choice_));
    } else {
      take_choice();
    }
    bool was_known = true;
    const Status status = find_catalogue(by, was_known);
    if (!status.ok() && status.code() != Code::kNotFound) return status;
    // A catalogue that was just read may change the choice.
    const bool is_changed = !was_known && options_.instance.empty() && by.all.size() > 1 &&
                            client_.choose_now(by).instance != choice_.instance;
    if (is_changed && plans < kMaxPlans) continue;
    PETPS_RETURN_IF_ERROR(status);
    break;
  }
  return plan_tables();
}

// Choose the instance that the caller names.
void PullCall::take_choice() {
  choice_ = {};
  choice_.instance = options_.instance;
  choice_.all_agree = false;  // a server may lack it
}

Status PullCall::plan_tables() {
  plans_ = std::vector<Plan>(pulls_.size());
  for (size_t i = 0; i < pulls_.size(); ++i) {
    const auto entry = catalogue_->find(pulls_[i].table, choice_.instance);
    if (!entry.ok()) return entry.status();
    Plan& plan = plans_[i];
    plan.part.table = entry.value();
    plan.part.form = pulls_[i].form;
    plan.part.keys = pulls_[i].keys;
    PETPS_RETURN_IF_ERROR(check_size(pulls_[i], plan.part));
    plan.pull = &pulls_[i];
    plan.keys = pulls_[i].keys;
    plan.mask = pulls_[i].mask.data();
    plan.unavailable = pulls_[i].unavailable.data();
    std::fill(pulls_[i].unavailable.begin(), pulls_[i].unavailable.end(), uint8_t{0});
    plan.dedup(options_.dedup, client_.statistics.of(pulls_[i].table)->dedup);
  }
  return {};
}

// Return how many keys a request of the share has at most. A part of a pull has some keys more or
// less than its server's fair part, so a quarter more makes no second request.
uint32_t PullCall::keys_per_request(const Share& share) const {
  const uint64_t wanted = client_.options.keys_per_request;
  if (share.slices.empty()) return static_cast<uint32_t>(wanted);
  const uint64_t most = wanted + wanted / 4;
  const uint64_t requests = std::max<uint64_t>((share.keys + most - 1) / most, 1);
  return static_cast<uint32_t>(std::max(wanted, (share.keys + requests - 1) / requests));
}

// Return how long the server may wait for the version that the call requires.
uint32_t PullCall::wait_ms(const Flight& flight, bool may_wait) const {
  if (!may_wait || options_.min_version == 0 || !flight.leased.has(wire::kFeaturePullWait))
    return 0;
  const uint64_t now = base::monotonic_ns();
  const uint64_t left = flight.until.left_ns();
  // Leave time for STALE to arrive before the deadline: it is a reply, so the connection stays
  // usable.
  const uint64_t limit = left - std::min<uint64_t>(left / 4, 500'000'000);
  const uint64_t wanted = wait_until_ns_ > now ? wait_until_ns_ - now : 0;
  return static_cast<uint32_t>(std::min(limit, wanted) / 1'000'000);
}

// Check that this server can serve the instance of the call. Its address may lead to another pool
// by now, or to a pool that has not switched yet.
Status PullCall::check_instance(Flight& flight) const {
  if (pulls_.empty()) return {};
  const auto is_served = [&] {
    return choice_.instance.empty() ? client_.newest_answer.allows(*flight.catalogue)
                                    : can_serve(*flight.catalogue);
  };
  if (is_served()) return {};
  auto fresh = flight.server.read_catalogue(*flight.leased, flight.until);
  if (!fresh.ok()) return fresh.status();
  flight.catalogue = fresh.value();
  if (is_served()) return {};
  const std::string newer =
      choice_.instance.empty() ? client_.newest_answer.instance() : choice_.instance;
  return Status(Code::kStale, flight.server.name() + ": it serves '" +
                                  flight.catalogue->instance_name() + "', which is older than '" +
                                  newer + "': it has not switched yet");
}

// Find the tables in the server's own catalogue, because ids differ between servers. Then send the
// first requests.
Status PullCall::start(Flight& flight, bool may_wait) {
  for (const TablePull& pull : pulls_) {
    const auto entry = find_table(flight.server, *flight.leased, pull.table, flight.until,
                                  flight.catalogue, choice_.instance);
    if (!entry.ok()) return entry.status();
  }
  PETPS_RETURN_IF_ERROR(check_instance(flight));
  return request(flight, may_wait);
}

// Send the first requests, with the ids of the flight's catalogue.
Status PullCall::request(Flight& flight, bool may_wait) {
  flight.parts.assign(pulls_.size(), {});
  for (size_t i = 0; i < pulls_.size(); ++i) {  // all from one catalogue, so of one instance
    PullPart& part = flight.parts[i];
    const auto entry = flight.catalogue->find(pulls_[i].table, choice_.instance);
    if (!entry.ok()) return entry.status();
    part.table = entry.value();
    part.form = pulls_[i].form;
    part.out = pulls_[i].out.data();
    part.mask = plans_[i].mask;
    PETPS_RETURN_IF_ERROR(check_size(pulls_[i], part));
    PETPS_RETURN_IF_ERROR(
        check_same_type(flight.server.name(), *plans_[i].part.table, *entry.value()));
    if (flight.share.slices.empty()) {
      part.keys = plans_[i].keys;
    } else {
      part.keys = flight.share.slices[i].keys;
      part.positions = flight.share.slices[i].positions.data();
    }
  }
  flight.begun_ns = base::monotonic_ns();
  const PullLimits limits{flight.leased.limits(), keys_per_request(flight.share),
                          client_.options.requests_in_flight};
  const uint32_t instance = pulls_.empty() ? 0 : flight.catalogue->instance(choice_.instance);
  flight.exchange =
      std::make_unique<PullExchange>(*flight.leased, limits, flight.parts, instance,
                                     PullVersion{options_.min_version, wait_ms(flight, may_wait)});
  if (options_.trace != nullptr) trace_request(flight);
  return flight.exchange->begin();
}

void PullCall::finish(Flight& flight) {
  Share& share = flight.share;
  share.applied_version = flight.exchange->applied_version();
  share.found_counts.clear();
  for (const PullPart& part : flight.parts) share.found_counts.push_back(part.found_count);
  if (!flight.parts.empty()) share.instance = flight.parts[0].table->table.instance;
  if (options_.trace != nullptr) trace_end(share, Code::kOk);
}

// Return whether every owner that a call would ask has answered with an error.
bool PullCall::have_all_refused(const Routing& by, uint32_t group) const {
  const std::vector<uint32_t>& owners = by.owners[group];
  const auto is_asked = [&](uint32_t owner) {
    return groups_.conditions[owner].is_awake && groups_.is_able[owner];
  };
  return std::any_of(owners.begin(), owners.end(), is_asked) &&
         std::all_of(owners.begin(), owners.end(), [&](uint32_t owner) {
           return groups_.has_refused[owner] || !is_asked(owner);
         });
}

// Return whether servers that could not serve the choice, by their last names, can by now: then
// replicas_with() returns more. They are looked at if all others are dead.
bool PullCall::others_can_serve(const RemoteServers& owners, const RemoteServers& able) const {
  if (able.size() == owners.size() || !Client::Impl::are_all_dead(able)) return false;
  bool found = false;
  for (const auto& server : owners) {
    const bool is_able = std::find(able.begin(), able.end(), server) != able.end();
    if (is_able || server->is_dead() || server->backoff_until_ns() > base::monotonic_ns()) continue;
    (void)Client::Impl::read_catalogue_of(*server, deadline_.limited(server->patience_ns()));
    const auto catalogue = server->last_catalogue();
    found = found || (catalogue != nullptr && catalogue->can_serve(choice_.instance));
  }
  return found;
}

Status PullCall::pull_group(const Routing& by, uint32_t group) {
  Status status = failure_of(by, group);
  RemoteServers owners = by.groups[group];
  erase_lacking(by, group, owners);
  RemoteServers able;
  (void)others_can_serve(owners, Client::Impl::replicas_with(owners, choice_, able));
  bool is_again = !owners.empty();
  while (is_again) {
    const RemoteServers& replicas = Client::Impl::replicas_with(owners, choice_, able);
    is_again = false;
    const size_t lacking = groups_.lacking.size();
    const std::vector<bool> lacked_some = groups_.lacks_some;
    // A server that lacks some keys may have those of the group, and others may have these.
    const auto knows_more = [&] {
      return groups_.lacking.size() != lacking || groups_.lacks_some != lacked_some;
    };
    const auto is_choice_outdated = [&] {
      if (knows_more()) return true;
      if (choice_.all_agree && groups_.lacking.empty()) return false;
      // The call requests rows only from servers of the chosen instance; others may be back by now.
      if (choice_.no_server_is_live) Client::Impl::read_catalogues(by, deadline_, 1);
      is_again = others_can_serve(owners, replicas);
      return is_again || is_outdated(by);
    };
    status = pull_replicas(by, group, replicas, is_choice_outdated, status);
    if (status.ok()) break;
    erase_lacking(by, group, owners);
    if (owners.empty()) break;
    if (knows_more() && !have_all_refused(by, group)) status = no_reply(owners);
    is_again = (is_again || knows_more()) && !deadline_.passed();
  }
  return status;
}

// Erase the owners that lack keys of the group.
void PullCall::erase_lacking(const Routing& by, uint32_t group, RemoteServers& owners) const {
  std::erase_if(owners, [&](const auto& server) {
    const auto at = std::find(by.all.begin(), by.all.end(), server);
    return lacks(group, static_cast<uint32_t>(at - by.all.begin()));
  });
}

// In the first round no replica may wait for the version, so that one that lags does not use up the
// time of one that does not. `status`: why the keys have no answer yet.
Status PullCall::pull_replicas(const Routing& by, uint32_t group, const RemoteServers& replicas,
                               const std::function<bool()>& is_outdated, Status status) {
  const auto try_replicas = [&](bool may_wait) {
    return client_.try_servers(
        "pull", by, replicas, deadline_,
        [&](RemoteServer& server, const Deadline& until) {
          return pull_from(by, server, limit(until, server), may_wait);
        },
        is_outdated, patience(), status);
  };
  if (!have_all_refused(by, group)) status = try_replicas(replicas.size() == 1);
  if (status.code() != Code::kStale || replicas.size() == 1 || options_.wait_ms == 0) return status;
  uint64_t asked_ns = base::monotonic_ns();
  status = try_replicas(true);
  // A server that was in backoff has not been asked, and may have the version. A probe may have
  // begun its next backoff since then.
  while (status.code() == Code::kStale && wait_for_backoff(replicas, asked_ns)) {
    asked_ns = base::monotonic_ns();
    status = try_replicas(false);
    if (asked_ns >= wait_until_ns_) break;
  }
  return status;
}

// Wait until the first backoff of these servers that ends after `since_ns` has ended. Return false
// if there is none, or too late.
bool PullCall::wait_for_backoff(const RemoteServers& replicas, uint64_t since_ns) const {
  uint64_t first = UINT64_MAX;
  for (const auto& server : replicas) {
    const uint64_t until = server->backoff_until_ns();
    if (until > since_ns) first = std::min(first, until);
  }
  if (first >= deadline_.at_ns) return false;
  const uint64_t now = base::monotonic_ns();
  if (first > now) std::this_thread::sleep_for(std::chrono::nanoseconds(first - now));
  return true;
}

Status PullCall::pull_from(const Routing& by, RemoteServer& server, const Deadline& until,
                           bool may_wait) {
  Share share = rest_for(by, server);
  if (options_.trace != nullptr) trace_attempt(share, server);
  auto leased = server.lease(until, Use::kRead, patience());
  Status status = leased.status();
  if (leased.ok()) {
    Flight flight(std::move(share), server, std::move(leased).value(), until);
    status = exchange(flight, may_wait);
    if (status.ok()) {
      finish(flight);
      commit(std::move(flight.share));
      return {};
    }
    share = std::move(flight.share);
  }
  (void)record_lack(by, share, status);
  if (options_.trace != nullptr) trace_end(share, status.code());
  return status;
}

// Run one flight, which may have begun, to its end. After kNotFound the table may have another id,
// or the instance may have a successor. So read the catalogue and retry: once, and again as long as
// the instance's id changes each time.
Status PullCall::exchange(Flight& flight, bool may_wait) {
  Status status;
  for (int round = 0;; ++round) {
    const bool has_begun = flight.exchange != nullptr;
    const uint32_t before = round > 0 ? flight.catalogue->instance(choice_.instance) : 0;
    if (round > 0) {
      const auto fresh = flight.server.read_catalogue(*flight.leased, flight.until);
      if (!fresh.ok()) return fresh.status();
      if (round > 1 && fresh.value()->instance(choice_.instance) == before) return status;
    }
    if (!has_begun) status = start(flight, may_wait);
    const bool was_sent = flight.exchange != nullptr;
    while (status.ok() && !flight.exchange->is_done())
      status = flight.exchange->receive_one(flight.until);
    if (status.ok()) status = flight.exchange->error();
    if (status.ok()) return status;
    if (status.code() != Code::kNotFound || !was_sent || flight.leased->is_broken()) return status;
    flight.exchange.reset();
  }
}

Result<PullReport> Client::pull(std::string_view table, std::span<const uint64_t> keys,
                                std::span<float> out, std::span<uint8_t> mask,
                                const PullOptions& options) {
  const TablePull pull{table, keys, std::as_writable_bytes(out), mask, Form::kFloat32};
  return pull_many({&pull, 1}, options);
}

Result<PullReport> Client::pull_many(std::span<const TablePull> pulls, const PullOptions& options) {
  PETPS_RETURN_IF_ERROR(impl_->check_process());
  PETPS_RETURN_IF_ERROR(check_arguments(pulls, impl_->on_unavailable(options)));
  PullReport report;
  const Deadline deadline = impl_->deadline(options.deadline_ms);
  if (options.trace != nullptr) options.trace->parts.clear();
  PullCall call(*impl_, pulls, options, deadline);
  const Status status =
      impl_->by_shard_map(deadline, [&](const Routing& by) { return call.run(by, report); });
  if (options.trace != nullptr) PullCall::trace_failure(*options.trace, status);
  PETPS_RETURN_IF_ERROR(status);
  impl_->count_pull(report);
  const uint32_t every = impl_->options.hot_sample_every;
  if (every != 0 && impl_->calls.fetch_add(1, std::memory_order_relaxed) % every == 0) {
    for (const TablePull& pull : pulls) impl_->statistics.of(pull.table)->hot.sample(pull.keys);
  }
  return report;
}

}  // namespace petps::client
