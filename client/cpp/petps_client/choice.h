// Which instance of a model a call asks for, when servers mean different ones.
//
// Servers switch a model one after another; they die, come back late, are restored, change places
// behind an address. The rules (client/README.md, "While a model is being switched"):
//   1. Only servers that answer count.
//   2. Within a group, the newest instance that one of its servers means.
//   3. Over all groups, the newest instance that every group has a server for.
//   4. Never an instance older than the client has answered with, unless a pool that meant the newer
//      one has gone back: an operator switched it back.
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

// What is known of one server: null when nothing is.
struct ServerView {
  CataloguePointer catalogue;
  bool answers = true;
};
using GroupView = std::vector<ServerView>;

// The newest instance that this client has answered with. Threads: all methods from any.
class Answered {
 public:
  // Whether rows of what this server means may be answered: they are not known to be older.
  bool allows(const Catalogue& server) const;
  // An answer of `instance` was given. `known`: the catalogues of all servers, for their order.
  // An answer that began before a newer one was given changes nothing.
  void note(const std::string& instance, std::span<const CataloguePointer> known);
  std::string instance() const;  // empty: none yet
  // With the version that it had applied when it was noted: what told of it may be gone by now.
  struct Last {
    std::string instance;
    uint64_t version = 0;  // 0: none was told
  };
  Last last() const;
  bool is(const std::string& instance) const {
    return hash_.load(std::memory_order_acquire) == std::hash<std::string>()(instance);
  }

 private:
  bool allows_locked(const Catalogue& server) const;
  bool is_older(const std::string& instance, std::span<const CataloguePointer> known) const;

  std::atomic<size_t> hash_{0};  // of instance_: spares the lock where nothing has changed
  mutable std::mutex mutex_;     // guards everything below
  std::string instance_;
  uint64_t version_ = 0;                                  // of instance_
  std::unordered_set<std::string> older_;                 // known to be older than instance_
  std::map<std::array<uint8_t, 16>, uint64_t> counters_;  // of the pools when it was noted
};

struct Choice {
  std::string instance;         // empty: no server is known to mean one, or `too_old`
  bool all_agree = true;        // every server that counts means it
  std::string too_old;          // what the servers that answer mean, when nothing of it is allowed
  bool nobody_answers = false;  // then all servers count, by what was last known of them
};
Choice choose(std::span<const GroupView> groups, const Answered& answered);

}  // namespace petps::client
