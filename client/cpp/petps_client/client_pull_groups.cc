// A pull from several groups at once, and what a pull leaves out when a group does not answer.
#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "petps_client/pull_call.h"

namespace petps::client {

using base::Code;
using base::Status;

namespace {

// How often a call that may leave out keys asks all groups without an answer at the same time, each
// time at other replicas. After that it asks one group after another.
constexpr int kRoundsAtOnce = 3;

}  // namespace

// Pull from all groups at once, from one replica of each. The caller retries shares that are not
// done afterwards. A final error, such as WRONG_SHARD, fails the call.
Status PullCall::pull_all_groups(const Routing& by, std::vector<Share>& shares) {
  std::vector<std::unique_ptr<Flight>> flights;
  const size_t rotation = client_.next_rotation();
  Status refusal;
  RemoteServer* wrong_shard = nullptr;
  const auto record_error = [&](Share& share, RemoteServer& server, const Status& status) {
    if (status.code() == Code::kUnavailable) server.record_failure();
    share.failure = status;
    // A single replica has already waited for the version, so its STALE is final.
    const bool is_stale = status.code() == Code::kStale && by.groups[share.group].size() == 1;
    if (!is_final(status.code()) && !is_stale) return;
    if (refusal.ok()) refusal = status;
    if (status.code() == Code::kWrongShard) wrong_shard = &server;
  };
  for (Share& share : shares) {
    if (share.is_done) continue;
    RemoteServers able;
    const RemoteServers& replicas =
        Client::Impl::replicas_with(by.groups[share.group], choice_, able);
    const std::vector<RemoteServer*> awake = client_.awake_servers(replicas, rotation);
    if (awake.empty() || (may_leave_out_ && awake[0]->is_dead())) continue;
    const Deadline until = deadline_.share(awake.size());
    auto leased = awake[0]->lease(until, Use::kRead, patience());
    if (!leased.ok()) {
      record_error(share, *awake[0], leased.status());
      continue;
    }
    auto flight = std::make_unique<Flight>(share, *awake[0], std::move(leased).value(),
                                           limit(until, *awake[0]));
    const Status status = start(*flight, replicas.size() == 1);
    if (status.ok()) {
      flights.push_back(std::move(flight));
    } else if (!flight->leased->was_closed_while_idle()) {
      record_error(share, *awake[0], status);
    }
  }
  while (!flights.empty()) {
    wait_for_any(flights);
    std::erase_if(flights, [&](const std::unique_ptr<Flight>& flight) {
      const bool is_readable = flight->leased->has_read_ahead() || flight->is_ready;
      if (!is_readable && !flight->until.passed()) return false;
      Status status;
      if (!flight->exchange->is_done()) status = flight->exchange->receive_one(flight->until);
      if (status.ok() && !flight->exchange->is_done()) {
        if (may_leave_out_) flight->until = limit(deadline_, flight->server);
        return false;
      }
      if (status.ok()) status = flight->exchange->error();
      if (status.ok()) {
        flight->server.record_reply();
        finish(*flight);
      } else if (!flight->leased->was_closed_while_idle()) {  // otherwise the caller retries it
        record_error(flight->share, flight->server, status);
      }
      return true;
    });
  }
  // Reading the map needs a connection, and there may be only one. No flight holds one any more.
  if (wrong_shard != nullptr) (void)client_.read_shard_map(*wrong_shard, deadline_);
  return refusal;
}

// Wait until a reply begins to arrive on one flight, or until the earliest of their deadlines.
// Sends queued bytes.
void PullCall::wait_for_any(std::span<const std::unique_ptr<Flight>> flights) {
  std::vector<pollfd> entries;
  uint64_t until_ns = UINT64_MAX;
  bool has_bytes = false;
  for (const auto& flight : flights) {
    entries.push_back(flight->leased->poll_entry());
    until_ns = std::min(until_ns, flight->until.at_ns);
    has_bytes = has_bytes || flight->leased->has_read_ahead() || flight->exchange->is_done();
  }
  const uint64_t now = base::monotonic_ns();
  const timespec limit = timespec_of(has_bytes || now >= until_ns ? 0 : until_ns - now);
  const int count = ppoll(entries.data(), entries.size(), &limit, nullptr);
  for (size_t i = 0; i < flights.size(); ++i) {
    const short events = count > 0 ? entries[i].revents : short{0};
    flights[i]->is_ready =
        flights[i]->leased->has_arrived(events) || flights[i]->exchange->is_done();
    // A connection that fails here reports the error when its reply is read.
    if ((events & POLLOUT) != 0) (void)flights[i]->leased->flush();
  }
}

// ---- Calls that may leave out keys (docs/decisions/0107)

// Return the time that the call waits for the server's next reply.
Deadline PullCall::limit(const Deadline& deadline, const RemoteServer& server) const {
  if (!may_leave_out_) return deadline;
  const uint64_t now = base::monotonic_ns();
  const bool may_wait = options_.min_version != 0 && wait_until_ns_ > now;
  return deadline.limited(server.patience_ns() + (may_wait ? wait_until_ns_ - now : 0));
}

void PullCall::Plan::leave_out(const std::vector<uint32_t>* positions) {
  if (unavailable == nullptr) {
    own_unavailable.resize(pull->keys.size());
    unavailable = own_unavailable.data();
  }
  const size_t row_bytes = part.out_row_bytes();
  const size_t count = positions == nullptr ? keys.size() : positions->size();
  for (size_t i = 0; i < count; ++i) {
    const size_t position = positions == nullptr ? i : (*positions)[i];
    std::memcpy(pull->out.data() + position * row_bytes, part.default_row(), row_bytes);
    if (mask != nullptr) mask[position] = 0;
    unavailable[position] = 1;
  }
}

uint64_t PullCall::Plan::count_unavailable() const {
  if (unavailable == nullptr) return 0;
  return static_cast<uint64_t>(std::count(unavailable, unavailable + pull->keys.size(), 1));
}

void PullCall::leave_out(Share& share, Status failure) {
  for (size_t i = 0; i < plans_.size(); ++i)
    plans_[i].leave_out(share.slices.empty() ? nullptr : &share.slices[i].positions);
  share.failure = std::move(failure);
  share.is_left_out = true;
  share.is_done = true;
}

// Leave out the keys of a group whose servers are all dead. The background thread contacts them.
bool PullCall::leave_out_if_dead(const Routing& by, Share& share) {
  RemoteServers able;
  const RemoteServers& replicas =
      Client::Impl::replicas_with(by.groups[share.group], choice_, able);
  if (!Client::Impl::are_all_dead(replicas)) return false;
  for (const auto& server : replicas) client_.want_probe(*server);
  if (share.failure.ok()) {
    std::string names;
    for (const auto& server : replicas)
      names.append(names.empty() ? "" : ", ").append(server->name());
    share.failure = Status(Code::kUnavailable, "pull: no reply since the last failure of " + names);
  }
  leave_out(share, share.failure);
  return true;
}

Status PullCall::pull_or_leave_out(const Routing& by, std::vector<Share>& shares) {
  for (int round = 0; round < kRoundsAtOnce; ++round) {
    for (Share& share : shares) {
      if (!share.is_done) leave_out_if_dead(by, share);
    }
    const bool is_done =
        std::all_of(shares.begin(), shares.end(), [](const Share& share) { return share.is_done; });
    if (is_done || (round > 0 && deadline_.passed())) break;
    PETPS_RETURN_IF_ERROR(pull_all_groups(by, shares));
  }
  for (Share& share : shares) {
    if (share.is_done || leave_out_if_dead(by, share)) continue;
    const bool is_late = deadline_.passed() && is_unreachable(share.failure.code());
    const Status status = is_late ? share.failure : pull_group(by, share);
    if (status.ok()) continue;
    if (!is_unreachable(status.code())) return status;
    for (const auto& server : by.groups[share.group]) client_.want_probe(*server);
    leave_out(share, status);
  }
  return check_any_answers(by, shares);
}

// Return the error of a call when every group is unavailable: it failed now, or it is dead.
Status PullCall::check_any_answers(const Routing& by, const std::vector<Share>& shares) const {
  const Share* failed = nullptr;
  std::vector<bool> is_left_out(by.groups.size());
  for (const Share& share : shares) {
    if (!share.is_left_out) continue;
    is_left_out[share.group] = true;
    if (failed == nullptr) failed = &share;
  }
  if (failed == nullptr) return {};
  for (size_t group = 0; group < by.groups.size(); ++group) {
    if (!is_left_out[group] && !Client::Impl::are_all_dead(by.groups[group])) return {};
  }
  return Status(failed->failure.code(),
                "no server of the model answers: " + std::string(failed->failure.message()));
}

void Client::Impl::count_pull(const PullReport& report) {
  pulls.fetch_add(1, std::memory_order_relaxed);
  if (report.unavailable == 0) return;
  partial_pulls.fetch_add(1, std::memory_order_relaxed);
  unavailable_keys.fetch_add(report.unavailable, std::memory_order_relaxed);
}

}  // namespace petps::client
