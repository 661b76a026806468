#include "petps_client/choice.h"

#include <algorithm>

namespace petps::client {

namespace {

// Limit of names known to be older than the last answer. Switches are hours apart, and a pool
// keeps few instances.
constexpr size_t kMaxOlder = 256;

size_t hash_of(const std::string& name) { return std::hash<std::string>()(name); }

// Return 1 if `a` is known to be older than `b`, -1 if newer, 0 if unknown. A pool whose current
// instance is `b` overrides the others. If no pool knows both, compare their applied versions;
// pushed tables have none. `first`: the remembered version of `a`.
int order(std::string_view a, std::string_view b, std::span<const CataloguePointer> known,
          uint64_t first = 0) {
  int order = 0;
  uint64_t second = 0;
  for (const CataloguePointer& catalogue : known) {
    if (catalogue == nullptr) continue;
    first = std::max(first, catalogue->applied_version(a));
    second = std::max(second, catalogue->applied_version(b));
    const int here = catalogue->order(a, b);
    if (here != 0 && (order == 0 || catalogue->instance_name() == b)) order = here;
  }
  if (order == 0 && first != 0 && second != 0 && first != second) return first < second ? 1 : -1;
  return order;
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

// A pool was switched back if it has left the last answer's instance in a state that is newer
// than the pool's state when that answer was recorded.
bool NewestAnswer::allows_locked(const Catalogue& server) const {
  const std::string& meant = server.instance_name();
  if (instance_.empty() || meant == instance_ || !older_.contains(meant)) return true;
  const auto at = counters_.find(server.state().pool_uuid);
  return server.left_at(instance_) > (at == counters_.end() ? 0 : at->second);
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

void NewestAnswer::note(const std::string& instance, std::span<const CataloguePointer> known) {
  if (instance.empty() || hash_.load(std::memory_order_acquire) == hash_of(instance)) return;
  const std::lock_guard lock(mutex_);
  if (instance == instance_ || is_older(instance, known)) return;
  const bool forward = !instance_.empty() && order(instance_, instance, known, version_) > 0;
  std::unordered_set<std::string> older;
  if (forward) {
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

bool counts(const ServerView& server, bool also_dead) {
  return server.catalogue != nullptr && !server.catalogue->instance_name().empty() &&
         (server.answers || also_dead);
}

// Whether every group with a server that counts has one that can serve the instance.
bool is_feasible(const std::string& instance, std::span<const GroupView> groups, bool also_dead) {
  return std::all_of(groups.begin(), groups.end(), [&](const GroupView& group) {
    bool any = false;
    bool reached = false;
    for (const ServerView& server : group) {
      if (!counts(server, also_dead)) continue;
      any = true;
      reached = reached || server.catalogue->reaches(instance);
    }
    return reached || !any;
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

// An instance that cannot be compared with the last answer's is refused while a live server
// still lists that one. Once none does, the fleet has moved on, and dead servers must not
// hold the client back.
bool is_newer(const Catalogue& server, const NewestAnswer::Last& last,
              std::span<const CataloguePointer> known, std::span<const CataloguePointer> live) {
  if (last.instance.empty() || server.left_at(last.instance) != 0) return true;
  const int compared = order(last.instance, server.instance_name(), known, last.version);
  if (compared != 0) return compared > 0;
  return std::none_of(live.begin(), live.end(), [&](const CataloguePointer& other) {
    return other->instance(last.instance) != 0;
  });
}

Candidates candidates_of(std::span<const GroupView> groups, const NewestAnswer& answered,
                         bool also_dead) {
  Candidates found;
  std::vector<CataloguePointer> live;
  for (const GroupView& group : groups) {
    for (const ServerView& server : group) {
      if (server.catalogue != nullptr) found.known.push_back(server.catalogue);
      if (counts(server, also_dead)) live.push_back(server.catalogue);
    }
  }
  for (const GroupView& group : groups) {
    for (const ServerView& server : group) {
      if (!counts(server, also_dead)) continue;
      const bool is_allowed = answered.is(server.catalogue->instance_name()) ||
                              (answered.allows(*server.catalogue) &&
                               is_newer(*server.catalogue, answered.last(), found.known, live));
      add_once(server.catalogue->instance_name(), is_allowed ? found.allowed : found.too_old);
    }
  }
  return found;
}

}  // namespace

Choice choose(std::span<const GroupView> groups, const NewestAnswer& answered) {
  bool also_dead = false;
  Candidates found = candidates_of(groups, answered, also_dead);
  if (found.allowed.empty() && found.too_old.empty()) {
    // No server is live: the call tries the last known ones again.
    also_dead = true;
    found = candidates_of(groups, answered, also_dead);
  }
  Choice choice;
  choice.nobody_answers = also_dead;
  choice.all_agree = found.allowed.size() + found.too_old.size() <= 1;
  if (found.allowed.empty()) {
    for (const std::string& name : found.too_old)
      choice.too_old.append(choice.too_old.empty() ? "'" : ", '").append(name).append("'");
    return choice;
  }
  // If no instance has a server in every group, take the newest; the group without it reports so.
  const bool any_feasible =
      std::any_of(found.allowed.begin(), found.allowed.end(),
                  [&](const std::string& name) { return is_feasible(name, groups, also_dead); });
  for (const std::string& name : found.allowed) {
    if (any_feasible && !is_feasible(name, groups, also_dead)) continue;
    if (choice.instance.empty() || order(choice.instance, name, found.known) > 0)
      choice.instance = name;
  }
  return choice;
}

}  // namespace petps::client
