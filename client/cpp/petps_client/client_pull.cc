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
constexpr int kMostPlans = 8;

Status check_arguments(std::span<const TablePull> pulls) {
  for (const TablePull& pull : pulls) {
    const std::string name = "pull from '" + std::string(pull.table) + "': ";
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

bool wants_dedup(Dedup wish, DedupGauge& gauge, const PullPart& part) {
  if (wish != Dedup::kWhenItPays) return wish == Dedup::kAlways;
  return gauge.pays(part.keys.size(), part.table->table.row_bytes);
}

}  // namespace

// One table of a call, with what dedup needs to give every position its row.
struct PullCall::Plan {
  const TablePull* pull = nullptr;
  std::span<const uint64_t> keys;  // distinct after dedup
  uint8_t* mask = nullptr;
  Distinct distinct;
  bool deduped = false;
  std::vector<uint8_t> own_mask;  // to count found keys when the caller has no mask

  void dedup(Dedup wish, DedupGauge& gauge, const PullPart& part);
  uint64_t finish(size_t row_bytes, uint64_t found);
};

void PullCall::Plan::dedup(Dedup wish, DedupGauge& gauge, const PullPart& part) {
  if (keys.size() < 2 || !wants_dedup(wish, gauge, part)) return;
  distinct.build(keys);
  gauge.saw(keys.size(), distinct.keys().size());
  if (distinct.keys().size() == keys.size()) return;
  deduped = true;
  if (mask == nullptr) {
    own_mask.resize(keys.size());
    mask = own_mask.data();
  }
  keys = distinct.keys();
}

// Copy the row and the mask of every distinct key to all positions of the key. Return the number
// of positions found.
uint64_t PullCall::Plan::finish(size_t row_bytes, uint64_t found) {
  if (!deduped) return found;
  const std::span<const uint32_t> positions = distinct.positions();
  spread(positions, row_bytes, pull->out.data());
  found = 0;
  for (size_t i = positions.size(); i-- > 0;) {
    mask[i] = mask[positions[i]];
    found += mask[i];
  }
  return found;
}

// The part of a call for one group of servers, and its result.
struct PullCall::Share {
  size_t group = 0;
  std::vector<Slice> slices;  // by table of the call; empty: all keys, in order
  bool done = false;
  uint64_t applied_version = 0;
  std::vector<uint64_t> found;  // by table of the call
  std::string instance;
};

// One share in flight at one server.
struct PullCall::Flight {
  Flight(Share& of, RemoteServer& at, Lease lease, const Deadline& deadline)
      : share(of), server(at), leased(std::move(lease)), until(deadline) {}
  Share& share;
  RemoteServer& server;
  Lease leased;
  Deadline until;
  std::shared_ptr<const Catalogue> catalogue;
  std::vector<PullPart> parts;
  std::unique_ptr<PullExchange> exchange;
  bool ready = false;  // bytes can be read, or the exchange is done
};

PullCall::PullCall(Client::Impl& client, std::span<const TablePull> pulls,
                   const PullOptions& options, const Deadline& deadline)
    : client_(client),
      pulls_(pulls),
      options_(options),
      deadline_(deadline),
      wait_until_ns_(base::monotonic_ns() + uint64_t{options.wait_ms} * 1'000'000) {}

PullCall::~PullCall() = default;

Status PullCall::run(const Routing& by, PullReport& report) {
  std::vector<std::shared_ptr<const Catalogue>> before;
  if (options_.min_version != 0) {
    for (const auto& server : by.all) before.push_back(server->last_catalogue());
  }
  bool was_stale = false;
  for (int plans = 1;; ++plans) {
    const Status status = run_once(by, report);
    const std::string asked = choice_.instance;
    // The requested instance was dropped at some server, or is frozen at an older version. The
    // alias may resolve to another one by now.
    const bool dropped = status.code() == Code::kNotFound && !asked.empty();
    const bool stale = status.code() == Code::kStale && options_.min_version != 0 &&
                       !std::exchange(was_stale, true);
    if (dropped || stale) Client::Impl::read_catalogues(by, deadline_, 1);
    if (stale && is_switched(by, before)) continue;
    // Servers may also have switched, died or come back since the instance was chosen.
    const bool may_be_outdated =
        dropped || status.code() == Code::kStale || is_unreachable(status.code());
    if (!may_be_outdated || plans == kMostPlans || deadline_.passed() || !is_outdated(by))
      return status;
  }
}

bool PullCall::is_outdated(const Routing& by) const {
  return !choice_.instance.empty() && client_.choose_now(by).instance != choice_.instance;
}

// Return whether the alias now resolves to another instance than `before` at some server. Any
// thread may have read that.
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
  std::vector<Share> shares = share_out(by);
  if (shares.size() > 1) PETPS_RETURN_IF_ERROR(ask_together(by, shares));
  for (Share& share : shares) {
    if (!share.done) PETPS_RETURN_IF_ERROR(ask_alone(by, share));
  }
  report = {};
  for (size_t i = 0; i < plans_.size(); ++i) {
    uint64_t found = 0;
    for (const Share& share : shares) found += share.found[i];
    report.found += plans_[i].finish(row_bytes_[i], found);
  }
  bool first = true;
  for (Share& share : shares) {
    report.applied_version =
        first ? share.applied_version : std::min(report.applied_version, share.applied_version);
    first = false;
    if (report.instance.empty()) report.instance = std::move(share.instance);
  }
  client_.note_answer(by, report.instance);
  return {};
}

