// Callers: who a router's clients are to the servers, and the connections that it keeps for them.
// Internal to router.
//
// A caller is a token, or none. Each has a client of its own: connections, names and answers of one
// are never those of another. The servers decide what a token may do, so the router has no grants.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "petps_client/client.h"
#include "petps_client/forward.h"
#include "router/names.h"

namespace petps::router {

// Logins of one host at the same time; further ones wait. Each may wait for servers that are away.
inline constexpr uint32_t kLoginsOfHost = 8;
// After this many refused tokens within kFailuresNs a host has one login at a time, so that who
// guesses tokens makes the servers count few failures. Further ones wait, or are refused.
inline constexpr uint32_t kFailuresMax = 10;
inline constexpr uint64_t kFailuresNs = 60'000'000'000;
// A token that is refused again so soon after it was ended is one that some servers know.
inline constexpr uint64_t kEndedNs = 1'000'000'000;
// Hosts whose failures are remembered.
inline constexpr size_t kHostsMax = 4096;

class Caller {
 public:
  explicit Caller(std::unique_ptr<client::Client> client);

  client::Client& client() { return *client_; }
  client::Forwarder forwarder() { return client::Forwarder(*client_); }
  Names& names() { return names_; }
  // The pool uuid that the caller's hello shows. Another uuid means other ids of tables.
  const std::array<uint8_t, 16>& uuid() const { return uuid_; }
  void note_use();
  uint64_t used_ns() const { return used_ns_.load(std::memory_order_relaxed); }

 private:
  const std::unique_ptr<client::Client> client_;
  Names names_;
  std::array<uint8_t, 16> uuid_{};
  std::atomic<uint64_t> used_ns_{0};
};
using CallerPointer = std::shared_ptr<Caller>;

struct CallersOptions {
  std::string servers;       // URL without a model
  client::Options client;    // without a token
  uint32_t callers = 256;    // tokens that the router serves at the same time
  uint64_t idle_ms = 0;      // a caller that is not used for this time loses its connections
  bool needs_token = false;  // refuse to serve servers that ask nobody for credentials
  // How long a refusal by the servers shows that they ask for them: they may be restarted without
  // an access file. Each look is a failed login there.
  uint64_t refusal_counts_ms = 60'000;
};

// Threads: any.
class Callers {
 public:
  explicit Callers(CallersOptions options) : options_(std::move(options)) {}
  ~Callers() { close(); }

  // Return the caller of this token; empty: of none. A new one is connected to the servers first,
  // which waits for them; several calls for one token share one login.
  // Errors: those of Client::connect (kUnauthenticated: the servers do not know the token);
  // kResourceExhausted (too many callers, or logins of this host).
  // waits: whether it may wait for another login of a host that guesses tokens.
  base::Result<CallerPointer> open(const std::string& token, const std::string& host, bool waits);
  // What open() would do for a token. kWait: wait for another login of the token or the host.
  enum class Place : uint8_t { kKnown, kLogin, kWait };
  Place look(const std::string& token, const std::string& host) const;
  // Forget a caller whose token a server does not know: its next hello asks the servers. Return
  // false if they were asked so just now: then they do not agree about the token.
  bool end(const CallerPointer& caller);
  // Drop the callers that nobody has used for idle_ms.
  void drop_idle();
  void close();  // all of them

  size_t size() const;
  uint64_t logins_failed() const { return failed_.load(std::memory_order_relaxed); }
  // Add up how the servers were for all callers.
  std::vector<client::ServerCounts> server_counts() const;
  client::PullCounts pull_counts() const;  // only the hedges, since the start

 private:
  struct Login {
    bool is_done = false;
    base::Status status;
    CallerPointer caller;
  };
  struct Host {
    uint32_t logins = 0;
    uint32_t failures = 0;
    uint64_t since_ns = 0;  // of the failures
  };
  using Clients = std::vector<CallerPointer>;

  base::Result<CallerPointer> connect(const std::string& token);
  base::Status check_credentials(const std::string& token, const client::Options& options);
  Host& host_locked(const std::string& host);
  static uint32_t logins_of(const Host& host);
  static bool has_recent_failures(const Host& host);
  base::Status keep_locked(const std::string& token, const CallerPointer& caller, Clients& dropped);
  void end_login_locked(const std::string& host, const base::Status& status);
  void retire_locked(CallerPointer& caller, Clients& dropped);
  static void destroy(Clients callers);

  const CallersOptions options_;
  std::atomic<uint64_t> failed_{0};
  std::atomic<uint64_t> refused_ns_{0};  // when the servers refused one without a token; 0: never
  mutable std::mutex mutex_;             // guards everything below
  std::condition_variable login_done_;
  std::map<std::string, CallerPointer> callers_;  // by token
  // Forgotten, and perhaps still used. The end of a client may take a second, so it is here.
  std::vector<CallerPointer> former_;
  std::map<std::string, uint64_t> ended_at_ns_;  // by token
  std::map<std::string, std::shared_ptr<Login>> logins_;
  std::map<std::string, Host> hosts_;
  client::PullCounts ended_;  // of callers that were dropped
};

}  // namespace petps::router
