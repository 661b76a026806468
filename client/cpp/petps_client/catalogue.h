// The tables of one server as it last told them, checked.
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

struct CatalogueTable {
  uint32_t id = 0;
  Table table;
  std::vector<std::byte> default_stored;  // row_bytes
  std::vector<float> default_values;      // dim
};

// An instance that a pool meant before, seen or told by the pool itself.
struct LeftInstance {
  std::string name;
  uint32_t id = 0;
  uint64_t counter = 0;  // of the first reply that showed the pool without it
};

// ASSUMPTIONS: immutable after build and follow; shared by calls that are under way while a newer one replaces it.
class Catalogue {
 public:
  // `model` is that of the URL: an alias, instance or model, or empty.
  // Errors: kUnavailable when the reply contradicts itself (a table's dim, dtype or row bytes).
  static base::Result<std::shared_ptr<Catalogue>> build(const wire::TablesReply& reply,
                                                        const std::string& model,
                                                        const std::string& peer);
  // Remembers what the pool meant in `before`, an earlier catalogue of the same pool.
  void follow(const Catalogue& before);

  // Of `instance` by name, or of the one that the URL's model stands for when it is empty.
  // kNotFound: lists the tables, or the instances or models when that is not there; kInvalidArgument: no model was named and there are several.
  base::Result<const CatalogueTable*> find(std::string_view table,
                                           std::string_view instance = {}) const;
  // Its number here; 0: unknown, and the tables are of no single instance.
  uint32_t instance(std::string_view name = {}) const;
  // Of the URL's model; empty when it is not here.
  const std::string& instance_name() const { return instance_name_; }
  // Which pool, and which state of it; counter 0: a server of an earlier release.
  const wire::CatalogueState& state() const { return state_; }
  // Whether the server can be asked for all rows of this instance: it means it, or has gone on to a
  // later one since. Of two instances of a pool the one made later has the higher number.
  bool reaches(std::string_view instance) const;
  // The counter of the first reply that showed the pool without it as its meaning; 0: not known.
  uint64_t left_at(std::string_view instance) const;
  // 1: `a` is known here to be older than `b`; -1: newer; 0: not known here.
  int order(std::string_view a, std::string_view b) const;
  // The version that the instance had applied here; 0: none, or not listed. Versions grow over all
  // instances of a model.
  uint64_t applied_version(std::string_view instance) const;
  // The instances that are known here to be older than `instance`.
  std::vector<std::string> older_than(std::string_view instance) const;
  // Whether the URL's model is here.
  base::Status model_status() const { return model_status_; }
  std::vector<Table> tables() const;  // of the URL's model, or all when there is no single one

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
  uint32_t number_of(std::string_view name) const;  // also of one that the pool has left
  void leave(LeftInstance left);

  wire::CatalogueState state_;
  std::vector<LeftInstance> left_;
  base::Status model_status_;
  std::string peer_;
  std::string model_;
  std::string instance_name_;
  std::unordered_map<std::string, Instance, Hash, std::equal_to<>> instances_;  // by name
  std::vector<Table> all_;
};

}  // namespace petps::client
