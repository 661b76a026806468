#include "router/names.h"

#include <algorithm>
#include <set>

#include "base/clock.h"
#include "base/peer.h"

namespace petps::router {

using base::Code;
using base::Result;
using base::Status;
using client::CataloguePointer;
using client::ClusterView;

namespace {

constexpr uint64_t kRecentNs = 1'000'000'000;
// A longer list of names would make an error unreadable.
constexpr size_t kMaxNamesShown = 20;

std::string join_names(const std::set<std::string>& names) {
  std::string text;
  size_t shown = 0;
  for (const std::string& name : names) {
    if (shown++ == kMaxNamesShown) {
      return text + ", and " + std::to_string(names.size() - kMaxNamesShown) + " more";
    }
    text.append(text.empty() ? "" : ", ").append(name);
  }
  return text.empty() ? "none" : text;
}

template <typename T>
const T* find_by_id(const std::vector<T>& ascending, uint32_t id) {
  const auto at = std::ranges::lower_bound(ascending, id, {}, &T::id);
  return at == ascending.end() || at->id != id ? nullptr : &*at;
}

// Return the names of a server without its tables, as seen by a client of the model `alias`.
CataloguePointer names_of(const client::Catalogue& server, const std::string& alias) {
  wire::TablesReply names;
  names.instances = server.reply().instances;
  names.aliases = server.reply().aliases;
  names.state = server.reply().state;
  auto built = client::Catalogue::build(names, alias, "");
  return built.ok() ? built.value() : nullptr;  // without tables nothing can be wrong
}

// Return whether the owners of every partition have the instance, as far as the client knows. It
// keeps what it knew of servers that are away.
bool is_whole(const std::string& instance, const ClusterView& view) {
  return std::ranges::all_of(view.groups, [&](const std::vector<uint32_t>& owners) {
    bool is_known = false;
    for (const uint32_t owner : owners) {
      const CataloguePointer& server = view.servers[owner].catalogue;
      if (server == nullptr) continue;
      if (server->instance(instance) != 0) return true;
      is_known = true;
    }
    return !is_known;
  });
}

// Return the instances of all servers, the older ones first: each server lists its own so.
std::vector<wire::InstanceInfo> merge_instances(const ClusterView& view) {
  std::vector<wire::InstanceInfo> merged;
  for (const client::ServerView& server : view.servers) {
    if (server.catalogue == nullptr) continue;
    size_t next = 0;  // where an instance belongs that only this server has
    for (const wire::InstanceInfo& instance : server.catalogue->reply().instances) {
      const auto at = std::ranges::find(merged, instance.name, &wire::InstanceInfo::name);
      if (at == merged.end()) {
        merged.insert(merged.begin() + static_cast<ptrdiff_t>(next++), instance);
        continue;
      }
      at->applied_version = std::min(at->applied_version, instance.applied_version);
      next = static_cast<size_t>(at - merged.begin()) + 1;
    }
  }
  return merged;
}

// Return whether the rows of two tables have the same form.
bool have_same_rows(const wire::TableInfo& one, const wire::TableInfo& other) {
  return one.dtype == other.dtype && one.dim == other.dim && one.row_bytes == other.row_bytes;
}

// Return whether two lists have the same names. Versions and rows may differ.
bool have_same_names(const wire::TablesReply& one, const wire::TablesReply& other) {
  const auto is_same_table = [](const wire::TableInfo& a, const wire::TableInfo& b) {
    return a.id == b.id && a.default_row == b.default_row;
  };
  return one.aliases == other.aliases &&
         std::ranges::equal(one.instances, other.instances, {}, &wire::InstanceInfo::id,
                            &wire::InstanceInfo::id) &&
         std::ranges::equal(one.tables, other.tables, is_same_table);
}

}  // namespace

bool is_failed_login(const Status& status) {
  return status.code() == Code::kUnauthenticated ||
         (status.code() == Code::kResourceExhausted &&
          status.message().find(base::kFailedLogins) != std::string_view::npos);
}

bool is_revoked(const Status& status) {
  return is_failed_login(status) &&
         (status.code() != Code::kUnauthenticated ||
          status.message().find(base::kUnknownToken) != std::string_view::npos);
}

void Listing::index() {
  for (size_t i = 0; i < reply.tables.size(); ++i)
    tables_of[reply.tables[i].instance].emplace(reply.tables[i].name, i);
}

const wire::TableInfo* Listing::table(uint32_t id) const { return find_by_id(reply.tables, id); }

const wire::InstanceInfo* Listing::instance(uint32_t id) const {
  return find_by_id(reply.instances, id);
}

base::Result<const wire::InstanceInfo*> Listing::resolve(std::string_view model) const {
  std::set<std::string> models;
  std::set<std::string> names;
  for (const wire::InstanceInfo& info : reply.instances) models.insert(info.model);
  if (model.empty() && models.size() != 1) {
    return Status(Code::kInvalidArgument, "name the model; there are: " + join_names(models));
  }
  const std::string wanted = model.empty() ? *models.begin() : std::string(model);
  for (const wire::AliasInfo& alias : reply.aliases) {
    names.insert(alias.name);
    if (alias.name == wanted) return instance(alias.instance);
  }
  const wire::InstanceInfo* newest = nullptr;
  for (const wire::InstanceInfo& info : reply.instances) {
    names.insert(info.name);
    if (info.name == wanted) return &info;
    if (info.model == wanted) newest = &info;
  }
  if (newest != nullptr) return newest;
  return Status(Code::kNotFound, "model '" + wanted + "' is unknown; known: " + join_names(names));
}

base::Result<const wire::TableInfo*> Listing::find(const wire::InstanceInfo& of,
                                                   std::string_view table) const {
  std::set<std::string> names;
  if (const auto tables = tables_of.find(of.id); tables != tables_of.end()) {
    if (const auto at = tables->second.find(table); at != tables->second.end())
      return &reply.tables[at->second];
    for (const auto& [name, position] : tables->second) names.insert(name);
  }
  return Status(Code::kNotFound, "table '" + std::string(table) + "' is unknown in '" + of.name +
                                     "'; known: " + join_names(names));
}

Result<ListingPointer> Names::recent(const client::Forwarder& servers, uint32_t deadline_ms) {
  {
    const std::lock_guard lock(mutex_);
    if (base::monotonic_ns() - updated_ns_ < kRecentNs) return listing_;
  }
  const std::unique_lock asking(asking_, std::try_to_lock);
  if (!asking.owns_lock()) return listing();  // another call asks now
  const Status status = servers.read_names(deadline_ms);
  // A revoked token sees nothing. Without a server that answers, the last names go on.
  if (is_failed_login(status) || status.code() == Code::kPermissionDenied) return status;
  return update(servers);
}

ListingPointer Names::listing() const {
  const std::lock_guard lock(mutex_);
  return listing_;
}

std::string Names::choose(const std::string& alias, const ClusterView& view) {
  std::unique_ptr<client::NewestAnswer>& newest = newest_[alias];
  if (newest == nullptr) newest = std::make_unique<client::NewestAnswer>();
  std::vector<client::ServerView> servers;
  std::vector<CataloguePointer> known;
  for (const client::ServerView& server : view.servers) {
    servers.push_back({server.catalogue == nullptr ? nullptr : names_of(*server.catalogue, alias),
                       server.is_live});
    known.push_back(servers.back().catalogue);
  }
  const client::Choice choice = client::choose(servers, view.groups, *newest);
  newest->record(choice.instance, known);
  return choice.instance.empty() ? newest->instance() : choice.instance;
}

void Names::add_instances(const ClusterView& view, wire::TablesReply& reply) {
  std::set<std::string> aliases;
  for (const client::ServerView& server : view.servers) {
    if (server.catalogue == nullptr) continue;
    for (const wire::AliasInfo& alias : server.catalogue->reply().aliases)
      aliases.insert(alias.name);
  }
  std::erase_if(newest_, [&](const auto& entry) { return !aliases.contains(entry.first); });
  aliases_.clear();
  std::set<std::string> chosen;
  for (const std::string& alias : aliases) {
    const std::string instance = choose(alias, view);
    if (instance.empty()) continue;
    aliases_[alias] = instance;
    chosen.insert(instance);
  }
  std::map<std::string, uint32_t> ids;
  for (wire::InstanceInfo& instance : merge_instances(view)) {
    if (!chosen.contains(instance.name) && !is_whole(instance.name, view)) continue;
    const auto known = instances_.find(instance.name);
    instance.id = known == instances_.end() ? next_instance_++ : known->second;
    ids[instance.name] = instance.id;
    reply.instances.push_back(std::move(instance));
  }
  std::ranges::sort(reply.instances, {}, &wire::InstanceInfo::id);
  instances_ = std::move(ids);
}

void Names::add_aliases(const ClusterView& view, wire::TablesReply& reply) {
  const auto id_of = [&](const std::string& instance) {
    const auto at = instances_.find(instance);
    return at == instances_.end() ? 0 : at->second;
  };
  for (const auto& [alias, instance] : aliases_) {
    wire::AliasInfo merged{alias, id_of(instance), 0};
    if (merged.instance == 0) continue;  // all servers that had it are unknown now
    for (const client::ServerView& server : view.servers) {
      if (server.catalogue == nullptr) continue;
      const wire::TablesReply& names = server.catalogue->reply();
      const auto of_server = std::ranges::find(names.aliases, alias, &wire::AliasInfo::name);
      if (of_server == names.aliases.end()) continue;
      const auto previous =
          std::ranges::find(names.instances, of_server->previous, &wire::InstanceInfo::id);
      if (server.catalogue->instance(instance) != of_server->instance ||
          previous == names.instances.end())
        continue;
      merged.previous = id_of(previous->name);
    }
    reply.aliases.push_back(std::move(merged));
  }
}

void Names::add_tables(const ClusterView& view, wire::TablesReply& reply) {
  std::map<TableName, wire::TableInfo> merged;
  for (const client::ServerView& server : view.servers) {
    if (server.catalogue == nullptr) continue;
    const wire::TablesReply& names = server.catalogue->reply();
    std::map<uint32_t, std::string> listed;  // the names of the listed instances, by their ids here
    for (const wire::InstanceInfo& instance : names.instances) {
      if (instances_.contains(instance.name)) listed.emplace(instance.id, instance.name);
    }
    for (const wire::TableInfo& table : names.tables) {
      const auto of = listed.find(table.instance);
      if (of == listed.end()) continue;
      const auto [at, is_new] = merged.try_emplace({of->second, table.name}, table);
      if (is_new) continue;
      at->second.rows += table.rows;
      at->second.capacity += table.capacity;
    }
  }
  std::map<TableName, uint32_t> ids;
  const ListingPointer last = listing();
  for (auto& [name, table] : merged) {
    const auto known = tables_.find(name);
    const wire::TableInfo* before = known == tables_.end() ? nullptr : last->table(known->second);
    // One that was dropped and created again has another id, as at a server.
    const bool is_same = before != nullptr && have_same_rows(*before, table);
    table.id = is_same ? before->id : next_table_++;
    table.instance = instances_.at(name.first);
    ids[name] = table.id;
    reply.tables.push_back(std::move(table));
  }
  std::ranges::sort(reply.tables, {}, &wire::TableInfo::id);
  tables_ = std::move(ids);
}

ListingPointer Names::update(const client::Forwarder& servers) {
  const std::lock_guard update_lock(updating_);
  const ClusterView view = servers.view();
  auto next = std::make_shared<Listing>();
  add_instances(view, next->reply);
  add_aliases(view, next->reply);
  add_tables(view, next->reply);
  const ListingPointer last = listing();  // nobody else writes it
  const uint64_t counter = last->reply.state.counter;
  const bool is_changed = counter == 0 || !have_same_names(last->reply, next->reply);
  next->reply.state.counter = counter + (is_changed ? 1 : 0);
  next->index();
  const std::lock_guard lock(mutex_);  // short: workers take it for each pull
  listing_ = next;
  updated_ns_ = base::monotonic_ns();
  return next;
}

}  // namespace petps::router
