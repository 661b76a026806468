// Pulls that begin without waiting (StartedPull): their first round, as long as it goes well.
#include <algorithm>

#include "petps_client/pull_call.h"

namespace petps::client {

using base::Result;
using base::Status;

bool PullCall::start_now(const Routing& by) {
  const bool is_usual = !may_leave_out_ && options_.trace == nullptr &&
                        !options_.instance.empty() && !pulls_.empty() &&
                        client_.options.rdma == nullptr;
  const auto has_idle = [](const auto& server) { return server->has_idle(); };
  if (!is_usual || !std::any_of(by.all.begin(), by.all.end(), has_idle)) return false;
  take_choice();
  if (!find_known_catalogue(by) || !plan_tables().ok()) return false;
  find_groups(by);
  look_at_servers(by);
  Flights flights;
  for (Share& share : shares_of_round(by, 0)) {
    if (share.keys == 0) return false;  // no request, so nothing would arrive
    RemoteServer& server = *by.all[share.server];
    bool has_others = false;
    const Deadline until = time_for(by, share, has_others);
    std::optional<Lease> lease = server.lease_idle();
    if (!lease.has_value()) return false;
    auto flight = std::make_unique<Flight>(std::move(share), server, std::move(*lease), until);
    flight->catalogue = server.known_catalogue(*flight->leased);
    const bool has_names = flight->catalogue != nullptr && lists_all(*flight->catalogue) &&
                           can_serve(*flight->catalogue);
    if (!has_names) return false;
    flights.push_back(std::move(flight));
  }
  if (flights.empty()) return false;
  started_.emplace().has_asked = true;
  for (auto& flight : flights) {
    const Status status = request(*flight, has_only_owner(by, flight->share));
    const Deadline until = flight->until;
    add_flight(by, std::move(flight), until, status, *started_);
  }
  return true;
}

// Return whether all keys have their answer.
bool PullCall::is_complete(const Round& round) const {
  return round.flights.empty() && round.refusal.ok() && groups_.waiting.empty();
}

StartedPull::State PullCall::advance(const Routing& by, int file) {
  Round& round = *started_;
  const auto at = std::find_if(round.flights.begin(), round.flights.end(), [&](const auto& flight) {
    return flight->leased->poll_entry().fd == file;
  });
  if (at == round.flights.end()) return StartedPull::State::kWaiting;
  Flight& flight = **at;
  while (!flight.is_over) {
    bool is_whole = false;
    Status status = flight.leased->flush();
    if (status.ok()) status = flight.exchange->receive_now(is_whole);
    // From now on the reply is written to the caller's arrays, which a hedge would write to too.
    if (flight.leased->has_received()) flight.hedge_at_ns = 0;
    if (status.ok() && !is_whole) return StartedPull::State::kWaiting;
    // An error reply may need further requests to this server: the way that waits does them.
    if (status.ok() && flight.exchange->is_done() && !flight.exchange->error().ok())
      return StartedPull::State::kUnusual;
    take_reply(by, flight, std::move(status), round);
  }
  round.flights.erase(at);
  if (!round.flights.empty()) return StartedPull::State::kWaiting;
  return is_complete(round) ? StartedPull::State::kDone : StartedPull::State::kUnusual;
}

void PullCall::awaited(std::vector<pollfd>& entries) {
  entries.clear();
  for (const auto& flight : started_->flights) entries.push_back(flight->leased->poll_entry());
}

uint64_t PullCall::due_ns() const {
  uint64_t due = started_->flights.empty() ? 0 : UINT64_MAX;  // none: all requests have failed
  for (const auto& flight : started_->flights) {
    due = std::min(due, flight->until.at_ns);
    if (flight->hedge_at_ns != 0) due = std::min(due, flight->hedge_at_ns);
  }
  return due;
}

PullCall::~PullCall() {
  if (!started_.has_value()) return;
  for (const auto& flight : started_->flights) flight->leased->abandon(false);
}

struct StartedPull::Impl {
  Impl(Client::Impl& the_client, std::span<const TablePull> pulls, const PullOptions& options)
      : client(the_client),
        by(client.current_routing()),
        deadline(client.deadline(options.deadline_ms)),
        call(client, pulls, options, deadline) {}
  Client::Impl& client;
  const std::shared_ptr<const Routing> by;
  const Deadline deadline;
  PullCall call;
  std::vector<pollfd> entries;
};

StartedPull::StartedPull(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
StartedPull::~StartedPull() = default;

std::span<const pollfd> StartedPull::awaited() {
  impl_->call.awaited(impl_->entries);
  return impl_->entries;
}

uint64_t StartedPull::due_ns() const { return impl_->call.due_ns(); }

StartedPull::State StartedPull::advance(int file) { return impl_->call.advance(*impl_->by, file); }

Result<PullReport> StartedPull::finish() {
  PullReport report;
  Status status = impl_->call.run(*impl_->by, report);
  if (status.code() == base::Code::kWrongShard && !impl_->deadline.passed()) {
    status = impl_->client.by_shard_map(
        impl_->deadline, [&](const Routing& by) { return impl_->call.run(by, report); });
  }
  PETPS_RETURN_IF_ERROR(status);
  impl_->client.count_pull(report);
  return report;
}

std::unique_ptr<StartedPull> Forwarder::start_pull(std::span<const TablePull> pulls,
                                                   const PullOptions& options) const {
  Client::Impl& client = *client_.impl_;
  if (!client.check_process().ok()) return nullptr;
  auto impl = std::make_unique<StartedPull::Impl>(client, pulls, options);
  if (!impl->call.start_now(*impl->by)) return nullptr;
  return std::unique_ptr<StartedPull>(new StartedPull(std::move(impl)));
}

}  // namespace petps::client
