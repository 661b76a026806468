// Client::pull and pull_many: the caller's arrays, split into exchanges with one or more servers.
#include <algorithm>
#include <cstring>
#include <limits>
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

PullCall::~PullCall() = default;

Status PullCall::run(const Routing& by, PullReport& report) {
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
  return !choice_.instance.empty() && client_.choose_now(by).instance != choice_.instance;
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
  PETPS_RETURN_IF_ERROR(plan(by));
  std::vector<Share> shares = split_by_group(by);
  if (may_leave_out_) {
    PETPS_RETURN_IF_ERROR(pull_or_leave_out(by, shares));
  } else {
    if (shares.size() > 1) PETPS_RETURN_IF_ERROR(pull_all_groups(by, shares));
    for (Share& share : shares) {
      if (!share.is_done) PETPS_RETURN_IF_ERROR(pull_group(by, share));
    }
  }
  report = {};
  for (size_t i = 0; i < plans_.size(); ++i) {
    uint64_t found_count = 0;
    for (const Share& share : shares) found_count += share.found_counts[i];
    report.found += plans_[i].finish(found_count);
    report.unavailable += plans_[i].count_unavailable();
  }
  report.applied_version = UINT64_MAX;
  for (Share& share : shares) {
    if (share.is_left_out) continue;
    report.applied_version = std::min(report.applied_version, share.applied_version);
    if (report.instance.empty()) report.instance = std::move(share.instance);
  }
  if (report.applied_version == UINT64_MAX) report.applied_version = 0;  // no share has an answer
  if (report.instance.empty()) report.instance = choice_.instance;
  client_.record_answer(by, report.instance);
  return {};
}

// Find a catalogue that lists all tables of the call in the chosen instance: a known one, or else
// the one of a server that replies now. Set `was_known` to false in the second case.
Status PullCall::find_catalogue(const Routing& by, CataloguePointer& catalogue, bool& was_known) {
  const auto lists_all = [&] {
    return catalogue != nullptr &&
           std::all_of(pulls_.begin(), pulls_.end(), [&](const TablePull& pull) {
             return catalogue->find(pull.table, choice_.instance).ok();
           });
  };
  for (const auto& server : by.all) {
    catalogue = server->last_catalogue();
    if (lists_all()) return {};
  }
  was_known = false;
  const auto attempt = [&](RemoteServer& server, const Deadline& until) -> Status {
    auto leased = server.lease(until);
    if (!leased.ok()) return leased.status();
    for (const TablePull& pull : pulls_) {
      const auto entry =
          find_table(server, **leased, pull.table, until, catalogue, choice_.instance);
      if (!entry.ok()) return entry.status();
    }
    return {};
  };
  return client_.try_servers("pull", by, by.all, deadline_, attempt);
}

// Choose the instance, look up the tables' shapes and dedup the keys. With several servers the
// instance is then requested by name from each, so that no answer mixes two.
Status PullCall::plan(const Routing& by) {
  CataloguePointer& catalogue = catalogue_;
  for (int plans = 1;; ++plans) {
    PETPS_RETURN_IF_ERROR(client_.choose_instance(by, deadline_, choice_, patience()));
    bool was_known = true;
    const Status status = find_catalogue(by, catalogue, was_known);
    if (!status.ok() && status.code() != Code::kNotFound) return status;
    // A catalogue that was just read may change the choice.
    const bool is_changed =
        !was_known && by.all.size() > 1 && client_.choose_now(by).instance != choice_.instance;
    if (is_changed && plans < kMaxPlans) continue;
    PETPS_RETURN_IF_ERROR(status);
    break;
  }
  plans_ = std::vector<Plan>(pulls_.size());
  for (size_t i = 0; i < pulls_.size(); ++i) {
    const auto entry = catalogue->find(pulls_[i].table, choice_.instance);
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
    plan.dedup(options_.dedup, client_.statistics_of(pulls_[i].table).dedup);
  }
  return {};
}

