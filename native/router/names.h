// The tables that one caller sees: what its servers list, under numbers of the router's own.
// Internal to router.
//
// Servers give the same table different ids. So the router gives instances and tables ids of its
// own. They are good for one caller (Caller::uuid) and are never reused.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "petps_client/forward.h"
#include "wire/wire.h"

namespace petps::router {

// Return whether servers refuse the token. After several refused ones of a host they say
// kResourceExhausted, which alone may also mean that they have no room.
bool is_failed_login(const base::Status& status);
// The same, but not for other reasons of kUnauthenticated, such as a server's certificate.
bool is_revoked(const base::Status& status);

// ASSUMPTION: immutable once it is published.
struct Listing {
  wire::TablesReply reply;  // what the caller is sent; tables ascend by id
  // The positions of the tables in the reply, by instance and name.
  std::map<uint32_t, std::map<std::string, size_t, std::less<>>> tables_of;

  void index();  // fills tables_of

  // Return null for an unknown id.
  const wire::TableInfo* table(uint32_t id) const;
  const wire::InstanceInfo* instance(uint32_t id) const;
  // Return the instance that an alias, instance or model names; empty: the only model's.
  // Errors: kNotFound (lists what is known), kInvalidArgument (there are several models).
  base::Result<const wire::InstanceInfo*> resolve(std::string_view model) const;
  // Errors: kNotFound (lists the instance's tables).
  base::Result<const wire::TableInfo*> find(const wire::InstanceInfo& instance,
                                            std::string_view table) const;
};
using ListingPointer = std::shared_ptr<const Listing>;

// Threads: any.
class Names {
 public:
  // List what the client knows of its servers now, and return the list. An instance is listed if
  // the owners of every partition have it. An alias names the instance that a pull by this name
  // would choose (petps_client/choice.h), so the list never goes back to an older instance.
  ListingPointer update(const client::Forwarder& servers);
  ListingPointer listing() const;
  // Return a list that is at most a second old; ask a server if it is older.
  // Errors: kPermissionDenied, or one of is_failed_login() (the token has ended).
  base::Result<ListingPointer> recent(const client::Forwarder& servers, uint32_t deadline_ms);

 private:
  using TableName = std::pair<std::string, std::string>;  // instance, table

  void add_aliases(const client::ClusterView& view, wire::TablesReply& reply);
  void add_instances(const client::ClusterView& view, wire::TablesReply& reply);
  void add_tables(const client::ClusterView& view, wire::TablesReply& reply);
  std::string choose(const std::string& alias, const client::ClusterView& view);

  std::mutex asking_;    // of the call that asks a server for newer names
  std::mutex updating_;  // one update at a time; guards everything but listing_
  uint32_t next_instance_ = 1;
  uint32_t next_table_ = 1;
  std::map<std::string, uint32_t> instances_;  // of the last list
  std::map<TableName, uint32_t> tables_;
  std::map<std::string, std::string> aliases_;                           // the instance of each
  std::map<std::string, std::unique_ptr<client::NewestAnswer>> newest_;  // by alias

  mutable std::mutex mutex_;  // guards listing_ and updated_ns_
  ListingPointer listing_ = std::make_shared<Listing>();
  uint64_t updated_ns_ = 0;
};

}  // namespace petps::router
