#include "petps_client/catalogue.h"

#include <algorithm>

namespace petps::client {

using base::Code;
using base::Result;
using base::Status;

namespace {

// A longer list of names would make an error unreadable.
constexpr size_t kMaxNamesShown = 20;
// Limit of former instances per pool. A pool has fewer, and switches are hours apart.
constexpr size_t kMaxFormer = 64;

// Join the distinct names, sorted.
std::string join_names(std::vector<std::string> names) {
  if (names.empty()) return "none";
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kMaxNamesShown); ++i) {
    text.append(text.empty() ? "" : ", ").append(names[i]);
  }
  if (names.size() > kMaxNamesShown)
    text += ", and " + std::to_string(names.size() - kMaxNamesShown) + " more";
  return text;
}

Status check_table(const wire::TableInfo& info, const std::string& peer) {
  if (!codec::is_dtype(info.dtype)) {
    return Status(Code::kUnimplemented, peer + ": table '" + info.name + "' has dtype number " +
                                            std::to_string(info.dtype) +
                                            ", which this client does not know: upgrade it");
  }
  std::string problem;
  if (info.dim < 1 || info.dim > kMaxDim) {
    problem = "dim " + std::to_string(info.dim) + " is outside 1..4096";
  } else if (info.row_bytes != codec::row_bytes(static_cast<codec::Dtype>(info.dtype), info.dim)) {
    problem = std::to_string(info.row_bytes) + " row bytes do not fit its dim and dtype";
  } else if (!info.default_row.empty() && info.default_row.size() != info.row_bytes) {
    problem = "its default row has another length than its rows";
  } else {
    return {};
  }
  return Status(Code::kUnavailable,
                peer + ": the server broke the protocol: table '" + info.name + "': " + problem);
}

// The row of zeros of every table: kMaxDim float32 are the longest row in either form.
alignas(float) constexpr std::byte kZeroRow[kMaxDim * sizeof(float)]{};

CatalogueTable make_entry(const wire::TableInfo& info, Table table) {
  CatalogueTable entry;
  entry.id = info.id;
  if (!info.default_row.empty()) {
    entry.default_stored = info.default_row;
    entry.default_values.resize(info.dim);
    codec::decode(table.dtype, info.default_row.data(), 1, info.dim, entry.default_values.data());
  }
  entry.table = std::move(table);
  return entry;
}

}  // namespace

const std::byte* CatalogueTable::default_row(Form form) const {
  if (default_stored.empty()) return kZeroRow;  // zeros decode to zeros in every dtype
  return form == Form::kStored ? default_stored.data()
                               : reinterpret_cast<const std::byte*>(default_values.data());
}

Status Catalogue::choose_instance(const wire::TablesReply& reply, const std::string& model,
                                  const std::string& peer) {
  std::vector<std::string> names;
  for (const wire::InstanceInfo& info : reply.instances) names.push_back(info.model);
  std::string wanted = model;
  if (model.empty()) {
    if (names.empty()) return Status(Code::kNotFound, peer + " has no tables yet");
    wanted = names[0];
    if (std::any_of(names.begin(), names.end(),
                    [&](const std::string& name) { return name != wanted; })) {
      return Status(Code::kInvalidArgument,
                    peer + " has several models: name one in the URL, petps://" + peer +
                        "/<model>; there are: " + join_names(names));
    }
  }
  for (const wire::AliasInfo& alias : reply.aliases) {
    if (alias.name != wanted) continue;
    for (const wire::InstanceInfo& info : reply.instances) {
      if (info.id == alias.instance) instance_name_ = info.name;
      if (info.id == alias.previous && alias.previous != alias.instance)
        former_.push_back({info.name, info.id, reply_.state.counter});
    }
    return {};
  }
  const wire::InstanceInfo* newest = nullptr;
  for (const wire::InstanceInfo& info : reply.instances) {
    if (info.name == wanted) {
      instance_name_ = info.name;
      return {};
    }
    if (info.model == wanted) newest = &info;
    names.push_back(info.name);
  }
  if (newest != nullptr) {
    instance_name_ = newest->name;
    return {};
  }
  for (const wire::AliasInfo& alias : reply.aliases) names.push_back(alias.name);
  return Status(Code::kNotFound,
                "model '" + wanted + "' is unknown at " + peer + "; known: " + join_names(names));
}

