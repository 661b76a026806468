// Pulls that may leave out keys (docs/decisions/0107).
#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "petps_client/pull_call.h"

namespace petps::client {

using base::Code;
using base::Status;

// Return the time that the call waits for the server's next reply.
Deadline PullCall::limit(const Deadline& deadline, const RemoteServer& server) const {
  if (!may_leave_out_) return deadline;
  const uint64_t now = base::monotonic_ns();
  const bool may_wait = options_.min_version != 0 && wait_until_ns_ > now;
  return deadline.limited(server.patience_ns() + (may_wait ? wait_until_ns_ - now : 0));
}

void PullCall::Plan::leave_out(std::span<const uint32_t> group_of,
                               const std::vector<bool>& is_left_out) {
  if (unavailable == nullptr) {
    own_unavailable.resize(pull->keys.size());
    unavailable = own_unavailable.data();
  }
  const size_t row_bytes = part.out_row_bytes();
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!group_of.empty() && !is_left_out[group_of[i]]) continue;
    std::memcpy(pull->out.data() + i * row_bytes, part.default_row(), row_bytes);
    if (mask != nullptr) mask[i] = 0;
    unavailable[i] = 1;
  }
}

uint64_t PullCall::Plan::count_unavailable() const {
  if (unavailable == nullptr) return 0;
  return static_cast<uint64_t>(std::count(unavailable, unavailable + pull->keys.size(), 1));
}

// Leave out the keys of these groups, which are waiting.
void PullCall::leave_out(const Routing& by, std::span<const uint32_t> groups) {
  std::vector<bool> is_left_out(by.groups.size());
  for (const uint32_t group : groups) is_left_out[group] = true;
  for (size_t i = 0; i < plans_.size(); ++i) {
    plans_[i].leave_out(groups_.of_keys.empty() ? std::span<const uint32_t>() : groups_.of_keys[i],
                        is_left_out);
  }
  groups_.left_out.insert(groups_.left_out.end(), groups.begin(), groups.end());
  std::erase_if(groups_.waiting, [&](uint32_t group) { return is_left_out[group]; });
}

// Return whether all servers that a call would ask for the group are dead, by conditions of now.
bool PullCall::are_owners_dead(const Routing& by, uint32_t group) const {
  const std::vector<uint32_t>& owners = by.owners[group];
  const auto is_able = [&](uint32_t owner) {
    return groups_.is_able[owner] && !lacks(group, owner);
  };
  const bool has_able = std::any_of(owners.begin(), owners.end(), is_able);
  return std::all_of(owners.begin(), owners.end(), [&](uint32_t owner) {
    return groups_.conditions[owner].is_dead || (has_able && !is_able(owner));
  });
}

// Leave out the keys of the groups whose servers are all dead. The background thread contacts them.
void PullCall::leave_out_dead(const Routing& by) {
  std::vector<uint32_t> dead;
  for (const uint32_t group : groups_.waiting) {
    if (!are_owners_dead(by, group)) continue;
    dead.push_back(group);
    for (const uint32_t owner : by.owners[group]) {
      if (groups_.conditions[owner].is_dead) client_.want_probe(*by.all[owner]);
    }
  }
  if (!dead.empty()) leave_out(by, dead);
}

// Leave out the keys of a group that no server has answered for.
void PullCall::give_up(const Routing& by, uint32_t group, const Status& status) {
  for (const uint32_t owner : by.owners[group]) {
    client_.want_probe(*by.all[owner]);
    if (!groups_.lacks_some[owner]) groups_.failures[owner] = status;
  }
  leave_out(by, {&group, 1});
}

// Return why the group has no answer. An answer of an owner explains more than another one's being
// unreachable. One that lacks the keys explains nothing while another owner may have them.
Status PullCall::failure_of(const Routing& by, uint32_t group) const {
  const std::vector<uint32_t>& owners = by.owners[group];
  for (const bool has_refused : {true, false}) {
    for (const uint32_t owner : owners) {
      const bool counts = !groups_.failures[owner].ok() && !groups_.lacks_some[owner];
      if (counts && groups_.has_refused[owner] == has_refused) return groups_.failures[owner];
    }
  }
  const bool do_all_lack = std::all_of(owners.begin(), owners.end(),
                                       [&](uint32_t owner) { return lacks(group, owner); });
  return do_all_lack ? groups_.failures[owners[0]] : no_reply(by.groups[group]);
}

Status PullCall::no_reply(const RemoteServers& owners) {
  std::string names;
  for (const auto& owner : owners) names.append(names.empty() ? "" : ", ").append(owner->name());
  return Status(Code::kUnavailable, "pull: no reply since the last failure of " + names);
}

// Return the error of a call when every group is unavailable: it failed now, or it is dead.
Status PullCall::check_any_answers(const Routing& by) const {
  if (groups_.left_out.empty()) return {};
  std::vector<bool> is_left_out(by.groups.size());
  for (const uint32_t group : groups_.left_out) is_left_out[group] = true;
  for (size_t group = 0; group < by.groups.size(); ++group) {
    if (!is_left_out[group] && !Client::Impl::are_all_dead(by.groups[group])) return {};
  }
  const Status failure = failure_of(by, groups_.left_out.front());
  return Status(failure.code(),
                "no server of the model answers: " + std::string(failure.message()));
}

void Client::Impl::count_pull(const PullReport& report) {
  pulls.fetch_add(1, std::memory_order_relaxed);
  if (report.unavailable == 0) return;
  partial_pulls.fetch_add(1, std::memory_order_relaxed);
  unavailable_keys.fetch_add(report.unavailable, std::memory_order_relaxed);
}

}  // namespace petps::client
