#include "access/access.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <algorithm>
#include <chrono>

#include "base/check.h"
#include "base/clock.h"
#include "base/peer.h"

namespace petps::access {

using base::Code;
using base::Result;
using base::Status;

namespace {

uint64_t seconds_now() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(
                                   std::chrono::system_clock::now().time_since_epoch())
                                   .count());
}

Grant everything(std::string name, Roles roles) {
  Grant grant;
  grant.name = std::move(name);
  grant.roles = roles;
  return grant;
}

}  // namespace

std::string_view role_name(Role role) {
  switch (role) {
    case Role::kRead:
      return "read";
    case Role::kWrite:
      return "write";
    case Role::kAdmin:
      return "admin";
  }
  return "unknown";
}

TokenHash hash_token(std::string_view token) {
  TokenHash hash{};
  unsigned size = 0;
  const bool is_hashed =
      EVP_Digest(token.data(), token.size(), hash.data(), &size, EVP_sha256(), nullptr) == 1;
  PETPS_CHECK(is_hashed && size == hash.size(), "SHA-256 of OpenSSL failed");
  return hash;
}

// ---- Rate

void Rate::spend(uint64_t n, uint64_t now_ns) {
  if (per_second_ == 0 || n == 0) return;
  // The largest n is a frame's bytes, so the product fits.
  const uint64_t cost_ns = n * 1'000'000'000 / per_second_;
  uint64_t ahead = ahead_ns_.load(std::memory_order_relaxed);
  while (!ahead_ns_.compare_exchange_weak(ahead, std::max(ahead, now_ns) + cost_ns,
                                          std::memory_order_relaxed)) {
  }
}

// ---- Caller

Caller::Caller(Grant grant, bool is_anyone)
    : grant_(std::move(grant)),
      is_anyone_(is_anyone),
      requests_(grant_.requests_per_second),
      bytes_(grant_.bytes_per_second) {}

bool Caller::knows(std::string_view model) const {
  return grant_.models.empty() ||
         std::find(grant_.models.begin(), grant_.models.end(), model) != grant_.models.end();
}

Status Caller::charge(uint64_t bytes) {
  if (!has_limits()) return {};
  const uint64_t now = base::monotonic_ns();
  const bool has_requests = requests_.admits(now);
  if (!has_requests || !bytes_.admits(now)) {
    return Status(Code::kResourceExhausted,
                  "'" + grant_.name + "' has used up its " +
                      (has_requests ? std::to_string(grant_.bytes_per_second) + " bytes"
                                    : std::to_string(grant_.requests_per_second) + " requests") +
                      " a second: send less, or ask the operator to raise the limit of its grant");
  }
  requests_.spend(1, now);
  bytes_.spend(bytes, now);
  return {};
}

void Caller::spend_bytes(uint64_t bytes) {
  if (grant_.bytes_per_second != 0) bytes_.spend(bytes, base::monotonic_ns());
}

Status Caller::refuse(Role role, std::string_view what) const {
  return Status(Code::kPermissionDenied,
                "'" + grant_.name + "' has no role '" + std::string(role_name(role)) + "' for " +
                    std::string(what) +
                    ", or it does not exist: ask the operator for another grant");
}

// ---- Gate

Gate::Gate(Mode mode)
    : mode_(mode),
      anyone_(mode == Mode::kOpen ? std::make_shared<Caller>(everything("anyone", kAllRoles), true)
                                  : nullptr) {}

void Gate::replace(std::vector<Grant> grants) {
  const auto old = this->grants();
  auto next = std::make_shared<Grants>();
  for (Grant& grant : grants) {
    if (grant.has_token) {
      const auto same = std::find_if(old->tokens.begin(), old->tokens.end(),
                                     [&](const auto& caller) { return caller->grant() == grant; });
      next->tokens.push_back(
          same != old->tokens.end() ? *same : std::make_shared<Caller>(std::move(grant), false));
      const CallerPointer& caller = next->tokens.back();
      next->by_hash.emplace(caller->grant().token, caller);
      continue;
    }
    const auto same = old->certificates.find(grant.certificate);
    const bool is_same = same != old->certificates.end() && same->second->grant() == grant;
    std::string name = grant.certificate;
    next->certificates[std::move(name)] =
        is_same ? same->second : std::make_shared<Caller>(std::move(grant), false);
  }
  {
    const std::lock_guard lock(mutex_);
    grants_ = std::move(next);
  }
  generation_.fetch_add(1, std::memory_order_release);
}

