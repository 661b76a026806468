// Retries: the choice of the next server, by replica or by a newer shard map.
#include <algorithm>
#include <thread>

#include "base/clock.h"
#include "petps_client/impl.h"

namespace petps::client {

using base::Code;
using base::Status;

namespace {

// Pauses between checks for a newer map. Servers check theirs every second.
constexpr uint64_t kFirstMapPauseNs = 2'000'000;
constexpr uint64_t kLongestMapPauseNs = 100'000'000;
// Pause between two rounds over servers when none is in backoff.
constexpr uint64_t kShortestPauseNs = 1'000'000;
// Limit of servers that one check reads a map from. Each gets a share of the time that is left.
constexpr size_t kServersPerMapCheck = 3;

uint64_t earliest_backoff_end_ns(const RemoteServers& servers) {
  uint64_t earliest = UINT64_MAX;
  for (const auto& server : servers) earliest = std::min(earliest, server->backoff_until_ns());
  return earliest;
}

}  // namespace

bool is_unreachable(Code code) {
  return code == Code::kUnavailable || code == Code::kDeadlineExceeded;
}

bool is_final(Code code) {
  return code == Code::kInvalidArgument || code == Code::kPermissionDenied ||
         code == Code::kUnauthenticated || code == Code::kWrongShard;
}

Status Client::Impl::read_shard_map(RemoteServer& server, const Deadline& deadline) {
  const auto map = server.read_shard_map(deadline);
  if (!map.ok()) return map.status();
  const std::lock_guard lock(routing_mutex);
  if (map.value().version <= routing->version) return {};
  const RemoteServers known[] = {seeds, routing->all};
  auto next = route_by_map(map.value(), server.name(), known,
                           [this](Address address) { return make_server(std::move(address)); });
  if (!next.ok()) return next.status();
  routing = next.value();
  return {};
}

bool Client::Impl::find_newer_map(const Routing& than, const RemoteServers& group,
                                  const Deadline& deadline) {
  RemoteServers others = seeds;
  others.insert(others.end(), than.all.begin(), than.all.end());
  std::erase_if(others, [&](const auto& server) {
    return std::find(group.begin(), group.end(), server) != group.end();
  });
  size_t tried = 0;
  for (RemoteServer* server : awake_servers(others, next_rotation())) {
    if (current_routing()->version > than.version || tried++ == kServersPerMapCheck ||
        deadline.passed())
      break;
    const Status status = read_shard_map(*server, deadline.share(kServersPerMapCheck + 1));
    if (status.code() == Code::kUnavailable) server->record_failure();
  }
  return current_routing()->version > than.version;
}

Status Client::Impl::by_shard_map(const Deadline& deadline,
                                  const std::function<Status(const Routing&)>& attempt) {
  for (uint64_t pause_ns = kFirstMapPauseNs;;
       pause_ns = std::min(pause_ns * 2, kLongestMapPauseNs)) {
    const auto by = current_routing();
    const Status status = attempt(*by);
    if (status.code() != Code::kWrongShard) return status;
    if (current_routing()->version > by->version) {
      if (deadline.passed()) return status;
      continue;
    }
    if (deadline.left_ns() <= pause_ns) return status;
    std::this_thread::sleep_for(std::chrono::nanoseconds(pause_ns));
    find_newer_map(*by, {}, deadline);
  }
}

std::vector<RemoteServer*> Client::Impl::awake_servers(const RemoteServers& replicas,
                                                       size_t rotation) {
  const uint64_t now = base::monotonic_ns();
  std::vector<RemoteServer*> awake;
  for (size_t i = 0; i < replicas.size(); ++i) {
    RemoteServer* server = replicas[(rotation + i) % replicas.size()].get();
    if (server->backoff_until_ns() <= now) awake.push_back(server);
  }
  if (awake.size() > 1) {
    std::stable_partition(awake.begin(), awake.end(),
                          [](const RemoteServer* server) { return !server->is_in_doubt(); });
  }
  return awake;
}

Status Client::Impl::try_any(std::string_view call, const Deadline& deadline,
                             const Attempt& attempt) {
  return by_shard_map(deadline, [&](const Routing& by) {
    return try_servers(call, by, by.all, deadline, attempt);
  });
}

Status Client::Impl::try_once(RemoteServer& server, const Deadline& deadline, size_t shares,
                              const Attempt& attempt) {
  const uint64_t idle_losses = server.idle_losses();
  Status status = attempt(server, deadline.share(shares));
  // The server closed an idle connection. That is no failure, and a read can be repeated.
  if (status.code() == Code::kUnavailable && server.idle_losses() != idle_losses)
    status = attempt(server, deadline.share(shares));
  return status;
}

Status Client::Impl::try_servers(std::string_view call, const Routing& by,
                                 const RemoteServers& replicas, const Deadline& deadline,
                                 const Attempt& attempt, const std::function<bool()>& is_outdated) {
  Status last(Code::kUnavailable, "every server is in backoff after a failure");
  // The failure before the last one. If the deadline cuts the last attempt short, this one explains
  // more.
  std::string before;
  Status refusal;  // of a reachable server: explains more than another one's being unreachable
  size_t tried = 0;
  for (;;) {
    const std::vector<RemoteServer*> awake = awake_servers(replicas, next_rotation());
    size_t refused = 0;
    for (size_t i = 0; i < awake.size() && !deadline.passed(); ++i) {
      // A silent server must leave time for its replicas.
      const Status status = try_once(*awake[i], deadline, awake.size() - i, attempt);
      ++tried;
      if (status.ok() || !is_unreachable(status.code())) awake[i]->record_reply();
      if (status.code() == Code::kWrongShard) (void)read_shard_map(*awake[i], deadline);
      if (status.ok() || is_final(status.code())) return status;
      if (is_unreachable(status.code())) {
        // A timeout is a failure only after a long silence: see record_timeout_locked.
        if (status.code() == Code::kUnavailable) awake[i]->record_failure();
        if (last.message() != status.message()) before = last.message();
        last = status;
      } else {
        ++refused;
        refusal = status;
      }
    }
    if (refused > 0 && refused == awake.size()) return refusal;
    if (is_outdated != nullptr && is_outdated()) return refusal.ok() ? last : refusal;
    if (by.version != 0 && refused == 0 && find_newer_map(by, replicas, deadline))
      return Status(Code::kWrongShard, "the shard map has changed");
    const uint64_t wake = earliest_backoff_end_ns(replicas);
    if (wake >= deadline.at_ns || deadline.passed()) {
      if (!refusal.ok()) return refusal;
      std::string text(call);
      text += ": gave up after " + std::to_string(deadline.given_ms) +
              " ms; last: " + std::string(last.message());
      if (!before.empty() && tried > 1) text += "; before: " + before;
      return Status(last.code(), std::move(text));
    }
    const uint64_t now = base::monotonic_ns();
    const uint64_t pause = std::max(wake - std::min(wake, now), kShortestPauseNs);
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(pause, deadline.left_ns())));
  }
}

}  // namespace petps::client