// Find a catalogue with the shapes of all tables in the chosen instance: a known one, or else
// (`was_known` becomes false) the one of a server that replies now.
Status PullCall::find_shapes(const Routing& by, CataloguePointer& catalogue, bool& was_known) {
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
      const auto found =
          find_table(server, **leased, pull.table, until, catalogue, choice_.instance);
      if (!found.ok()) return found.status();
    }
    return {};
  };
  return client_.try_servers("pull", by, by.all, deadline_, attempt);
}

// Choose the instance, look up the tables' shapes and dedup the keys. With several servers the
// instance is then requested by name from each, so that no answer mixes two.
Status PullCall::plan(const Routing& by) {
  CataloguePointer catalogue;
  for (int plans = 1;; ++plans) {
    PETPS_RETURN_IF_ERROR(client_.choose_instance(by, deadline_, choice_));
    bool was_known = true;
    const Status found = find_shapes(by, catalogue, was_known);
    if (!found.ok() && found.code() != Code::kNotFound) return found;
    // The catalogue just read is the first one or a newer one, and may change the choice.
    const bool changed =
        !was_known && by.all.size() > 1 && client_.choose_now(by).instance != choice_.instance;
    if (changed && plans < kMostPlans) continue;
    PETPS_RETURN_IF_ERROR(found);
    break;
  }
  plans_ = std::vector<Plan>(pulls_.size());
  row_bytes_.assign(pulls_.size(), 0);
  for (size_t i = 0; i < pulls_.size(); ++i) {
    const auto found = catalogue->find(pulls_[i].table, choice_.instance);
    if (!found.ok()) return found.status();
    PullPart part;
    part.table = found.value();
    part.form = pulls_[i].form;
    part.keys = pulls_[i].keys;
    PETPS_RETURN_IF_ERROR(check_size(pulls_[i], part));
    row_bytes_[i] = part.out_row_bytes();
    plans_[i].pull = &pulls_[i];
    plans_[i].keys = pulls_[i].keys;
    plans_[i].mask = pulls_[i].mask.data();
    plans_[i].dedup(options_.dedup, client_.memory(pulls_[i].table).dedup, part);
  }
  return {};
}

