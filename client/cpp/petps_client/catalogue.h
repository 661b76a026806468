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

// ASSUMPTIONS: immutable after build; shared by calls that are under way while a newer one replaces it.
class Catalogue {
 public:
  // `model` is that of the URL: an alias, instance or model, or empty.
  // Errors: kUnavailable when the reply contradicts itself (a table's dim, dtype or row bytes).
  static base::Result<std::shared_ptr<const Catalogue>> build(const wire::TablesReply& reply,
                                                              const std::string& model,
                                                              const std::string& peer);

  // Of `instance` by name, or of the one that the URL's model stands for when it is empty.
  // kNotFound: lists the tables, or the instances or models when that is not there; kInvalidArgument: no model was named and there are several.
  base::Result<const CatalogueTable*> find(std::string_view table,
                                           std::string_view instance = {}) const;
  // Its number here; 0: unknown, and the tables are of no single instance.
  uint32_t instance(std::string_view name = {}) const;
  // Of the URL's model; empty when it is not here.
  const std::string& instance_name() const { return instance_name_; }
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
    std::unordered_map<std::string, CatalogueTable, Hash, std::equal_to<>> tables;  // by name
  };
  base::Status choose_instance(const wire::TablesReply& reply, const std::string& model,
                               const std::string& peer);

  base::Status model_status_;
  std::string peer_;
  std::string model_;
  std::string instance_name_;
  std::unordered_map<std::string, Instance, Hash, std::equal_to<>> instances_;  // by name
  std::vector<Table> all_;
};

}  // namespace petps::client
