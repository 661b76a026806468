// Forwarder: what a router (native/router) needs of a client beyond its public functions. The
// router's callers name instances themselves, and their pushes have an order of their own.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "petps_client/choice.h"
#include "petps_client/client.h"
#include "wire/wire.h"

namespace petps::client {

// What a client knows of the servers of its model.
struct ClusterView {
  std::vector<ServerView> servers;
  std::vector<std::vector<uint32_t>> groups;  // by group: the numbers of its servers
  uint64_t map_version = 0;                   // 0: there is no map
};

struct ForwardedPush {
  std::string_view table;
  std::string_view instance;
  std::span<const uint64_t> keys;
  std::span<const std::byte> rows;  // as stored; those of deletions are missing
  bool deletes = false;
  uint32_t stamp = 0;
  wire::PushOrder order;  // of the caller; client 0: it has none
};

// Threads: all methods from any.
class Forwarder {
 public:
  // ASSUMPTION: the client outlives this object.
  explicit Forwarder(Client& client) : client_(client) {}

  // Read the names of one server now, and those of each server that none were read of.
  // Errors: those of Client::tables.
  base::Status read_names(uint32_t deadline_ms) const;
  ClusterView view() const;
  // Push or delete rows. Errors: those of Client::push_stored. `report` has what the servers
  // acknowledged, also after an error.
  base::Status push(const ForwardedPush& push, PushReport& report) const;
  // Send the hot keys of a table to the servers that own them.
  base::Status send_hot_keys(std::string_view table, std::string_view instance,
                             std::span<const uint64_t> keys) const;

 private:
  Client& client_;
};

}  // namespace petps::client
