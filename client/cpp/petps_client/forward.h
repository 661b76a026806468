// Forwarder: what a router (native/router) needs of a client beyond its public functions. The
// router's callers name instances themselves, and their pushes have an order of their own.
#pragma once

#include <poll.h>

#include <cstdint>
#include <memory>
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

// A pull whose requests were sent without waiting, for a caller with an epoll of its own.
// ASSUMPTIONS: the client, and what start_pull() was given, outlive it. Threads: one at a time.
class StartedPull {
 public:
  // kWaiting: more has to arrive. kDone: finish() does not wait. kUnusual: a server has answered
  // with an error, or has failed; finish() may wait.
  enum class State : uint8_t { kWaiting, kDone, kUnusual };

  ~StartedPull();  // gives up the replies that are due, if it was not finished
  // Return the connections that it waits for, with the events; valid until the next call.
  std::span<const pollfd> awaited();
  // Return when to call finish() although nothing has arrived, by base::monotonic_ns.
  uint64_t due_ns() const;
  // Take what has arrived on the connection with this file. A file that it does not wait for
  // changes nothing.
  State advance(int file);
  // Wait for the rest, ask again what has failed, and return the result of Client::pull_many. The
  // keys are not sampled for the hot set. This is the last call.
  base::Result<PullReport> finish();

 private:
  friend class Forwarder;
  struct Impl;
  explicit StartedPull(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
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
  // Have one server look at the caller's token, and count a request in its limits. Errors: those of
  // Client::tables.
  base::Status check_caller(uint32_t deadline_ms) const;
  // Have one server decide whether the caller may pull from a table now: its token, its role and
  // its limits. No rows are asked for. Errors: those of Client::pull_many.
  base::Status check_pull(std::string_view table, std::string_view instance,
                          uint32_t deadline_ms) const;
  // Send the requests of a pull of a named instance, as Client::pull_many would, if nothing has to
  // be waited for: connections are free, and the names are known. Null: call pull_many.
  // ASSUMPTION: the arrays are as long as TablePull says.
  std::unique_ptr<StartedPull> start_pull(std::span<const TablePull> pulls,
                                          const PullOptions& options) const;
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
