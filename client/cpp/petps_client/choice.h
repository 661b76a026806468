// Choice of a model's instance for one call, when servers resolve the model differently.
//
// Servers switch a model one after another. They die, come back late, are restored from a copy,
// or swap places behind an address. A server's current instance is the one that the URL's model
// resolves to there. The rules (client/README.md, "While a model is being switched"):
//   1. Only live servers count.
//   2. Within a group (the owners of a partition), take the newest current instance of its
//      servers.
//   3. Across groups, take the newest instance that every group has a server for. Groups may have
//      servers in common.
//   4. Never take an instance older than one that the client has already returned rows of. The
//      exception is a pool that an operator switched to the newer one and then back.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "petps_client/catalogue.h"

namespace petps::client {

using CataloguePointer = std::shared_ptr<const Catalogue>;

// What the client knows of one server.
struct ServerView {
  CataloguePointer catalogue;  // null: unknown
  bool is_live = true;         // false: it counts as gone
};

// The newest instance that this client has returned rows of. Threads: all methods from any.
class NewestAnswer {
 public:
  // Return whether this server's current instance is allowed: it is not known to be older.
  bool allows(const Catalogue& server) const;
  // Record that a call returned rows of `instance`. `known`: the catalogues of all servers, which
  // order the instances. A call that began before a newer instance was recorded changes nothing.
  void record(const std::string& instance, std::span<const CataloguePointer> known);
  std::string instance() const;  // empty: none yet
  // The instance with the version that it had applied when it was recorded. The servers that
  // reported that version may be gone by now.
  struct Last {
    std::string instance;
    uint64_t version = 0;  // 0: unknown
  };
  Last last() const;
  bool is(const std::string& instance) const {
    return hash_.load(std::memory_order_acquire) == std::hash<std::string>()(instance);
  }

 private:
  bool allows_locked(const Catalogue& server) const;
  bool is_older(const std::string& instance, std::span<const CataloguePointer> known) const;

  std::atomic<size_t> hash_{0};  // of instance_; readers skip the lock when it has not changed
  mutable std::mutex mutex_;     // guards everything below
  std::string instance_;
  uint64_t version_ = 0;                   // of instance_
  std::unordered_set<std::string> older_;  // instances known to be older than instance_
  // The counter of each pool, by uuid, when instance_ was recorded.
  std::map<std::array<uint8_t, 16>, uint64_t> counters_;
};

// The instance that one call requests.
struct Choice {
  std::string instance;   // empty: no server has a current instance, or all of them are too old
  bool all_agree = true;  // all servers that count have the same current instance
  std::string too_old;    // the current instances of the servers, when none of them is allowed
  bool no_server_is_live = false;  // no server is live, so all count with their last known state
};
// Choose by these rules. Dead servers count only when no live one has a current instance.
// groups: the numbers of the servers of each group.
Choice choose(std::span<const ServerView> servers, std::span<const std::vector<uint32_t>> groups,
              const NewestAnswer& newest_answer);

}  // namespace petps::client
