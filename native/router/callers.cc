#include "router/callers.h"

#include <sys/random.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

#include "base/check.h"
#include "base/clock.h"
#include "base/peer.h"

namespace petps::router {

using base::Code;
using base::Result;
using base::Status;

namespace {

// To end a client may take a second, while its servers do not answer. So many end at a time.
constexpr size_t kEndedAtOnce = 16;

void add(const client::PullCounts& counts, client::PullCounts& sum) {
  sum.hedges += counts.hedges;
  sum.hedges_won += counts.hedges_won;
}

// Return the refusal of a login without the addresses of the servers, which a stranger must not
// learn. Other errors are returned as they are.
Status hide_servers(const std::string& token, const Status& status) {
  const bool has_no_credential =
      status.code() == Code::kUnauthenticated &&
      status.message().find(base::kNeedsCredential) != std::string_view::npos;
  if (!is_revoked(status) && !has_no_credential) return status;
  if (token.empty()) {
    return Status(Code::kUnauthenticated,
                  "the servers need a token: give token=, --token-file or PETPS_TOKEN_FILE");
  }
  return Status(Code::kUnauthenticated,
                "the servers do not know this token: " + std::string(base::kUnknownToken) +
                    ", or is revoked or expired: ask the operator for another one (petps token "
                    "new)");
}

}  // namespace

Caller::Caller(std::unique_ptr<client::Client> client) : client_(std::move(client)) {
  // Up to 256 bytes come whole, and the kernel has been ready since its start.
  PETPS_CHECK(getrandom(uuid_.data(), uuid_.size(), 0) == static_cast<ssize_t>(uuid_.size()),
              "the kernel has no random numbers");
  note_use();
}

void Caller::note_use() { used_ns_.store(base::monotonic_ns(), std::memory_order_relaxed); }

// Refuse a router beyond loopback whose servers answer everybody: it would open them to all.
Status Callers::check_credentials(const std::string& token, const client::Options& options) {
  if (!options_.needs_token) return {};
  if (!token.empty()) {
    const uint64_t refused_ns = refused_ns_.load(std::memory_order_relaxed);
    const uint64_t counts_ns = options_.refusal_counts_ms * 1'000'000;
    if (refused_ns != 0 && base::monotonic_ns() - refused_ns < counts_ns) return {};
    client::Options nobody = options;
    nobody.token.clear();
    const Status status = client::Client::connect(options_.servers, nobody).status();
    if (is_failed_login(status)) {
      refused_ns_.store(base::monotonic_ns(), std::memory_order_relaxed);
      return {};
    }
    if (!status.ok()) return status;
  }
  refused_ns_.store(0, std::memory_order_relaxed);
  return Status(Code::kFailedPrecondition,
                "the servers ask nobody for credentials, and this router listens beyond loopback: "
                "give the servers an access file (access.file), or accept it with router.insecure");
}

Result<CallerPointer> Callers::connect(const std::string& token) {
  client::Options options = options_.client;
  options.token = token;
  auto client = client::Client::connect(options_.servers, options);
  if (!client.ok()) return client.status();
  PETPS_RETURN_IF_ERROR(check_credentials(token, options));
  auto caller = std::make_shared<Caller>(std::move(client).value());
  PETPS_RETURN_IF_ERROR(caller->forwarder().read_names(options.deadline_ms));
  caller->names().update(caller->forwarder());
  return caller;
}

bool Callers::has_recent_failures(const Host& host) {
  return base::monotonic_ns() - host.since_ns < kFailuresNs;
}

Callers::Host& Callers::host_locked(const std::string& host) {
  if (hosts_.size() >= kHostsMax && !hosts_.contains(host))
    std::erase_if(hosts_, [](const auto& entry) { return entry.second.logins == 0; });
  Host& from = hosts_[host];
  if (!has_recent_failures(from)) from.failures = 0;
  return from;
}

// Return how many logins a host may have at a time.
uint32_t Callers::logins_of(const Host& host) {
  return host.failures > kFailuresMax && has_recent_failures(host) ? 1 : kLoginsOfHost;
}

// Keep a caller whose token the servers know. Callers that nobody uses give their place up.
Status Callers::keep_locked(const std::string& token, const CallerPointer& caller,
                            Clients& dropped) {
  if (callers_.size() >= options_.callers) {
    auto oldest = callers_.end();
    for (auto at = callers_.begin(); at != callers_.end(); ++at) {
      if (at->second.use_count() > 1) continue;  // a connection or a call has it
      if (oldest == callers_.end() || at->second->used_ns() < oldest->second->used_ns())
        oldest = at;
    }
    if (oldest == callers_.end()) {
      return Status(Code::kResourceExhausted,
                    "the router already serves " + std::to_string(options_.callers) +
                        " tokens: try another router, or raise router.callers");
    }
    retire_locked(oldest->second, dropped);
    callers_.erase(oldest);
  }
  callers_[token] = caller;
  return {};
}

void Callers::end_login_locked(const std::string& host, const Status& status) {
  Host& from = hosts_[host];
  --from.logins;
  if (is_failed_login(status)) {
    failed_.fetch_add(1, std::memory_order_relaxed);
    if (from.failures++ == 0) from.since_ns = base::monotonic_ns();
  }
  if (from.logins == 0 && from.failures == 0) hosts_.erase(host);
}

Result<CallerPointer> Callers::open(const std::string& token, const std::string& host, bool waits) {
  const uint64_t until_ns =
      base::monotonic_ns() + uint64_t{options_.client.deadline_ms} * 1'000'000;
  Clients dropped;
  std::shared_ptr<Login> login;
  {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (const auto known = callers_.find(token); known != callers_.end()) {
        known->second->note_use();
        return known->second;
      }
      if (const auto running = logins_.find(token); running != logins_.end()) {
        login = running->second;
        login_done_.wait(lock, [&] { return login->is_done; });
        if (!login->status.ok()) return login->status;
        return login->caller;
      }
      Host& from = host_locked(host);
      if (from.logins < logins_of(from)) {
        ++from.logins;
        break;
      }
      const bool is_guessing = logins_of(from) == 1;
      const uint64_t now = base::monotonic_ns();
      if (now >= until_ns || (is_guessing && !waits)) {
        return Status(Code::kResourceExhausted,
                      "the router already asks the servers about " + std::to_string(from.logins) +
                          " tokens of " + host +
                          (is_guessing ? ", of which they refused many lately" : "") +
                          ": try again");
      }
      login_done_.wait_for(lock, std::chrono::nanoseconds(until_ns - now));
    }
    login = logins_[token] = std::make_shared<Login>();
  }
  auto connected = connect(token);
  {
    const std::lock_guard lock(mutex_);
    login->is_done = true;
    login->status = hide_servers(token, connected.status());
    if (connected.ok()) login->status = keep_locked(token, connected.value(), dropped);
    if (login->status.ok()) login->caller = connected.value();
    logins_.erase(token);
    end_login_locked(host, login->status);
  }
  login_done_.notify_all();
  destroy(std::move(dropped));
  if (!login->status.ok()) return login->status;
  return login->caller;
}