std::vector<PullCall::Share> PullCall::share_out(const Routing& by) const {
  std::vector<Share> shares(by.groups.size());
  for (size_t group = 0; group < shares.size(); ++group) {
    shares[group].group = group;
    shares[group].found.resize(plans_.size());
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

uint32_t PullCall::wait_ms(const Flight& flight, bool wait) const {
  if (!wait || options_.min_version == 0 || !flight.leased.has(wire::kFeaturePullWait)) return 0;
  const uint64_t now = base::monotonic_ns();
  const uint64_t left = flight.until.left_ns();
  // Leave time for STALE to arrive before the deadline: it is a reply, so the
  // connection stays usable.
  const uint64_t most = left - std::min<uint64_t>(left / 4, 500'000'000);
  const uint64_t wished = wait_until_ns_ > now ? wait_until_ns_ - now : 0;
  return static_cast<uint32_t>(std::min(most, wished) / 1'000'000);
}

// Check that this server may serve the call. Its address may lead to another pool by now, or to a
// pool that has not switched yet.
Status PullCall::check_meaning(Flight& flight) const {
  if (pulls_.empty()) return {};
  const auto fits = [&] {
    return choice_.instance.empty() ? client_.answered.allows(*flight.catalogue)
                                    : flight.catalogue->reaches(choice_.instance);
  };
  if (fits()) return {};
  auto fresh = flight.server.read_catalogue(*flight.leased, flight.until);
  if (!fresh.ok()) return fresh.status();
  flight.catalogue = fresh.value();
  if (fits()) return {};
  const std::string newer =
      choice_.instance.empty() ? client_.answered.instance() : choice_.instance;
  return Status(Code::kStale, flight.server.name() + ": it means '" +
                                  flight.catalogue->instance_name() + "', which is older than '" +
                                  newer + "': it has not switched yet");
}

// Find the tables in the server's own catalogue (ids differ between servers) and
// send the first requests.
Status PullCall::start(Flight& flight, bool wait) {
  Connection& connection = *flight.leased;
  for (const TablePull& pull : pulls_) {
    const auto found = find_table(flight.server, connection, pull.table, flight.until,
                                  flight.catalogue, choice_.instance);
    if (!found.ok()) return found.status();
  }
  PETPS_RETURN_IF_ERROR(check_meaning(flight));
  flight.parts.assign(pulls_.size(), {});
  for (size_t i = 0; i < pulls_.size(); ++i) {  // all from one catalogue, so of one instance
    PullPart& part = flight.parts[i];
    const auto found = flight.catalogue->find(pulls_[i].table, choice_.instance);
    if (!found.ok()) return found.status();
    part.table = found.value();
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
                                     PullVersion{options_.min_version, wait_ms(flight, wait)});
  return flight.exchange->begin();
}

void PullCall::finish(const Flight& flight) {
  flight.share.done = true;
  flight.share.applied_version = flight.exchange->applied_version();
  for (size_t i = 0; i < flight.parts.size(); ++i) flight.share.found[i] = flight.parts[i].found;
  if (!flight.parts.empty()) flight.share.instance = flight.parts[0].table->table.instance;
}

// Ask one group, one replica after another. A replica that lags must not use up the time of one
// that does not, so the first round over all replicas lets none of them wait for the version.
Status PullCall::ask_alone(const Routing& by, Share& share) {
  RemoteServers some;
  const RemoteServers& replicas =
      Client::Impl::replicas_with(by.groups[share.group], choice_, some);
  const auto is_moot = [&] {
    if (choice_.all_agree) return false;
    // The call requests rows only from servers of the chosen instance; others may be back by now.
    if (choice_.nobody_answers) Client::Impl::read_catalogues(by, deadline_, 1);
    return is_outdated(by);
  };
  const auto ask = [&](bool wait) {
    return client_.try_servers(
        "pull", by, replicas, deadline_,
        [&](RemoteServer& server, const Deadline& until) {
          return ask_one(share, server, until, wait);
        },
        is_moot);
  };
  Status status = ask(replicas.size() == 1);
  if (status.code() == Code::kStale && replicas.size() > 1 && options_.wait_ms != 0)
    status = ask(true);
  return status;
}

Status PullCall::ask_one(Share& share, RemoteServer& server, const Deadline& until, bool wait) {
  auto leased = server.lease(until);
  if (!leased.ok()) return leased.status();
  Flight flight(share, server, std::move(leased).value(), until);
  Status status;
  // kNotFound after a request: the table may have come back under another id, or the instance was
  // dropped and has a successor. Read the catalogue and retry once, and again as long as the
  // instance's id changes each time.
  for (int round = 0;; ++round) {
    const uint32_t before = round > 0 ? flight.catalogue->instance(choice_.instance) : 0;
    if (round > 0) {
      const auto fresh = server.read_catalogue(*flight.leased, until);
      if (!fresh.ok()) return fresh.status();
      if (round > 1 && fresh.value()->instance(choice_.instance) == before) return status;
    }
    status = start(flight, wait);
    const bool asked = flight.exchange != nullptr;
    while (status.ok() && !flight.exchange->is_done()) status = flight.exchange->receive_one(until);
    if (status.ok()) status = flight.exchange->error();
    if (status.ok()) {
      finish(flight);
      return {};
    }
    if (status.code() != Code::kNotFound || !asked || flight.leased->broken()) return status;
    flight.exchange.reset();
  }
}

// Ask all groups at once, one replica of each. Shares that are not done afterwards are retried
// alone. A final error, such as WRONG_SHARD, fails the call.
Status PullCall::ask_together(const Routing& by, std::vector<Share>& shares) {
  std::vector<std::unique_ptr<Flight>> flights;
  const size_t rotation = client_.next_rotation();
  Status refusal;
  RemoteServer* wrong_shard = nullptr;
  const auto fail = [&](const Share& share, RemoteServer& server, const Status& status) {
    if (status.code() == Code::kUnavailable) server.failed();
    // A single replica has already waited for the version, so its STALE is final.
    const bool stale = status.code() == Code::kStale && by.groups[share.group].size() == 1;
    if (!is_final(status.code()) && !stale) return;
    if (refusal.ok()) refusal = status;
    if (status.code() == Code::kWrongShard) wrong_shard = &server;
  };
  for (Share& share : shares) {
    RemoteServers some;
    const RemoteServers& replicas =
        Client::Impl::replicas_with(by.groups[share.group], choice_, some);
    const std::vector<RemoteServer*> awake = Client::Impl::awake_servers(replicas, rotation);
    if (awake.empty()) continue;
    const Deadline until = deadline_.share(awake.size());
    auto leased = awake[0]->lease(until);
    if (!leased.ok()) {
      fail(share, *awake[0], leased.status());
      continue;
    }
    auto flight = std::make_unique<Flight>(share, *awake[0], std::move(leased).value(), until);
    const Status status = start(*flight, replicas.size() == 1);
    if (!status.ok()) {
      if (flight->leased->was_closed_while_idle()) continue;
      fail(share, *awake[0], status);
    } else {
      flights.push_back(std::move(flight));
    }
  }
  while (!flights.empty()) {
    wait_for_any(flights);
    std::erase_if(flights, [&](const std::unique_ptr<Flight>& flight) {
      const bool readable = flight->leased->has_read_ahead() || flight->ready;
      if (!readable && !flight->until.passed()) return false;
      Status status;
      if (!flight->exchange->is_done()) status = flight->exchange->receive_one(flight->until);
      if (status.ok() && !flight->exchange->is_done()) return false;
      if (status.ok()) status = flight->exchange->error();
      if (status.ok()) {
        flight->server.answered();
        finish(*flight);
      } else if (!flight->leased->was_closed_while_idle()) {  // otherwise the share is retried
        fail(flight->share, flight->server, status);
      }
      return true;
    });
  }
  // Reading the map needs a connection, and there may be only one: no flight holds one any more.
  if (wrong_shard != nullptr) (void)client_.read_shard_map(*wrong_shard, deadline_);
  return refusal;
}

// Wait until a reply begins to arrive on one flight, or until the earliest of their deadlines.
// Sends queued bytes.
void PullCall::wait_for_any(std::span<const std::unique_ptr<Flight>> flights) {
  std::vector<pollfd> wishes;
  uint64_t until_ns = UINT64_MAX;
  bool at_hand = false;
  for (const auto& flight : flights) {
    wishes.push_back(flight->leased->wish());
    until_ns = std::min(until_ns, flight->until.at_ns);
    at_hand = at_hand || flight->leased->has_read_ahead() || flight->exchange->is_done();
  }
  const uint64_t now = base::monotonic_ns();
  const uint64_t left = at_hand || now >= until_ns ? 0 : until_ns - now;
  const timespec limit{static_cast<time_t>(left / 1'000'000'000),
                       static_cast<long>(left % 1'000'000'000)};
  const int count = ppoll(wishes.data(), wishes.size(), &limit, nullptr);
  for (size_t i = 0; i < flights.size(); ++i) {
    const short events = count > 0 ? wishes[i].revents : short{0};
    flights[i]->ready = flights[i]->leased->has_arrived(events) || flights[i]->exchange->is_done();
    // A connection that fails here reports the error when its reply is read.
    if ((events & POLLOUT) != 0) (void)flights[i]->leased->flush();
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
  PETPS_RETURN_IF_ERROR(check_arguments(pulls));
  PullReport report;
  const Deadline deadline = impl_->deadline(options.deadline_ms);
  PullCall call(*impl_, pulls, options, deadline);
  PETPS_RETURN_IF_ERROR(
      impl_->by_shard_map(deadline, [&](const Routing& by) { return call.run(by, report); }));
  const uint32_t every = impl_->options.hot_sample_every;
  if (every != 0 && impl_->calls.fetch_add(1, std::memory_order_relaxed) % every == 0) {
    for (const TablePull& pull : pulls) impl_->memory(pull.table).hot.sample(pull.keys);
  }
  return report;
}

}  // namespace petps::client
