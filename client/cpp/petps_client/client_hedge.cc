// Hedges: a second server is asked for keys whose server is slow (docs/decisions/0113).
#include <algorithm>
#include <optional>

#include "base/clock.h"
#include "petps_client/pull_call.h"

namespace petps::client {

namespace {

// A shorter wait is not worth a further request.
constexpr uint64_t kShortestWaitNs = 1'000'000;
// A request is very late after this many times the time after which it is late.
constexpr uint64_t kVeryLate = 4;
// Replies wait while a connection is opened.
constexpr uint64_t kLongestOpenNs = 50'000'000;
// A hedge of more requests than this would cost more than it is likely to save.
constexpr size_t kMostServers = 4;

}  // namespace

// Return when to ask other servers for the keys of this flight too; 0: never. Only the one owner of
// a group waits for a version on purpose (ask), and there nobody else can be asked.
uint64_t PullCall::hedge_at_ns(const Routing& by, const Flight& flight) const {
  if (!client_.options.hedge) return 0;
  if (has_only_owner(by, flight.share)) return 0;
  const uint64_t keys = std::min<uint64_t>(flight.share.keys, client_.options.keys_per_request);
  const uint64_t p95_ns = client_.latencies.p95_ns(keys);
  return p95_ns == 0 ? 0 : flight.begun_ns + std::max(p95_ns, kShortestWaitNs);
}

// Ask other owners for all keys of the flight. If none can be asked now, try again later.
void PullCall::hedge(const Routing& by, Flight& original, Round& round) {
  Flights hedges = hedges_of(by, original.share, original.until, original.is_very_late);
  if (hedges.empty() || !client_.hedge_budget.take(hedges.size(), original.is_very_late))
    return hedge_later(original, round);
  original.hedge_at_ns = 0;
  client_.hedges.fetch_add(hedges.size(), std::memory_order_relaxed);
  original.hedges_left = static_cast<uint32_t>(hedges.size());
  for (auto& hedge : hedges) {
    hedge->original = &original;
    if (options_.trace != nullptr) trace_attempt(hedge->share, hedge->server);
    if (const base::Status status = start(*hedge, false); !status.ok()) {
      if (options_.trace != nullptr) trace_end(hedge->share, status.code());
      if (status.code() == base::Code::kUnavailable && !hedge->leased->was_closed_while_idle())
        hedge->server.record_failure();
      return hedge_later(original, round);
    }
    hedge->until = original.until.limited(hedge->server.patience_ns());
    round.flights.push_back(std::move(hedge));
  }
}

// Set when to hedge a flight whose hedge could not be sent, or has failed.
void PullCall::hedge_later(Flight& original, Round& round) {
  drop_hedges(original, round);
  original.hedges_left = 0;
  const uint64_t waited_ns = base::monotonic_ns() - original.begun_ns;
  original.hedge_at_ns = original.begun_ns + kVeryLate * waited_ns;
  original.is_very_late = true;
}

// Return flights to other owners of all these keys, over idle connections; for very late keys also
// over new ones. Return none if an owner or a connection is missing.
PullCall::Flights PullCall::hedges_of(const Routing& by, const Share& share, const Deadline& until,
                                      bool is_very_late) {
  const uint64_t now = base::monotonic_ns();
  for (const uint32_t group : share.groups) {
    for (const uint32_t owner : by.owners[group])
      groups_.conditions[owner] = by.all[owner]->condition(now);
  }
  const std::vector<uint32_t> servers =
      spread(by.owners, share.groups, groups_.keys, candidates(by, 0, &share), UINT32_MAX,
             client_.next_random());
  if (std::find(servers.begin(), servers.end(), kNoServer) != servers.end()) return {};
  std::vector<Share> shares = make_shares(by, share.groups, servers);
  if (shares.size() > kMostServers) return {};
  Flights hedges;
  for (Share& part : shares) {
    RemoteServer& server = *by.all[part.server];
    std::optional<Lease> lease = server.lease_idle();
    if (!lease.has_value() && is_very_late) {
      auto opened = server.lease(until.limited(kLongestOpenNs), Use::kRead, Patience::kShort);
      if (opened.status().code() == base::Code::kUnavailable) server.record_failure();
      if (opened.ok()) lease.emplace(std::move(opened).value());
    }
    if (!lease.has_value()) return {};
    const Deadline start_until = until.limited(kLongestOpenNs);
    hedges.push_back(
        std::make_unique<Flight>(std::move(part), server, std::move(*lease), start_until));
  }
  return hedges;
}

// End the hedges of a flight that begins to read its own reply, or whose time is over.
void PullCall::drop_hedges(const Flight& original, Round& round) {
  if (original.hedges_left == 0) return;
  for (const auto& flight : round.flights) {
    if (flight->original != &original || flight->is_over) continue;
    if (!flight->is_answered) flight->leased->abandon(false);
    flight->is_over = true;
  }
}

// Record an answered hedge. When all hedges of its original are answered, they are the answer.
void PullCall::take_hedge(Flight& hedge, Round& round) {
  Flight& original = *hedge.original;
  hedge.is_answered = true;
  if (--original.hedges_left > 0) return;
  original.leased->abandon(true);
  original.is_over = true;
  record_latency(original);  // at least this long
  if (options_.trace != nullptr) trace_end(original.share, base::Code::kDeadlineExceeded);
  for (const auto& flight : round.flights) {
    if (flight->original != &original || flight->is_over) continue;
    commit(std::move(flight->share));
    flight->is_over = true;
  }
  client_.hedges_won.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace petps::client
