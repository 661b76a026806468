// Which server answers which keys of a pull.
#include <algorithm>

#include "base/clock.h"
#include "petps_client/pull_call.h"

namespace petps::client {

using base::Code;
using base::Status;

namespace {

// Ranks of the servers of a group (Candidate::rank).
constexpr uint8_t kNear = 0;
constexpr uint8_t kFar = 1;
constexpr uint8_t kInDoubt = 2;
constexpr uint8_t kDead = 3;

}  // namespace

void PullCall::find_groups(const Routing& by) {
  groups_ = {};
  groups_.failures.resize(by.all.size());
  groups_.has_refused.resize(by.all.size());
  groups_.lacks_some.resize(by.all.size());
  groups_.keys.resize(by.groups.size());
  if (by.groups.size() == 1) {
    groups_.waiting = {0};  // also without keys, so that the servers refuse what is wrong
    for (const Plan& plan : plans_) groups_.keys[0] += static_cast<uint32_t>(plan.keys.size());
  } else {
    groups_.of_keys.resize(plans_.size());
    for (size_t i = 0; i < plans_.size(); ++i) {
      std::vector<uint32_t>& of_keys = groups_.of_keys[i];
      of_keys.reserve(plans_[i].keys.size());
      for (const uint64_t key : plans_[i].keys) {
        const auto group = static_cast<uint32_t>(by.group(key));
        of_keys.push_back(group);
        if (groups_.keys[group]++ == 0) groups_.waiting.push_back(group);
      }
    }
  }
  groups_.count = groups_.waiting.size();
}

void PullCall::look_at_servers(const Routing& by) {
  const uint64_t now = base::monotonic_ns();
  std::vector<bool> is_known(by.all.size());
  groups_.conditions.assign(by.all.size(), {});
  groups_.is_able.assign(by.all.size(), true);
  for (const uint32_t group : groups_.waiting) {
    for (const uint32_t number : by.owners[group]) {
      if (is_known[number]) continue;
      is_known[number] = true;
      groups_.conditions[number] = by.all[number]->condition(now);
      if (choice_.all_agree || choice_.instance.empty()) continue;
      const auto catalogue = by.all[number]->last_catalogue();
      groups_.is_able[number] = catalogue == nullptr || can_serve(*catalogue);
    }
  }
}

std::vector<Candidate> PullCall::candidates(const Routing& by, int round,
                                            const Share* hedged) const {
  std::vector<Candidate> candidates(by.all.size());
  for (size_t i = 0; i < candidates.size(); ++i) {
    const RemoteServer::Condition& condition = groups_.conditions[i];
    Candidate& candidate = candidates[i];
    candidate.in_flight = condition.in_flight;
    candidate.latency_ns = condition.latency_ns;
    const bool has_refused = groups_.has_refused[i] || groups_.lacks_some[i];
    if (!condition.is_awake || has_refused || !groups_.is_able[i]) continue;
    if (hedged != nullptr && (hedged->server == i || condition.is_dead)) continue;
    if (condition.is_dead) {
      // Later a reachable server comes first, though it refused: pull_group asks both.
      if (!may_leave_out_ && round == 0) candidate.rank = kDead;
    } else if (condition.is_in_doubt) {
      candidate.rank = kInDoubt;
    } else {
      candidate.rank = by.is_near[i] ? kNear : kFar;
    }
  }
  return candidates;
}

std::vector<PullCall::Share> PullCall::make_shares(const Routing& by,
                                                   std::span<const uint32_t> groups,
                                                   std::span<const uint32_t> servers) const {
  std::vector<Share> shares;
  std::vector<uint32_t> of_server(by.all.size(), kNoServer);
  std::vector<uint32_t> of_group(by.groups.size(), kNoServer);
  for (size_t i = 0; i < groups.size(); ++i) {
    if (servers[i] == kNoServer) continue;
    uint32_t& number = of_server[servers[i]];
    if (number == kNoServer) {
      number = static_cast<uint32_t>(shares.size());
      shares.emplace_back().server = servers[i];
    }
    of_group[groups[i]] = number;
    shares[number].groups.push_back(groups[i]);
    shares[number].keys += groups_.keys[groups[i]];
  }
  if (shares.empty()) return shares;
  if (shares.size() == 1 && shares[0].groups.size() == groups_.count) return shares;
  for (Share& share : shares) {
    share.slices.resize(plans_.size());
    for (size_t i = 0; i < plans_.size(); ++i) {
      const size_t most = std::min<size_t>(share.keys, plans_[i].keys.size());
      share.slices[i].keys.reserve(most);
      share.slices[i].positions.reserve(most);
    }
  }
  for (size_t i = 0; i < plans_.size(); ++i) {
    const std::span<const uint64_t> keys = plans_[i].keys;
    const std::vector<uint32_t>& of_keys = groups_.of_keys[i];
    for (size_t k = 0; k < keys.size(); ++k) {
      const uint32_t number = of_group[of_keys[k]];
      if (number == kNoServer) continue;
      Slice& slice = shares[number].slices[i];
      slice.keys.push_back(keys[k]);
      slice.positions.push_back(static_cast<uint32_t>(k));
    }
  }
  return shares;
}

std::vector<PullCall::Share> PullCall::shares_of_round(const Routing& by, int round) {
  const std::vector<uint32_t> servers =
      spread(by.owners, groups_.waiting, groups_.keys, candidates(by, round, nullptr),
             client_.options.keys_per_request, client_.next_random());
  std::vector<Share> shares = make_shares(by, groups_.waiting, servers);
  for (size_t i = 0; i < by.all.size(); ++i) {
    const bool is_asked = std::any_of(shares.begin(), shares.end(),
                                      [&](const Share& share) { return share.server == i; });
    if (groups_.conditions[i].needs_probe && !is_asked) client_.want_probe(*by.all[i]);
  }
  return shares;
}

// Return all keys without an answer that this server owns; if it lacks some of them, those of its
// first group.
PullCall::Share PullCall::rest_for(const Routing& by, const RemoteServer& server) const {
  const auto at = std::find_if(by.all.begin(), by.all.end(),
                               [&](const auto& other) { return other.get() == &server; });
  const auto number = static_cast<uint32_t>(at - by.all.begin());
  std::vector<uint32_t> servers;
  for (const uint32_t group : groups_.waiting) {
    const std::vector<uint32_t>& owners = by.owners[group];
    const bool is_owner = std::find(owners.begin(), owners.end(), number) != owners.end();
    servers.push_back(is_owner ? number : kNoServer);
    if (is_owner && groups_.lacks_some[number]) break;
  }
  servers.resize(groups_.waiting.size(), kNoServer);
  std::vector<Share> shares = make_shares(by, groups_.waiting, servers);
  return std::move(shares.at(0));
}

// If the server answered that it lacks keys of the share, record so and return true. It has the
// instance of the call, but not in all of its partitions.
bool PullCall::record_lack(const Routing& by, const Share& share, const Status& status) {
  if (status.code() != Code::kNotFound || by.version == 0) return false;
  const auto catalogue = by.all[share.server]->last_catalogue();
  if (catalogue == nullptr || !lists_all(*catalogue)) return false;
  groups_.lacks_some[share.server] = true;
  groups_.failures[share.server] = status;
  if (share.groups.size() == 1) groups_.lacking.emplace_back(share.groups[0], share.server);
  return true;
}

bool PullCall::lacks(uint32_t group, uint32_t server) const {
  return std::find(groups_.lacking.begin(), groups_.lacking.end(), std::pair(group, server)) !=
         groups_.lacking.end();
}

bool PullCall::has_only_owner(const Routing& by, const Share& share) {
  return std::any_of(share.groups.begin(), share.groups.end(),
                     [&](uint32_t group) { return by.owners[group].size() == 1; });
}

// Take the share as the answer for its keys.
void PullCall::commit(Share share) {
  std::vector<bool> is_answered(groups_.keys.size());
  for (const uint32_t group : share.groups) is_answered[group] = true;
  std::erase_if(groups_.waiting, [&](uint32_t group) { return is_answered[group]; });
  groups_.answers.push_back(std::move(share));
}

}  // namespace petps::client