Result<CallerPointer> Gate::find(const Credentials& credentials) const {
  const auto grants = this->grants();
  if (!credentials.token.empty()) {
    const TokenHash hash = hash_token(credentials.token);
    CallerPointer found;
    for (const CallerPointer& caller : grants->tokens) {
      if (CRYPTO_memcmp(caller->grant().token.data(), hash.data(), hash.size()) == 0)
        found = caller;
    }
    if (found != nullptr && !found->is_expired(seconds_now())) return found;
    return Status(Code::kUnauthenticated,
                  std::string(base::kUnknownToken) +
                      ", or is revoked or expired: ask the operator for another one (petps token "
                      "new)");
  }
  for (const std::string& name : credentials.certificate_names) {
    if (mode_ == Mode::kCertificates)
      return std::make_shared<Caller>(
          everything(name, static_cast<Roles>(Role::kRead) | static_cast<Roles>(Role::kWrite)),
          false);
    const auto found = grants->certificates.find(name);
    if (found != grants->certificates.end() && !found->second->is_expired(seconds_now()))
      return found->second;
  }
  if (!credentials.certificate_names.empty()) {
    return Status(Code::kUnauthenticated,
                  "no grant of this server is for the client certificate of '" +
                      credentials.certificate_names[0] +
                      "': ask the operator for one (petps token new --certificate)");
  }
  return Status(Code::kUnauthenticated,
                std::string(base::kNeedsCredential) +
                    (mode_ == Mode::kCertificates
                         ? "client certificate"
                         : "token or a client certificate: give token=, --token-file or "
                           "PETPS_TOKEN_FILE"));
}

Result<CallerPointer> Gate::authenticate(const Credentials& credentials) {
  if (mode_ == Mode::kOpen) return anyone_;
  Result<CallerPointer> found = find(credentials);
  if (found.ok()) return found;
  return count_failure(base::host_of(credentials.peer), found.status());
}

Status Gate::count_failure(std::string_view peer, Status reason) {
  failed_.fetch_add(1, std::memory_order_relaxed);
  const uint64_t now = base::monotonic_ns();
  const std::lock_guard lock(failures_mutex_);
  auto at = failures_.find(peer);
  if (at == failures_.end()) {
    if (failures_.size() >= kPeersMax) {
      failures_.erase(std::min_element(
          failures_.begin(), failures_.end(),
          [](const auto& a, const auto& b) { return a.second.since_ns < b.second.since_ns; }));
    }
    at = failures_.emplace(std::string(peer), Failures{}).first;
  }
  Failures& failures = at->second;
  if (failures.count == 0 || now - failures.since_ns > kFailuresNs) failures = {0, now};
  if (++failures.count <= kFailuresMax) return reason;
  return Status(Code::kResourceExhausted,
                "more than " + std::to_string(kFailuresMax) + std::string(base::kFailedLogins) +
                    std::string(peer) +
                    " within a minute; the last: " + std::string(reason.message()));
}

CallerPointer Gate::renew(const CallerPointer& caller) const {
  if (mode_ != Mode::kGrants) return caller;  // certificates were verified when they connected
  const auto grants = this->grants();
  CallerPointer now;
  if (caller->grant().has_token) {
    const auto same = grants->by_hash.find(caller->grant().token);
    if (same != grants->by_hash.end()) now = same->second;
  } else {
    const auto same = grants->certificates.find(caller->grant().certificate);
    if (same != grants->certificates.end()) now = same->second;
  }
  return now == nullptr || now->is_expired(seconds_now()) ? nullptr : now;
}

Counts Gate::counts() const {
  return {failed_.load(std::memory_order_relaxed), denied_.load(std::memory_order_relaxed),
          limited_.load(std::memory_order_relaxed)};
}

size_t Gate::peers_remembered() const {
  const std::lock_guard lock(failures_mutex_);
  return failures_.size();
}

}  // namespace petps::access
