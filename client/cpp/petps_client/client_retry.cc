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

bool is_reply(Code code) { return !is_unreachable(code) && code != Code::kResourceExhausted; }

bool is_unreachable(Code code) {
  return code == Code::kUnavailable || code == Code::kDeadlineExceeded;
}

bool is_final(Code code) {
  return code == Code::kInvalidArgument || code == Code::kPermissionDenied ||
         code == Code::kUnauthenticated || code == Code::kWrongShard;
}

Status map_has_changed() { return Status(Code::kWrongShard, "the shard map has changed"); }

Status Client::Impl::read_shard_map(RemoteServer& server, const Deadline& deadline) {
  const auto map = server.read_shard_map(deadline);
  if (!map.ok()) return map.status();
  const std::lock_guard lock(routing_mutex);
  if (map.value().version <= routing->version) return {};
  return route_locked(map.value(), server.name());
}

// Route by the map, or if its version is 0 to all servers of the URL. Hosts that stay keep their
// servers.
Status Client::Impl::route_locked(wire::ShardMap map, const std::string& peer) {
  Hosts hosts;
  const auto servers_at = [&](const Address& address) {
    for (const Hosts* known : {&seeds, &hosts, &map_hosts}) {
      for (const auto& host : *known) {
        if (host->address() != address) continue;
        if (known == &map_hosts) hosts.push_back(host);
        return host->servers();
      }
    }
    hosts.push_back(make_host(address));
    return hosts.back()->servers();
  };
  std::shared_ptr<Routing> next;
  if (map.version == 0) {
    next = route_to_all(seed_servers());
  } else {
    auto by_map = route_by_map(map, options.zone, peer, servers_at);
    if (!by_map.ok()) return by_map.status();
    next = std::move(by_map).value();
  }
  next->generation = (routing == nullptr ? 0 : routing->generation) + 1;
  routing = std::move(next);
  map_hosts = std::move(hosts);
  shard_map = std::move(map);
  map_peer = peer;
  return {};
}

uint64_t Client::Impl::refresh_hosts(const Deadline& deadline) {
  Hosts hosts = seeds;
  {
    const std::lock_guard lock(routing_mutex);
    hosts.insert(hosts.end(), map_hosts.begin(), map_hosts.end());
  }
  bool is_changed = false;
  uint64_t next_ns = UINT64_MAX;
  for (size_t i = 0; i < hosts.size(); ++i) {
    if (hosts[i]->refresh(deadline.share(hosts.size() - i + 1))) is_changed = true;
    next_ns = std::min(next_ns, hosts[i]->refresh_due_ns());
  }
  if (!is_changed) return next_ns;
  const std::lock_guard lock(routing_mutex);
  (void)route_locked(shard_map, map_peer);  // cannot fail: this map was in use
  return next_ns;
}

bool Client::Impl::find_newer_map(const Routing& than, const RemoteServers& group,
                                  const Deadline& deadline) {
  RemoteServers others = seed_servers();
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
    if (current_routing()->generation != by->generation) {
      if (deadline.passed()) return status;
      continue;
    }
    if (deadline.left_ns() <= pause_ns) return status;
    std::this_thread::sleep_for(std::chrono::nanoseconds(pause_ns));
    find_newer_map(*by, {}, deadline);
    if (deadline.passed()) return status;  // no further attempt could say more
  }
}

std::vector<RemoteServer*> Client::Impl::awake_servers(const RemoteServers& replicas,
                                                       size_t first) {
  const uint64_t now = base::monotonic_ns();
  std::vector<RemoteServer*> awake;
  for (size_t i = 0; i < replicas.size(); ++i) {
    RemoteServer* server = replicas[(first + i) % replicas.size()].get();
    if (server->backoff_until_ns() <= now) awake.push_back(server);
  }
  if (awake.size() <= 1) return awake;
  std::stable_partition(awake.begin(), awake.end(),
                        [](const RemoteServer* server) { return !server->is_in_doubt(); });
  const auto dead = std::stable_partition(
      awake.begin(), awake.end(), [](const RemoteServer* server) { return !server->is_dead(); });
  for (auto server = dead; dead != awake.begin() && server != awake.end(); ++server)
    want_probe(**server);
  return awake;
}

bool Client::Impl::are_all_dead(const RemoteServers& servers) {
  return std::all_of(servers.begin(), servers.end(),
                     [](const auto& server) { return server->is_dead(); });
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
                                 const Attempt& attempt, const std::function<bool()>& is_outdated,
                                 Patience patience, const Status& earlier) {
  const bool is_short = patience == Patience::kShort;
  Status last(Code::kUnavailable, "every server is in backoff after a failure");
  // The failure before the last one. If the deadline cuts the last attempt short, this one explains
  // more.
  std::string before;
  Status refusal;  // of a reachable server: explains more than another one's being unreachable
  if (!earlier.ok()) (is_unreachable(earlier.code()) ? last : refusal) = earlier;
  size_t tried = 0;
  for (;;) {
    std::vector<RemoteServer*> awake = awake_servers(replicas, next_rotation());
    if (is_short)
      std::erase_if(awake, [](const RemoteServer* server) { return server->is_dead(); });
    size_t refused = 0;
    for (size_t i = 0; i < awake.size() && !deadline.passed(); ++i) {
      // A silent server must leave time for its replicas, and a dead one most of it: what they have
      // refused now they may answer soon.
      const bool is_doubtful = awake.size() > 1 && awake[i]->is_dead();
      const Deadline until = is_doubtful ? deadline.limited(awake[i]->patience_ns()) : deadline;
      const Status status = try_once(*awake[i], until, awake.size() - i, attempt);
      ++tried;
      if (is_reply(status.code())) awake[i]->record_reply();
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
    const Deadline until = is_short ? deadline.limited(replicas[0]->patience_ns()) : deadline;
    if (by.version != 0 && refused == 0 && find_newer_map(by, replicas, until))
      return map_has_changed();
    for (const auto& server : replicas) {
      if (server->is_one_of_several() && server->is_dead()) want_probe(*server);
    }
    if (by.generation != 0 && current_routing()->generation != by.generation)
      return Status(Code::kWrongShard, "the servers have other addresses now");
    if (is_short && are_all_dead(replicas)) return refusal.ok() ? last : refusal;
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
