// Pulls from several servers at the same time.
#include <algorithm>

#include "base/clock.h"
#include "petps_client/pull_call.h"

namespace petps::client {

using base::Code;
using base::Status;

namespace {

// Of a call's time, for owners that count as dead when the others are asked.
constexpr uint64_t kKeptForDeadNs = 500'000'000;

}  // namespace

// Ask for all keys without an answer, from one owner of each. The keys of an owner that fails have
// no answer afterwards. A final error, such as WRONG_SHARD, fails the call. Set `has_asked` to
// whether any server was asked.
Status PullCall::pull_at_once(const Routing& by, int number, bool& has_asked) {
  look_at_servers(by);
  if (may_leave_out_) leave_out_dead(by);
  Round round;
  for (Share& share : shares_of_round(by, number)) ask(by, std::move(share), round);
  return finish_round(by, round, has_asked);
}

Status PullCall::finish_round(const Routing& by, Round& round, bool& has_asked) {
  while (!round.flights.empty()) {
    wait_for_any(round.flights);
    read_replies(by, round);
  }
  // Reading the map needs a connection, and there may be only one. No flight holds one any more.
  if (round.wrong_shard != nullptr) (void)client_.read_shard_map(*round.wrong_shard, deadline_);
  has_asked = round.has_asked;
  return round.refusal;
}

void PullCall::record_error(const Routing& by, const Share& share, const Status& status,
                            Round& round) {
  RemoteServer& server = *by.all[share.server];
  if (status.code() == Code::kUnavailable) server.record_failure();
  if (is_reply(status.code())) server.record_reply();
  if (!record_lack(by, share, status) && !is_unreachable(status.code()))
    groups_.has_refused[share.server] = true;
  groups_.failures[share.server] = status;
  if (options_.trace != nullptr) trace_end(share, status.code());
  // The only owner of a partition has already waited for the version, so its STALE is final.
  const bool is_stale = status.code() == Code::kStale && has_only_owner(by, share);
  if (!is_final(status.code()) && !is_stale) return;
  if (round.refusal.ok()) round.refusal = status;
  if (status.code() == Code::kWrongShard) round.wrong_shard = &server;
}

// Return the time that the server of this share has. Set `has_others` to whether each of its groups
// has another owner that has not failed.
Deadline PullCall::time_for(const Routing& by, const Share& share, bool& has_others) const {
  // Leave time for the other owners of each group, and a little for dead ones: they may be back by
  // then.
  size_t owners = SIZE_MAX;
  bool has_dead = false;
  has_others = true;
  for (const uint32_t group : share.groups) {
    size_t able = 0;
    size_t perhaps_able = 0;  // what the client knows of these owners' instances may be old
    bool has_other = false;
    for (const uint32_t owner : by.owners[group]) {
      const RemoteServer::Condition& condition = groups_.conditions[owner];
      if (!groups_.is_able[owner]) {
        if (!condition.is_dead) perhaps_able = 1;
        continue;
      }
      if (condition.is_dead) {
        has_dead = has_dead || owner != share.server;
        continue;
      }
      ++able;
      const bool has_failed = !condition.is_awake || !groups_.failures[owner].ok();
      has_other = has_other || (owner != share.server && !has_failed);
    }
    owners = std::min(owners, std::max<size_t>(able + perhaps_able, 1));
    has_others = has_others && has_other;
  }
  const uint64_t left_ns = deadline_.left_ns();
  const uint64_t kept_ns = has_dead ? std::min(left_ns / 4, kKeptForDeadNs) : 0;
  return deadline_.share(owners).limited(left_ns - kept_ns);
}

void PullCall::ask(const Routing& by, Share share, Round& round) {
  round.has_asked = true;
  RemoteServer& server = *by.all[share.server];
  bool has_others = false;
  const Deadline until = time_for(by, share, has_others);
  if (options_.trace != nullptr) trace_attempt(share, server);
  // No hedge helps while a connection is opened and its names are read.
  auto leased = server.lease(until, Use::kRead, patience(), has_others);
  if (!leased.ok()) return record_error(by, share, leased.status(), round);
  const Deadline start_until = has_others ? until.limited(server.patience_ns()) : until;
  auto flight = std::make_unique<Flight>(std::move(share), server, std::move(leased).value(),
                                         limit(start_until, server));
  const Status status = start(*flight, has_only_owner(by, flight->share));
  add_flight(by, std::move(flight), until, status, round);
}

// Add a flight whose first requests were sent with this status. Its replies have until `until`.
void PullCall::add_flight(const Routing& by, std::unique_ptr<Flight> flight, const Deadline& until,
                          const Status& status, Round& round) {
  flight->until = limit(until, flight->server);
  if (status.ok()) {
    client_.hedge_budget.record_request();
    flight->hedge_at_ns = hedge_at_ns(by, *flight);
    round.flights.push_back(std::move(flight));
  } else if (!flight->leased->was_closed_while_idle()) {
    record_error(by, flight->share, status, round);
  }
}

// Wait until a reply begins to arrive on one flight, or until the earliest of their deadlines and
// hedges. Sends queued bytes.
void PullCall::wait_for_any(const Flights& flights) {
  if (flights.size() == 1 && flights[0]->hedge_at_ns == 0) {
    flights[0]->is_ready = true;  // reading its reply waits for it
    return;
  }
  std::vector<pollfd> entries;
  uint64_t until_ns = UINT64_MAX;
  bool has_bytes = false;
  for (const auto& flight : flights) {
    entries.push_back(flight->leased->poll_entry());
    if (flight->is_answered) {  // a hedge that waits for its siblings
      entries.back().fd = -1;
      continue;
    }
    until_ns = std::min(until_ns, flight->until.at_ns);
    if (flight->hedge_at_ns != 0) until_ns = std::min(until_ns, flight->hedge_at_ns);
    has_bytes = has_bytes || flight->leased->has_read_ahead() || flight->exchange->is_done();
  }
  const uint64_t now = base::monotonic_ns();
  const timespec limit = timespec_of(has_bytes || now >= until_ns ? 0 : until_ns - now);
  const int count = ppoll(entries.data(), entries.size(), &limit, nullptr);
  for (size_t i = 0; i < flights.size(); ++i) {
    if (flights[i]->is_answered) continue;
    const short events = count > 0 ? entries[i].revents : short{0};
    flights[i]->is_ready =
        flights[i]->leased->has_arrived(events) || flights[i]->exchange->is_done();
    // A connection that fails here reports the error when its reply is read.
    if ((events & POLLOUT) != 0) (void)flights[i]->leased->flush();
  }
}

void PullCall::read_replies(const Routing& by, Round& round) {
  for (const auto& flight : round.flights) {
    if (flight->is_over || flight->is_answered) continue;
    const bool is_readable = flight->leased->has_read_ahead() || flight->is_ready;
    if (is_readable || flight->until.passed()) read_reply(by, *flight, round);
  }
  const uint64_t now = base::monotonic_ns();
  for (size_t i = 0; i < round.flights.size(); ++i) {  // a hedge adds flights
    Flight& flight = *round.flights[i];
    if (!flight.is_over && flight.hedge_at_ns != 0 && flight.hedge_at_ns <= now)
      hedge(by, flight, round);
  }
  std::erase_if(round.flights,
                [](const std::unique_ptr<Flight>& flight) { return flight->is_over; });
}

// Read one reply of a flight, and record how the flight ended if it did.
void PullCall::read_reply(const Routing& by, Flight& flight, Round& round) {
  flight.hedge_at_ns = 0;
  drop_hedges(flight, round);
  Status status;
  if (!flight.exchange->is_done()) status = flight.exchange->receive_one(flight.until);
  take_reply(by, flight, status, round);
}

void PullCall::take_reply(const Routing& by, Flight& flight, Status status, Round& round) {
  if (status.ok() && flight.exchange->error().ok()) record_latency(flight);
  if (status.ok() && !flight.exchange->is_done()) {
    if (may_leave_out_) flight.until = limit(deadline_, flight.server);
    return;
  }
  if (status.ok()) status = flight.exchange->error();
  if (status.code() == Code::kNotFound && flight.original == nullptr)
    status = exchange(flight, has_only_owner(by, flight.share));  // rare: other flights wait
  if (status.ok()) {
    flight.server.record_reply();
    finish(flight);
    if (flight.original != nullptr) return take_hedge(flight, round);
    commit(std::move(flight.share));
  } else if (flight.original != nullptr) {
    // The original goes on, so this is no error of the call.
    if (status.code() == Code::kUnavailable && !flight.leased->was_closed_while_idle())
      flight.server.record_failure();
    if (options_.trace != nullptr) trace_end(flight.share, status.code());
    flight.is_over = true;
    return hedge_later(*flight.original, round);
  } else if (!flight.leased->was_closed_while_idle()) {  // otherwise the next round retries it
    record_error(by, flight.share, status, round);
  }
  flight.is_over = true;
}

void PullCall::record_latency(Flight& flight) {
  if (std::exchange(flight.has_reply, true)) return;
  const uint64_t latency_ns = base::monotonic_ns() - flight.begun_ns;
  const uint64_t keys = std::min<uint64_t>(flight.share.keys, client_.options.keys_per_request);
  flight.server.record_latency(keys, latency_ns);
  client_.latencies.record(keys, latency_ns);
}

}  // namespace petps::client