Callers::Place Callers::look(const std::string& token, const std::string& host) const {
  const std::lock_guard lock(mutex_);
  if (callers_.contains(token)) return Place::kKnown;
  if (logins_.contains(token)) return Place::kWait;
  const auto from = hosts_.find(host);
  const bool is_full = from != hosts_.end() && from->second.logins >= logins_of(from->second);
  return is_full ? Place::kWait : Place::kLogin;
}

bool Callers::end(const CallerPointer& caller) {
  const std::lock_guard lock(mutex_);
  const auto at =
      std::ranges::find_if(callers_, [&](const auto& entry) { return entry.second == caller; });
  if (at == callers_.end()) return true;  // another request has ended it
  const uint64_t now = base::monotonic_ns();
  const auto ended = ended_at_ns_.find(at->first);
  if (ended != ended_at_ns_.end() && now - ended->second < kEndedNs) return false;
  ended_at_ns_[at->first] = now;
  former_.push_back(std::move(at->second));
  callers_.erase(at);
  return true;
}

void Callers::drop_idle() {
  Clients dropped;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(former_, [&](CallerPointer& caller) {
      if (caller.use_count() > 1) return false;
      retire_locked(caller, dropped);
      return true;
    });
    const uint64_t now = base::monotonic_ns();
    std::erase_if(ended_at_ns_, [&](const auto& entry) { return now - entry.second >= kEndedNs; });
    for (auto at = callers_.begin(); at != callers_.end();) {
      const bool is_idle = at->second.use_count() == 1 &&
                           now - at->second->used_ns() >= options_.idle_ms * 1'000'000;
      if (is_idle) retire_locked(at->second, dropped);
      at = is_idle ? callers_.erase(at) : std::next(at);
    }
  }
  destroy(std::move(dropped));
}

void Callers::close() {
  Clients all;
  {
    const std::lock_guard lock(mutex_);
    for (auto& [token, caller] : callers_) retire_locked(caller, all);
    for (CallerPointer& caller : former_) retire_locked(caller, all);
    callers_.clear();
    former_.clear();
  }
  destroy(std::move(all));
}

void Callers::retire_locked(CallerPointer& caller, Clients& dropped) {
  add(caller->client().pull_counts(), ended_);
  dropped.push_back(std::move(caller));
}

void Callers::destroy(Clients callers) {
  std::vector<std::thread> threads;
  const size_t count = std::min(callers.size(), kEndedAtOnce);
  const auto end_some = [&](size_t first) {
    for (size_t i = first; i < callers.size(); i += count) callers[i].reset();
  };
  for (size_t i = 1; i < count; ++i) {
    try {
      threads.emplace_back(end_some, i);
    } catch (const std::system_error&) {  // no thread: one after another
      end_some(i);
    }
  }
  if (count > 0) end_some(0);
  for (std::thread& thread : threads) thread.join();
}

size_t Callers::size() const {
  const std::lock_guard lock(mutex_);
  return callers_.size();
}

std::vector<client::ServerCounts> Callers::server_counts() const {
  std::map<std::string, client::ServerCounts> servers;
  const std::lock_guard lock(mutex_);
  for (const auto& [token, caller] : callers_) {
    for (client::ServerCounts& counts : caller->client().server_counts()) {
      const auto [at, is_new] = servers.try_emplace(counts.server, counts);
      if (is_new) continue;
      at->second.failures += counts.failures;
      at->second.is_live = at->second.is_live || counts.is_live;
    }
  }
  std::vector<client::ServerCounts> all;
  for (auto& [name, counts] : servers) all.push_back(std::move(counts));
  return all;
}

client::PullCounts Callers::pull_counts() const {
  const std::lock_guard lock(mutex_);
  client::PullCounts sum = ended_;
  for (const auto& [token, caller] : callers_) add(caller->client().pull_counts(), sum);
  for (const CallerPointer& caller : former_) add(caller->client().pull_counts(), sum);
  return sum;
}

}  // namespace petps::router
