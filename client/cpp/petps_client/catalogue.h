// The checked list of tables that a server last sent.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "codec/codec.h"
#include "petps_client/client.h"
#include "wire/wire.h"

namespace petps::client {

// One table of an instance, with its default row in both forms.
struct CatalogueTable {
  uint32_t id = 0;
  Table table;
  // Empty if the default row is all zeros, as of most tables. A list of many such tables must not
  // take more memory than its frame justifies.
  std::vector<std::byte> default_stored;  // row_bytes bytes
  std::vector<float> default_values;      // dim values

  // Return the default row in this form, aligned for it.
  const std::byte* default_row(Form form) const;
};

// An instance that the pool's alias resolved to earlier. The client knows it from an earlier
// catalogue, or from the previous instance that the pool records for the alias.
struct FormerInstance {
  std::string name;
  uint32_t id = 0;
  uint64_t counter = 0;  // of the first reply in which the pool no longer resolves to it
};

// The tables and instances of one server.
//
// The current instance is the one that the URL's model resolves to on this server.
// ASSUMPTIONS: immutable after build and record_former. Calls in flight share it while a newer one
// replaces it.
class Catalogue {
 public:
  // Build a catalogue from a reply. `model` is the model of the URL: an alias, an instance, a
  // model, or empty.
  // Errors: kUnavailable when the reply contradicts itself (a table's dim, dtype or row bytes).
  static base::Result<std::shared_ptr<Catalogue>> build(const wire::TablesReply& reply,
                                                        const std::string& model,
                                                        const std::string& peer);
  // Record the pool's former instances. `before`: an earlier catalogue of the same pool.
  void record_former(const Catalogue& before);

  // Find a table of `instance`, or of the current instance when `instance` is empty.
  // Errors: kNotFound (lists the known tables, instances or models); kInvalidArgument (the URL
  // names no model and the server has several).
  base::Result<const CatalogueTable*> find(std::string_view table,
                                           std::string_view instance = {}) const;
  // Return the id of the instance here, or of the current one when `name` is empty. 0: unknown,
  // or the URL's model resolves to no single instance.
  uint32_t instance(std::string_view name = {}) const;
  // Return the name of the current instance; empty when the URL's model is unknown here.
  const std::string& instance_name() const { return instance_name_; }
  // Return the reply that this was built from.
  const wire::TablesReply& reply() const { return reply_; }
  // Return the pool's uuid and its counter of changes; counter 0: a server of an earlier release.
  const wire::CatalogueState& state() const { return reply_.state; }
  // Return whether the server can serve all rows of this instance: it is the current one, or the
  // server has switched to a later one since. Within a pool a later instance has a higher id.
  bool can_serve(std::string_view instance) const;
  // Return the counter of the first reply in which the pool no longer resolved to the
  // instance; 0: unknown.
  uint64_t switched_away_at(std::string_view instance) const;
  // Return 1 if `a` is known here to be older than `b`, -1 if newer, 0 if unknown here.
  int order(std::string_view a, std::string_view b) const;
  // Return the version that the instance had applied here; 0: none, or the instance is not
  // listed. Versions grow across all instances of a model.
  uint64_t applied_version(std::string_view instance) const;
  // Return the instances that are known here to be older than `instance`.
  std::vector<std::string> older_than(std::string_view instance) const;
  // Return OK if the URL's model is known here, else the error that says why not.
  base::Status model_status() const { return model_status_; }
  // Return the tables of the current instance, or all tables when there is no current instance.
  std::vector<Table> tables() const;

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  struct Instance {
    uint32_t id = 0;
    uint64_t applied_version = 0;
    std::unordered_map<std::string, CatalogueTable, Hash, std::equal_to<>> tables;  // by name
  };
  base::Status choose_instance(const wire::TablesReply& reply, const std::string& model,
                               const std::string& peer);
  uint32_t id_of(std::string_view name) const;  // also finds former instances
  void add_former(FormerInstance former);

  wire::TablesReply reply_;
  std::vector<FormerInstance> former_;
  base::Status model_status_;
  std::string peer_;
  std::string model_;
  std::string instance_name_;
  std::unordered_map<std::string, Instance, Hash, std::equal_to<>> instances_;  // by name
  std::vector<Table> all_;
};

}  // namespace petps::client
