#include "petps_client/choice.h"

#include <algorithm>

namespace petps::client {

namespace {

// Limit of the names of instances older than the last answer's. Switches are hours apart, and a
// pool keeps few instances.
constexpr size_t kMaxOlder = 256;

size_t hash_of(const std::string& name) { return std::hash<std::string>()(name); }

// Return 1 if `a` is known to be older than `b`, -1 if newer, 0 if unknown. A pool whose current
// instance is `b` overrides the others. If no pool knows both, compare their applied versions;
// pushed tables have none. `version_a`: the remembered version of `a`.
int order(std::string_view a, std::string_view b, std::span<const CataloguePointer> known,
          uint64_t version_a = 0) {
  int order = 0;
  uint64_t version_b = 0;
  for (const CataloguePointer& catalogue : known) {
    if (catalogue == nullptr) continue;
    version_a = std::max(version_a, catalogue->applied_version(a));
    version_b = std::max(version_b, catalogue->applied_version(b));
    const int order_here = catalogue->order(a, b);
    if (order_here != 0 && (order == 0 || catalogue->instance_name() == b)) order = order_here;
  }
  if (order != 0 || version_a == 0 || version_b == 0 || version_a == version_b) return order;
  return version_a < version_b ? 1 : -1;
}

}  // namespace

std::string NewestAnswer::instance() const {
  const std::lock_guard lock(mutex_);
  return instance_;
}

NewestAnswer::Last NewestAnswer::last() const {
  const std::lock_guard lock(mutex_);
  return {instance_, version_};
}

// A pool was switched back if it switched away from the last answer's instance after that answer
// was recorded.
bool NewestAnswer::allows_locked(const Catalogue& server) const {
  const std::string& current = server.instance_name();
  if (instance_.empty() || current == instance_ || !older_.contains(current)) return true;
  const auto at = counters_.find(server.state().pool_uuid);
  return server.switched_away_at(instance_) > (at == counters_.end() ? 0 : at->second);
}

bool NewestAnswer::allows(const Catalogue& server) const {
  const size_t hash = hash_.load(std::memory_order_acquire);
  if (hash == 0 || hash == hash_of(server.instance_name())) return true;
  const std::lock_guard lock(mutex_);
  return allows_locked(server);
}

bool NewestAnswer::is_older(const std::string& instance,
                            std::span<const CataloguePointer> known) const {
  if (!older_.contains(instance)) return false;
  return std::none_of(known.begin(), known.end(), [&](const CataloguePointer& server) {
    return server != nullptr && server->instance_name() == instance && allows_locked(*server);
  });
}

void NewestAnswer::record(const std::string& instance, std::span<const CataloguePointer> known) {
  if (instance.empty() || hash_.load(std::memory_order_acquire) == hash_of(instance)) return;
  const std::lock_guard lock(mutex_);
  if (instance == instance_ || is_older(instance, known)) return;
  const bool is_newer = !instance_.empty() && order(instance_, instance, known, version_) > 0;
  std::unordered_set<std::string> older;
  if (is_newer) {
    older = std::move(older_);
    older.insert(instance_);
  } else {
    for (const std::string& name : older_) {
      if (order(name, instance, known) > 0) older.insert(name);
    }
  }
  uint64_t version = 0;
  for (const CataloguePointer& catalogue : known) {
    if (catalogue == nullptr) continue;
    version = std::max(version, catalogue->applied_version(instance));
    for (std::string& name : catalogue->older_than(instance)) older.insert(std::move(name));
    counters_[catalogue->state().pool_uuid] = catalogue->state().counter;
  }
  older.erase(instance);
  while (older.size() > kMaxOlder) older.erase(older.begin());
  older_ = std::move(older);
  instance_ = instance;
  version_ = version;
  hash_.store(hash_of(instance), std::memory_order_release);
}

namespace {

// Return whether the choice considers the server.
bool counts(const ServerView& server, bool with_dead) {
  return server.catalogue != nullptr && !server.catalogue->instance_name().empty() &&
         (server.is_live || with_dead);
}

// Return whether every group with a server that counts has one that can serve the instance.
bool is_feasible(const std::string& instance, std::span<const ServerView> servers,
                 std::span<const std::vector<uint32_t>> groups, bool with_dead) {
  std::vector<bool> has_counted(servers.size());
  std::vector<bool> can_serve(servers.size());
  for (size_t i = 0; i < servers.size(); ++i) {
    has_counted[i] = counts(servers[i], with_dead);
    can_serve[i] = has_counted[i] && servers[i].catalogue->can_serve(instance);
  }
  return std::all_of(groups.begin(), groups.end(), [&](const std::vector<uint32_t>& group) {
    const auto is_in = [&](const std::vector<bool>& set) {
      return std::any_of(group.begin(), group.end(), [&](uint32_t server) { return set[server]; });
    };
    return is_in(can_serve) || !is_in(has_counted);
  });
}

struct Candidates {
  std::vector<std::string> allowed;
  std::vector<std::string> too_old;
  std::vector<CataloguePointer> known;  // of all servers: the order of two instances is permanent
};

void add_once(const std::string& name, std::vector<std::string>& names) {
  if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
}

// Return whether the server's current instance is newer than the last answer's. If the two cannot
// be compared, it is not newer while a live server still lists the last answer's instance. Once
// none does, the fleet has moved on, and dead servers must not hold the client back.
bool is_newer(const Catalogue& server, const NewestAnswer::Last& last,
              std::span<const CataloguePointer> known, std::span<const CataloguePointer> live) {
  if (last.instance.empty() || server.switched_away_at(last.instance) != 0) return true;
  const int last_to_current = order(last.instance, server.instance_name(), known, last.version);
  if (last_to_current != 0) return last_to_current > 0;
  return std::none_of(live.begin(), live.end(), [&](const CataloguePointer& other) {
    return other->instance(last.instance) != 0;
  });
}

Candidates find_candidates(std::span<const ServerView> servers, const NewestAnswer& newest_answer,
                           bool with_dead) {
  Candidates candidates;
  std::vector<CataloguePointer> live;
  for (const ServerView& server : servers) {
    if (server.catalogue != nullptr) candidates.known.push_back(server.catalogue);
    if (counts(server, with_dead)) live.push_back(server.catalogue);
  }
  for (const CataloguePointer& server : live) {
    const std::string& current = server->instance_name();
    const bool is_allowed = newest_answer.is(current) ||
                            (newest_answer.allows(*server) &&
                             is_newer(*server, newest_answer.last(), candidates.known, live));
    add_once(current, is_allowed ? candidates.allowed : candidates.too_old);
  }
  return candidates;
}

}  // namespace

Choice choose(std::span<const ServerView> servers, std::span<const std::vector<uint32_t>> groups,
              const NewestAnswer& newest_answer) {
  bool with_dead = false;
  Candidates candidates = find_candidates(servers, newest_answer, with_dead);
  if (candidates.allowed.empty() && candidates.too_old.empty()) {
    // No server is live: consider what the dead servers last reported.
    with_dead = true;
    candidates = find_candidates(servers, newest_answer, with_dead);
  }
  Choice choice;
  choice.no_server_is_live = with_dead;
  choice.all_agree = candidates.allowed.size() + candidates.too_old.size() <= 1;
  if (candidates.allowed.empty()) {
    for (const std::string& name : candidates.too_old)
      choice.too_old.append(choice.too_old.empty() ? "'" : ", '").append(name).append("'");
    return choice;
  }
  if (candidates.allowed.size() == 1) {
    choice.instance = candidates.allowed[0];
    return choice;
  }
  // If no instance has a server in every group, take the newest; the group without it reports so.
  std::vector<std::string> feasible;
  for (const std::string& name : candidates.allowed) {
    if (is_feasible(name, servers, groups, with_dead)) feasible.push_back(name);
  }
  for (const std::string& name : feasible.empty() ? candidates.allowed : feasible) {
    if (choice.instance.empty() || order(choice.instance, name, candidates.known) > 0)
      choice.instance = name;
  }
  return choice;
}

}  // namespace petps::client