Result<std::shared_ptr<Catalogue>> Catalogue::build(const wire::TablesReply& reply,
                                                    const std::string& model,
                                                    const std::string& peer) {
  auto catalogue = std::make_shared<Catalogue>();
  catalogue->reply_ = reply;
  catalogue->peer_ = peer;
  catalogue->model_ = model;
  catalogue->model_status_ = catalogue->choose_instance(reply, model, peer);
  std::unordered_map<uint32_t, const wire::InstanceInfo*> instances;  // by id
  for (const wire::InstanceInfo& info : reply.instances) {
    Instance& instance = catalogue->instances_[info.name];
    instance.id = info.id;
    instance.applied_version = info.applied_version;
    instances[info.id] = &info;
  }
  for (const wire::TableInfo& info : reply.tables) {
    PETPS_RETURN_IF_ERROR(check_table(info, peer));
    Table table;
    table.name = info.name;
    if (const auto owner = instances.find(info.instance); owner != instances.end()) {
      table.model = owner->second->model;
      table.instance = owner->second->name;
    }
    table.dtype = static_cast<codec::Dtype>(info.dtype);
    table.dim = info.dim;
    table.row_bytes = info.row_bytes;
    table.takes_pushes = info.feed == 0;
    table.capacity = info.capacity;
    table.rows = info.rows;
    catalogue->all_.push_back(table);
    const auto instance = catalogue->instances_.find(table.instance);
    if (instance == catalogue->instances_.end()) continue;
    instance->second.tables.insert_or_assign(info.name, make_entry(info, std::move(table)));
  }
  return catalogue;
}

void Catalogue::add_former(FormerInstance former) {
  if (former.id == 0 || former.name == instance_name_) return;
  const auto at = std::find_if(former_.begin(), former_.end(), [&](const FormerInstance& known) {
    return known.name == former.name;
  });
  if (at != former_.end()) {
    at->counter = std::min(at->counter, former.counter);
  } else if (former_.size() < kMaxFormer) {
    former_.push_back(std::move(former));
  }
}

void Catalogue::record_former(const Catalogue& before) {
  const std::string& current_before = before.instance_name_;
  // `before` has no record of its own current instance (see add_former). So if a pool returns to
  // an instance and leaves it again, the second time counts.
  if (current_before != instance_name_)
    add_former({current_before, before.instance(current_before), reply_.state.counter});
  for (const FormerInstance& former : before.former_) add_former(former);
}

uint32_t Catalogue::id_of(std::string_view name) const {
  const auto at = instances_.find(name);
  if (at != instances_.end()) return at->second.id;
  for (const FormerInstance& former : former_) {
    if (former.name == name) return former.id;
  }
  return 0;
}

bool Catalogue::can_serve(std::string_view name) const {
  const auto at = instances_.find(name);
  if (at == instances_.end()) return false;
  const uint32_t current = instance();
  return current == 0 || at->second.id <= current;
}

uint64_t Catalogue::applied_version(std::string_view name) const {
  const auto at = instances_.find(name);
  return at == instances_.end() ? 0 : at->second.applied_version;
}

uint64_t Catalogue::switched_away_at(std::string_view name) const {
  for (const FormerInstance& former : former_) {
    if (former.name == name) return former.counter;
  }
  return 0;
}

int Catalogue::order(std::string_view a, std::string_view b) const {
  const uint32_t first = id_of(a);
  const uint32_t second = id_of(b);
  if (first == 0 || second == 0 || first == second) return 0;
  return first < second ? 1 : -1;
}

std::vector<std::string> Catalogue::older_than(std::string_view name) const {
  std::vector<std::string> older;
  const uint32_t number = id_of(name);
  for (const auto& [other, instance] : instances_) {
    if (instance.id < number) older.push_back(other);
  }
  for (const FormerInstance& former : former_) {
    if (former.id < number) older.push_back(former.name);
  }
  return older;
}

uint32_t Catalogue::instance(std::string_view name) const {
  const auto at = instances_.find(name.empty() ? std::string_view(instance_name_) : name);
  return at == instances_.end() ? 0 : at->second.id;
}

Result<const CatalogueTable*> Catalogue::find(std::string_view table,
                                              std::string_view instance) const {
  if (instance.empty()) PETPS_RETURN_IF_ERROR(model_status_);
  const auto owner =
      instances_.find(instance.empty() ? std::string_view(instance_name_) : instance);
  std::vector<std::string> names;
  if (owner == instances_.end()) {
    for (const auto& [name, tables] : instances_) names.push_back(name);
    return Status(Code::kNotFound, "instance '" + std::string(instance) + "' is unknown at " +
                                       peer_ + "; known: " + join_names(std::move(names)));
  }
  const auto at = owner->second.tables.find(table);
  if (at != owner->second.tables.end()) return &at->second;
  for (const auto& [name, entry] : owner->second.tables) names.push_back(name);
  return Status(Code::kNotFound, "table '" + std::string(table) + "' is unknown at " + peer_ +
                                     (model_.empty() ? "" : "/" + model_) +
                                     "; known: " + join_names(std::move(names)));
}

std::vector<Table> Catalogue::tables() const {
  const auto current = instances_.find(instance_name_);
  if (!model_status_.ok() || current == instances_.end()) return all_;
  std::vector<Table> tables;
  for (const auto& [name, entry] : current->second.tables) tables.push_back(entry.table);
  std::sort(tables.begin(), tables.end(),
            [](const Table& a, const Table& b) { return a.name < b.name; });
  return tables;
}

}  // namespace petps::client
