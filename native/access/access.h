// Room access: who a caller is, and what it may do. petps/server/DOORS.md describes the rules.
//
// Owns:        the grants in use; the one function that authenticates, for every door; the limits
//              of each grant; the counters of refused callers.
// Never does:  read files, keep a token, know sockets, tables or opcodes.
// Called by:   server (native connections), bindings (gRPC, HTTP and administration).
// Invariants:  a token is compared with every hash, each in constant time; no error says whether a
//              model or table exists; an open gate admits everybody, any other one nobody without a
//              credential.
// Threads:     any.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace petps::access {

// Bits of a set. No role includes another one.
enum class Role : uint8_t { kRead = 1, kWrite = 2, kAdmin = 4 };
using Roles = uint8_t;
inline constexpr Roles kAllRoles = 7;
std::string_view role_name(Role role);  // "read"

using TokenHash = std::array<uint8_t, 32>;  // SHA-256
TokenHash hash_token(std::string_view token);

// A request is admitted while its grant is at most this long ahead of its rate: a burst of one
// second's worth.
inline constexpr uint64_t kBurstNs = 1'000'000'000;
// After this many failed logins within kFailuresNs a peer gets another error, and its further
// failures are not reported one by one.
inline constexpr uint32_t kFailuresMax = 10;
inline constexpr uint64_t kFailuresNs = 60'000'000'000;
// Addresses whose failures are remembered. Further ones replace the oldest.
inline constexpr size_t kPeersMax = 4096;

// One entry of the access file.
struct Grant {
  std::string name;  // no secret: errors and statistics show it
  bool has_token = false;
  TokenHash token{};        // if has_token
  std::string certificate;  // if not has_token: a name of the client certificate
  Roles roles = 0;
  std::vector<std::string> models;   // empty: all
  uint64_t requests_per_second = 0;  // 0: no limit
  uint64_t bytes_per_second = 0;     // 0: no limit; requests and replies
  uint64_t expires_s = 0;            // seconds since 1970; 0: never

  bool operator==(const Grant&) const = default;
};

// A limit of one rate, as one atomic word: the generic cell rate algorithm.
class Rate {
 public:
  explicit Rate(uint64_t per_second) : per_second_(per_second) {}
  // Return whether the next request may come now.
  bool admits(uint64_t now_ns) const {
    return per_second_ == 0 || ahead_ns_.load(std::memory_order_relaxed) <= now_ns + kBurstNs;
  }
  // Count `n` units, whether they were admitted or not.
  void spend(uint64_t n, uint64_t now_ns);

 private:
  const uint64_t per_second_;
  std::atomic<uint64_t> ahead_ns_{0};  // when everything so far would be within the rate
};

// A caller that was authenticated: its grant and what it has used of its limits.
class Caller {
 public:
  Caller(Grant grant, bool is_anyone);

  const std::string& name() const { return grant_.name; }
  const Grant& grant() const { return grant_; }
  // Return whether the gate is open, so that this caller is anyone.
  bool is_anyone() const { return is_anyone_; }
  bool is_expired(uint64_t now_s) const {
    return grant_.expires_s != 0 && now_s >= grant_.expires_s;
  }

  // Return whether it has the role for every model, also for those that do not exist yet.
  bool may_everywhere(Role role) const {
    return grant_.models.empty() && (grant_.roles & static_cast<Roles>(role)) != 0;
  }
  bool may(Role role, std::string_view model) const {
    return (grant_.roles & static_cast<Roles>(role)) != 0 && knows(model);
  }
  // Return whether it has any role for the model, so that its name may be shown.
  bool knows(std::string_view model) const;
  // Return whether it may see what concerns the whole server: the status and the metrics.
  bool may_see_all() const { return may_everywhere(Role::kRead) || may_everywhere(Role::kAdmin); }

  // Count a request of `bytes`. Errors: kResourceExhausted (names the grant and its limit).
  base::Status charge(uint64_t bytes);
  // Count bytes of a reply.
  void spend_bytes(uint64_t bytes);
  bool has_limits() const {
    return grant_.requests_per_second != 0 || grant_.bytes_per_second != 0;
  }

  // Return PERMISSION_DENIED for a caller without the role. `what` is "table 7" or "model 'x'".
  base::Status refuse(Role role, std::string_view what) const;

 private:
  const Grant grant_;
  const bool is_anyone_;
  Rate requests_;
  Rate bytes_;
};
using CallerPointer = std::shared_ptr<Caller>;

struct Credentials {
  std::string_view token;                          // "" : none
  std::span<const std::string> certificate_names;  // verified by TLS; empty: none
  std::string_view peer;  // the address, for the count of failures: "10.0.0.7:51234"
};

enum class Mode : uint8_t {
  kOpen,          // nobody is asked
  kCertificates,  // every verified certificate may read and write all models
  kGrants,        // what the grants say
};

struct Counts {
  uint64_t logins_failed = 0;
  uint64_t requests_denied = 0;   // PERMISSION_DENIED
  uint64_t requests_limited = 0;  // beyond a grant's limits
};

class Gate {
 public:
  explicit Gate(Mode mode = Mode::kOpen);

  Mode mode() const { return mode_; }
  // Use these grants from now on. A grant that has not changed keeps its callers and their limits.
  void replace(std::vector<Grant> grants);
  // Return how often the grants were replaced.
  uint64_t generation() const { return generation_.load(std::memory_order_acquire); }

  // Return the caller. A token decides alone, also beside a certificate.
  // Errors: kUnauthenticated; kResourceExhausted after too many failures of this peer.
  base::Result<CallerPointer> authenticate(const Credentials& credentials);
  // Return the caller that this one is by the present grants; null if it is revoked or expired.
  CallerPointer renew(const CallerPointer& caller) const;

  Counts counts() const;
  size_t peers_remembered() const;  // of failed logins
  void count_denied() { denied_.fetch_add(1, std::memory_order_relaxed); }
  void count_limited() { limited_.fetch_add(1, std::memory_order_relaxed); }

 private:
  struct Grants {
    std::vector<CallerPointer> tokens;
    // The same for renew(), whose callers have shown their tokens: it need not take constant time.
    std::map<TokenHash, CallerPointer> by_hash;
    std::map<std::string, CallerPointer, std::less<>> certificates;
  };
  struct Failures {
    uint32_t count = 0;
    uint64_t since_ns = 0;
  };

  std::shared_ptr<const Grants> grants() const {
    const std::lock_guard lock(mutex_);
    return grants_;
  }
  base::Result<CallerPointer> find(const Credentials& credentials) const;
  base::Status count_failure(std::string_view peer, base::Status reason);

  const Mode mode_;
  const CallerPointer anyone_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<uint64_t> denied_{0};
  std::atomic<uint64_t> limited_{0};
  std::atomic<uint64_t> failed_{0};
  mutable std::mutex mutex_;  // guards grants_
  std::shared_ptr<const Grants> grants_ = std::make_shared<Grants>();
  mutable std::mutex failures_mutex_;  // guards failures_
  std::map<std::string, Failures, std::less<>> failures_;
};

}  // namespace petps::access
