#include "petps_client/catalogue.h"

#include <algorithm>

namespace petps::client {

using base::Code;
using base::Result;
using base::Status;

namespace {

// A longer list of names would make an error unreadable.
constexpr size_t kMaxNamesShown = 20;
// Limit of left instances per pool. A pool has fewer, and switches are hours apart.
constexpr size_t kMaxLeft = 64;

std::string list_of(std::vector<std::string> names) {
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
  std::string wrong;
  if (!codec::is_dtype(info.dtype)) {
    return Status(Code::kUnimplemented, peer + ": table '" + info.name + "' has dtype number " +
                                            std::to_string(info.dtype) +
                                            ", which this client does not know: upgrade it");
  }
  if (info.dim < 1 || info.dim > kMaxDim)
    wrong = "dim " + std::to_string(info.dim) + " is outside 1..4096";
  if (wrong.empty() &&
      info.row_bytes != codec::row_bytes(static_cast<codec::Dtype>(info.dtype), info.dim)) {
    wrong = std::to_string(info.row_bytes) + " row bytes do not fit its dim and dtype";
  }
  if (wrong.empty() && !info.default_row.empty() && info.default_row.size() != info.row_bytes) {
    wrong = "its default row has another length than its rows";
  }
  if (wrong.empty()) return {};
  return Status(Code::kUnavailable,
                peer + ": the server broke the protocol: table '" + info.name + "': " + wrong);
}

CatalogueTable entry_of(const wire::TableInfo& info, Table table) {
  CatalogueTable entry;
  entry.id = info.id;
  entry.default_stored = info.default_row;
  entry.default_stored.resize(info.row_bytes);
  entry.default_values.resize(info.dim);
  codec::decode(table.dtype, entry.default_stored.data(), 1, info.dim, entry.default_values.data());
  entry.table = std::move(table);
  return entry;
}

}  // namespace

Status Catalogue::choose_instance(const wire::TablesReply& reply, const std::string& model,
                                  const std::string& peer) {
  std::vector<std::string> models;
  for (const wire::InstanceInfo& info : reply.instances) models.push_back(info.model);
  std::string wanted = model;
  if (model.empty()) {
    const bool single =
        !models.empty() && std::all_of(models.begin(), models.end(),
                                       [&](const std::string& name) { return name == models[0]; });
    if (!single && !models.empty()) {
      return Status(Code::kInvalidArgument,
                    peer + " has several models: name one in the URL, petps://" + peer +
                        "/<model>; there are: " + list_of(models));
    }
    if (models.empty()) return Status(Code::kNotFound, peer + " has no tables yet");
    wanted = models[0];
  }
  for (const wire::AliasInfo& alias : reply.aliases) {
    if (alias.name != wanted) continue;
    for (const wire::InstanceInfo& info : reply.instances) {
      if (info.id == alias.instance) instance_name_ = info.name;
      if (info.id == alias.previous && alias.previous != alias.instance)
        left_.push_back({info.name, info.id, state_.counter});
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
    models.push_back(info.name);
  }
  if (newest != nullptr) {
    instance_name_ = newest->name;
    return {};
  }
  for (const wire::AliasInfo& alias : reply.aliases) models.push_back(alias.name);
  return Status(Code::kNotFound,
                "model '" + wanted + "' is unknown at " + peer + "; known: " + list_of(models));
}

Result<std::shared_ptr<Catalogue>> Catalogue::build(const wire::TablesReply& reply,
                                                    const std::string& model,
                                                    const std::string& peer) {
  auto catalogue = std::make_shared<Catalogue>();
  catalogue->state_ = reply.state;
  catalogue->peer_ = peer;
  catalogue->model_ = model;
  catalogue->model_status_ = catalogue->choose_instance(reply, model, peer);
  for (const wire::InstanceInfo& info : reply.instances) {
    Instance& instance = catalogue->instances_[info.name];
    instance.id = info.id;
    instance.applied_version = info.applied_version;
  }
  for (const wire::TableInfo& info : reply.tables) {
    PETPS_RETURN_IF_ERROR(check_table(info, peer));
    Table table;
    table.name = info.name;
    for (const wire::InstanceInfo& instance : reply.instances) {
      if (instance.id != info.instance) continue;
      table.model = instance.model;
      table.instance = instance.name;
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
    instance->second.tables.insert_or_assign(info.name, entry_of(info, std::move(table)));
  }
  return catalogue;
}

void Catalogue::leave(LeftInstance left) {
  if (left.id == 0 || left.name == instance_name_) return;
  const auto at = std::find_if(left_.begin(), left_.end(),
                               [&](const LeftInstance& known) { return known.name == left.name; });
  if (at != left_.end()) {
    at->counter = std::min(at->counter, left.counter);
  } else if (left_.size() < kMaxLeft) {
    left_.push_back(std::move(left));
  }
}

void Catalogue::follow(const Catalogue& before) {
  const std::string& meant = before.instance_name_;
  // `before` has no record of its own current instance (see leave). So a pool that returned to an
  // instance and leaves it again is counted from this second time.
  if (meant != instance_name_) leave({meant, before.instance(meant), state_.counter});
  for (const LeftInstance& left : before.left_) leave(left);
}

uint32_t Catalogue::number_of(std::string_view name) const {
  const auto at = instances_.find(name);
  if (at != instances_.end()) return at->second.id;
  for (const LeftInstance& left : left_) {
    if (left.name == name) return left.id;
  }
  return 0;
}

bool Catalogue::reaches(std::string_view name) const {
  const auto at = instances_.find(name);
  if (at == instances_.end()) return false;
  const uint32_t meant = instance();
  return meant == 0 || at->second.id <= meant;
}

uint64_t Catalogue::applied_version(std::string_view name) const {
  const auto at = instances_.find(name);
  return at == instances_.end() ? 0 : at->second.applied_version;
}

uint64_t Catalogue::left_at(std::string_view name) const {
  for (const LeftInstance& left : left_) {
    if (left.name == name) return left.counter;
  }
  return 0;
}

int Catalogue::order(std::string_view a, std::string_view b) const {
  const uint32_t first = number_of(a);
  const uint32_t second = number_of(b);
  if (first == 0 || second == 0 || first == second) return 0;
  return first < second ? 1 : -1;
}

std::vector<std::string> Catalogue::older_than(std::string_view name) const {
  std::vector<std::string> older;
  const uint32_t number = number_of(name);
  for (const auto& [other, instance] : instances_) {
    if (instance.id < number) older.push_back(other);
  }
  for (const LeftInstance& left : left_) {
    if (left.id < number) older.push_back(left.name);
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
  const auto of = instances_.find(instance.empty() ? std::string_view(instance_name_) : instance);
  std::vector<std::string> names;
  if (of == instances_.end()) {
    for (const auto& [name, tables] : instances_) names.push_back(name);
    return Status(Code::kNotFound, "instance '" + std::string(instance) + "' is unknown at " +
                                       peer_ + "; known: " + list_of(std::move(names)));
  }
  const auto at = of->second.tables.find(table);
  if (at != of->second.tables.end()) return &at->second;
  for (const auto& [name, entry] : of->second.tables) names.push_back(name);
  return Status(Code::kNotFound, "table '" + std::string(table) + "' is unknown at " + peer_ +
                                     (model_.empty() ? "" : "/" + model_) +
                                     "; known: " + list_of(std::move(names)));
}

std::vector<Table> Catalogue::tables() const {
  const auto of = instances_.find(instance_name_);
  if (!model_status_.ok() || of == instances_.end()) return all_;
  std::vector<Table> tables;
  for (const auto& [name, entry] : of->second.tables) tables.push_back(entry.table);
  std::sort(tables.begin(), tables.end(),
            [](const Table& a, const Table& b) { return a.name < b.name; });
  return tables;
}

}  // namespace petps::client