std::vector<PullCall::Share> PullCall::split_by_group(const Routing& by) const {
  std::vector<Share> shares(by.groups.size());
  for (size_t group = 0; group < shares.size(); ++group) {
    shares[group].group = group;
    shares[group].found_counts.resize(plans_.size());
  }
  if (shares.size() == 1) return shares;
  for (const Plan& plan : plans_) {
    std::vector<Slice> slices = split(by, plan.keys);
    for (size_t group = 0; group < shares.size(); ++group)
      shares[group].slices.push_back(std::move(slices[group]));
  }
  std::erase_if(shares, [](const Share& share) {
    return std::all_of(share.slices.begin(), share.slices.end(),
                       [](const Slice& slice) { return slice.keys.empty(); });
  });
  return shares;
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
                                    : flight.catalogue->can_serve(choice_.instance);
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
  Connection& connection = *flight.leased;
  for (const TablePull& pull : pulls_) {
    const auto entry = find_table(flight.server, connection, pull.table, flight.until,
                                  flight.catalogue, choice_.instance);
    if (!entry.ok()) return entry.status();
  }
  PETPS_RETURN_IF_ERROR(check_instance(flight));
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
    if (flight.share.slices.empty()) {
      part.keys = plans_[i].keys;
    } else {
      part.keys = flight.share.slices[i].keys;
      part.positions = flight.share.slices[i].positions.data();
    }
  }
  const PullLimits limits{flight.leased.limits(), client_.options.keys_per_request,
                          client_.options.requests_in_flight};
  const uint32_t instance = pulls_.empty() ? 0 : flight.catalogue->instance(choice_.instance);
  flight.exchange =
      std::make_unique<PullExchange>(connection, limits, flight.parts, instance,
                                     PullVersion{options_.min_version, wait_ms(flight, may_wait)});
  return flight.exchange->begin();
}

void PullCall::finish(const Flight& flight) {
  flight.share.is_done = true;
  flight.share.applied_version = flight.exchange->applied_version();
  for (size_t i = 0; i < flight.parts.size(); ++i)
    flight.share.found_counts[i] = flight.parts[i].found_count;
  if (!flight.parts.empty()) flight.share.instance = flight.parts[0].table->table.instance;
}

// Pull from one group, one replica after another. In the first round no replica may wait for the
// version, so that one that lags does not use up the time of one that does not.
Status PullCall::pull_group(const Routing& by, Share& share) {
  RemoteServers able;
  const RemoteServers& replicas =
      Client::Impl::replicas_with(by.groups[share.group], choice_, able);
  const auto is_choice_outdated = [&] {
    if (choice_.all_agree) return false;
    // The call requests rows only from servers of the chosen instance; others may be back by now.
    if (choice_.no_server_is_live) Client::Impl::read_catalogues(by, deadline_, 1);
    return is_outdated(by);
  };
  const auto try_replicas = [&](bool may_wait) {
    return client_.try_servers(
        "pull", by, replicas, deadline_,
        [&](RemoteServer& server, const Deadline& until) {
          return pull_from(share, server, limit(until, server), may_wait);
        },
        is_choice_outdated, patience());
  };
  Status status = try_replicas(replicas.size() == 1);
  if (status.code() == Code::kStale && replicas.size() > 1 && options_.wait_ms != 0)
    status = try_replicas(true);
  return status;
}

Status PullCall::pull_from(Share& share, RemoteServer& server, const Deadline& until,
                           bool may_wait) {
  auto leased = server.lease(until, Use::kRead, patience());
  if (!leased.ok()) return leased.status();
  Flight flight(share, server, std::move(leased).value(), until);
  Status status;
  // After kNotFound the table may have another id, or the instance may have a successor. So read
  // the catalogue and retry: once, and again as long as the instance's id changes each time.
  for (int round = 0;; ++round) {
    const uint32_t before = round > 0 ? flight.catalogue->instance(choice_.instance) : 0;
    if (round > 0) {
      const auto fresh = server.read_catalogue(*flight.leased, until);
      if (!fresh.ok()) return fresh.status();
      if (round > 1 && fresh.value()->instance(choice_.instance) == before) return status;
    }
    status = start(flight, may_wait);
    const bool was_sent = flight.exchange != nullptr;
    while (status.ok() && !flight.exchange->is_done()) status = flight.exchange->receive_one(until);
    if (status.ok()) status = flight.exchange->error();
    if (status.ok()) {
      finish(flight);
      return {};
    }
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
  PullCall call(*impl_, pulls, options, deadline);
  PETPS_RETURN_IF_ERROR(
      impl_->by_shard_map(deadline, [&](const Routing& by) { return call.run(by, report); }));
  impl_->count_pull(report);
  const uint32_t every = impl_->options.hot_sample_every;
  if (every != 0 && impl_->calls.fetch_add(1, std::memory_order_relaxed) % every == 0) {
    for (const TablePull& pull : pulls) impl_->statistics_of(pull.table).hot.sample(pull.keys);
  }
  return report;
}

}  // namespace petps::client
