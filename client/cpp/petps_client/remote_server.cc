#include "petps_client/remote_server.h"

#include <algorithm>
#include <chrono>

#include "base/clock.h"
#include "petps_client/token.h"

namespace petps::client {

using base::Code;
using base::Result;
using base::Status;

namespace {

// Limit of pools remembered for one address: more than a load balancer has servers.
constexpr size_t kMaxPools = 64;
// Servers close connections that are idle for tens of seconds. A write avoids connections that
// come anywhere near that.
constexpr uint64_t kIdleForWriteNs = 1'000'000'000;
// Latencies of requests with other numbers of keys are scaled to this number, and each request
// costs as much as this many keys besides.
constexpr uint64_t kLatencyKeys = 256;
// A latency without newer ones loses half its weight in this time (2^27 ns, 134 ms), so that calls
// try a server again that was slow.
constexpr uint32_t kLatencyHalfLifeBits = 27;

Status check_limits(const wire::Limits& limits, Connection& connection) {
  const bool is_usable = limits.body_bytes > 0 && limits.keys_per_pull > 0 &&
                         limits.sections_per_pull > 0 && limits.keys_per_push > 0 &&
                         limits.in_flight > 0;
  return is_usable ? Status() : connection.distrust("its hello announces a limit of 0");
}

// Lower the limits to those of this build: a newer server may announce more.
wire::Limits lower_to_ours(wire::Limits limits) {
  const wire::Limits ours;
  limits.body_bytes = std::min(limits.body_bytes, ours.body_bytes);
  limits.keys_per_pull = std::min(limits.keys_per_pull, ours.keys_per_pull);
  limits.sections_per_pull = std::min(limits.sections_per_pull, ours.sections_per_pull);
  limits.keys_per_push = std::min(limits.keys_per_push, ours.keys_per_push);
  limits.hot_keys = std::min(limits.hot_keys, ours.hot_keys);
  limits.in_flight = std::min(limits.in_flight, ours.in_flight);
  return limits;
}

}  // namespace

Lease::~Lease() {
  if (connection_ != nullptr) server_->take_back(std::move(connection_));
}

Result<std::unique_ptr<Connection>> RemoteServer::open(const Deadline& deadline) {
  const auto token = read_token(options_);
  if (!token.ok()) return token.status();
  auto opened = open_as(token.value(), deadline);
  if (opened.status().code() != Code::kUnauthenticated || options_.token_file.empty())
    return opened;
  // The grant may have been revoked after the file was read, and its next token be there by now.
  const auto next = read_token(options_);
  if (!next.ok() || next.value() == token.value()) return opened;
  return open_as(next.value(), deadline);
}

Result<std::unique_ptr<Connection>> RemoteServer::open_as(const std::string& token,
                                                          const Deadline& deadline) {
  auto opened = Connection::open(name_, host_, deadline);
  if (!opened.ok()) return opened;
  Connection& connection = **opened;
  if (tls_ != nullptr)
    PETPS_RETURN_IF_ERROR(connection.start_tls(*tls_, certificate_name_, deadline));
  if (!token.empty() && !connection.keeps_secrets()) {
    return Status(Code::kFailedPrecondition,
                  name_ +
                      ": a token is not sent over an unencrypted connection to another "
                      "machine: use petps+tls://");
  }
  wire::HelloRequest request;
  request.client = options_.name;
  request.token = token;
  wire::encode_hello(connection.next_request_id(), request, connection.frame());
  wire::HelloReply& hello = connection.hello;
  PETPS_RETURN_IF_ERROR(
      connection.exchange(deadline, [&](const wire::FrameHeader& header, auto body) {
        return wire::decode_hello_reply(header, body, hello);
      }));
  PETPS_RETURN_IF_ERROR(check_limits(hello.limits, connection));
  hello.limits = lower_to_ours(hello.limits);
  if (options_.rdma != nullptr && (hello.features & wire::kFeatureRdma) != 0) {
    const Status moved = connection.move_to_rdma(*options_.rdma, deadline);
    if (connection.is_broken()) return moved;  // otherwise the server refused, and TCP stays in use
  }
  return opened;
}

// Return the error of a call that got no connection between `since_ns` and its deadline.
Status RemoteServer::no_connection_error(const Deadline& deadline, uint64_t since_ns,
                                         Patience patience) const {
  const std::string ms = std::to_string(deadline.given_ms);
  const std::string connections = std::to_string(options_.connections);
  if (patience == Patience::kShort && last_reply_ns_ < since_ns) {
    return Status(Code::kDeadlineExceeded, name_ + ": no reply within " + ms + " ms on any of " +
                                               connections + " connections");
  }
  // This is no failure of the server, so it causes no backoff.
  return Status(Code::kResourceExhausted, name_ + ": all " + connections +
                                              " connections were in use for " + ms +
                                              " ms: raise Options.connections or the deadline");
}

Result<Lease> RemoteServer::lease(const Deadline& deadline, Use use, Patience patience,
                                  bool opens_in_short) {
  const bool is_short = patience == Patience::kShort;
  const uint64_t since_ns = base::monotonic_ns();
  std::unique_lock lock(mutex_);
  const auto is_over = [&] {
    return leased_ < options_.connections || (is_short && is_dead_locked());
  };
  ++waiters_;
  const bool is_free =
      returned_.wait_for(lock, std::chrono::nanoseconds(deadline.left_ns()), is_over);
  --waiters_;
  if (!is_free) return no_connection_error(deadline, since_ns, patience);
  if (is_short && is_dead_locked()) {
    // Not kUnavailable: the callers would count that as a further failure.
    return Status(Code::kDeadlineExceeded, name_ + ": no reply since its last failure");
  }
  ++leased_;
  while (!idle_.empty()) {
    std::unique_ptr<Connection> connection = std::move(idle_.back());
    idle_.pop_back();
    const bool is_too_idle = use == Use::kWrite && connection->idle_ns() > kIdleForWriteNs;
    if (is_too_idle || !connection->is_reusable()) continue;
    connection->begin_use(true);
    return Lease(this, std::move(connection));
  }
  lock.unlock();
  const uint64_t began_at = base::monotonic_ns();
  auto opened = open(is_short || opens_in_short ? deadline.limited(patience_ns()) : deadline);
  lock.lock();
  if (!opened.ok()) {
    --leased_;
    returned_.notify_one();
    if (opened.status().code() == Code::kDeadlineExceeded)
      record_timeout_locked(base::monotonic_ns() - began_at);
    return opened.status();
  }
  hello_ = (*opened)->hello;
  has_hello_ = true;
  (*opened)->begin_use(false);
  return Lease(this, std::move(opened).value());
}

// A call that waits for a connection comes first.
bool RemoteServer::has_idle_locked() const {
  return !idle_.empty() && leased_ < options_.connections && waiters_ == 0 &&
         idle_.back()->has_read_catalogue;
}

bool RemoteServer::has_idle() const {
  const std::lock_guard lock(mutex_);
  return has_idle_locked();
}

std::optional<Lease> RemoteServer::lease_idle() {
  const std::lock_guard lock(mutex_);
  if (!has_idle_locked()) return std::nullopt;
  std::unique_ptr<Connection> connection = std::move(idle_.back());
  idle_.pop_back();
  if (!connection->is_reusable()) return std::nullopt;
  ++leased_;
  connection->begin_use(true);
  return Lease(this, std::move(connection));
}

RemoteServer::Condition RemoteServer::condition(uint64_t now_ns) const {
  const std::lock_guard lock(mutex_);
  Condition condition;
  condition.is_awake = backoff_until_ns_ <= now_ns;
  condition.is_in_doubt = is_in_doubt_locked(now_ns);
  condition.is_dead = is_dead_locked();
  condition.needs_probe = condition.is_dead ? condition.is_awake : has_lost_all_locked();
  condition.in_flight = leased_;
  const uint64_t age_ns = now_ns - std::min(now_ns, latency_at_ns_);
  condition.latency_ns = latency_ns_ >> std::min<uint64_t>(age_ns >> kLatencyHalfLifeBits, 63);
  return condition;
}

void RemoteServer::record_latency(uint64_t keys, uint64_t latency_ns) {
  const uint64_t scaled = latency_ns * (2 * kLatencyKeys) / (keys + kLatencyKeys);
  const std::lock_guard lock(mutex_);
  const uint64_t now = base::monotonic_ns();
  const bool is_old = now - latency_at_ns_ >= uint64_t{1} << kLatencyHalfLifeBits;
  latency_ns_ = is_old || latency_ns_ == 0 ? scaled : latency_ns_ - latency_ns_ / 8 + scaled / 8;
  latency_at_ns_ = now;
}

void RemoteServer::take_back(std::unique_ptr<Connection> connection) {
  std::vector<std::unique_ptr<Connection>> unused;  // closed after the lock is released
  const std::lock_guard lock(mutex_);
  --leased_;
  if (connection->timed_out_after_ns() != 0)
    record_timeout_locked(connection->timed_out_after_ns());
  if (connection->was_closed_while_idle()) {
    ++idle_losses_;
    idle_.clear();  // the others are most likely as old
  }
  if (!connection->is_broken()) {
    connection->end_use();
    idle_.push_back(std::move(connection));
  }
  const uint64_t idle_limit_ns = uint64_t{options_.idle_ms} * 1'000'000;
  while (idle_limit_ns != 0 && !idle_.empty() && idle_.front()->idle_ns() > idle_limit_ns) {
    unused.push_back(std::move(idle_.front()));  // the last one is leased first
    idle_.erase(idle_.begin());
  }
  returned_.notify_one();
}

RemoteServer::KeptCatalogue& RemoteServer::kept_for_locked(const Uuid& pool) {
  if (kept_.size() >= kMaxPools && !kept_.contains(pool)) {
    kept_.erase(std::min_element(kept_.begin(), kept_.end(), [](const auto& a, const auto& b) {
      return a.second.used_at < b.second.used_at;
    }));
  }
  KeptCatalogue& kept = kept_[pool];
  kept.used_at = ++clock_;
  return kept;
}

std::shared_ptr<const Catalogue> RemoteServer::last_catalogue() const {
  const std::lock_guard lock(mutex_);
  const auto at = kept_.find(hello_.pool_uuid);
  return at == kept_.end() ? nullptr : at->second.value;
}

Result<std::shared_ptr<const Catalogue>> RemoteServer::catalogue(Connection& connection,
                                                                 const Deadline& deadline) {
  auto known = known_catalogue(connection);
  if (known != nullptr) return known;
  return read_catalogue(connection, deadline);
}

std::shared_ptr<const Catalogue> RemoteServer::known_catalogue(const Connection& connection) const {
  if (!connection.has_read_catalogue) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto at = kept_.find(connection.hello.pool_uuid);
  return at == kept_.end() ? nullptr : at->second.value;
}

Status RemoteServer::restored_pool_error(const Catalogue& seen, const Catalogue& now) const {
  return Status(Code::kUnavailable,
                name_ + ": its pool is an older copy of itself: its names are at counter " +
                    std::to_string(now.state().counter) + ", and this client has seen " +
                    std::to_string(seen.state().counter) +
                    ". This client requests no rows from it until the counter has passed that. "
                    "Restore a newer copy of the pool, or serve a new pool that is loaded from a "
                    "base; or restart the clients to accept the older one");
}

Result<std::shared_ptr<const Catalogue>> RemoteServer::read_catalogue(Connection& connection,
                                                                      const Deadline& deadline) {
  uint64_t requested_at = 0;
  {
    const std::lock_guard lock(mutex_);
    requested_at = ++clock_;
  }
  auto built = request_catalogue(connection, deadline);
  if (!built.ok()) return built.status();
  std::shared_ptr<Catalogue>& now = built.value();
  const std::lock_guard lock(mutex_);
  KeptCatalogue& kept = kept_for_locked(connection.hello.pool_uuid);
  const uint64_t counter = now->state().counter;
  if (kept.value != nullptr) {
    const uint64_t seen = kept.value->state().counter;
    const bool has_counters = counter != 0 && seen != 0;
    const bool is_older = has_counters ? counter < seen : requested_at < kept.requested_at;
    // The kept catalogue is newer and was read after this request began, so it is a state that
    // the server had during this call.
    if (is_older && (!has_counters || kept.read_at > requested_at)) {
      connection.has_read_catalogue = true;
      return kept.value;
    }
    if (is_older) return restored_pool_error(*kept.value, *now);
    now->record_former(*kept.value);
  }
  connection.has_read_catalogue = true;
  kept = {now, requested_at, ++clock_, clock_};
  return kept.value;
}

Result<std::shared_ptr<Catalogue>> RemoteServer::request_catalogue(Connection& connection,
                                                                   const Deadline& deadline) const {
  const bool sends_state = (connection.hello.features & wire::kFeatureCatalogueState) != 0;
  wire::encode_tables(connection.next_request_id(), {.with_state = sends_state},
                      connection.frame());
  wire::TablesReply reply;
  PETPS_RETURN_IF_ERROR(
      connection.exchange(deadline, [&](const wire::FrameHeader& header, auto body) {
        return wire::decode_tables_reply(header, body, reply);
      }));
  if (sends_state && reply.state.pool_uuid != connection.hello.pool_uuid)
    return connection.distrust("its tables are of another pool than its hello");
  reply.state.pool_uuid = connection.hello.pool_uuid;
  return Catalogue::build(reply, model_, name_);
}

Result<wire::ShardMap> RemoteServer::read_shard_map(const Deadline& deadline) {
  auto leased = lease(deadline);
  if (!leased.ok()) return leased.status();
  wire::ShardMap map;
  if (!leased->has(wire::kFeatureShardMap)) return map;
  Connection& connection = **leased;
  wire::encode_shard_map(connection.next_request_id(), connection.frame());
  PETPS_RETURN_IF_ERROR(
      connection.exchange(deadline, [&](const wire::FrameHeader& header, auto body) {
        return wire::decode_shard_map_reply(header, body, map);
      }));
  return map;
}

void RemoteServer::record_failure_locked() {
  ++failures_;
  ++all_failures_;
  backoff_until_ns_ = base::monotonic_ns() + backoff_.next_ns();
  if (is_dead_locked()) returned_.notify_all();  // calls with short patience do not wait
}

void RemoteServer::record_failure() {
  const std::lock_guard lock(mutex_);
  record_failure_locked();
}

void RemoteServer::record_timeout_locked(uint64_t waited_ns) {
  if (waited_ns >= backoff_options_.silence_ns) {
    is_silent_ = true;
    return record_failure_locked();
  }
  ++all_failures_;
  doubt_until_ns_ = base::monotonic_ns() + doubt_.next_ns();
}

void RemoteServer::record_reply() {
  const std::lock_guard lock(mutex_);
  failures_ = 0;
  is_silent_ = false;
  last_reply_ns_ = base::monotonic_ns();
  backoff_.reset();
  doubt_.reset();
  backoff_until_ns_ = 0;
  doubt_until_ns_ = 0;
}

uint64_t RemoteServer::backoff_until_ns() const {
  const std::lock_guard lock(mutex_);
  return backoff_until_ns_;
}

bool RemoteServer::is_in_doubt() const {
  const std::lock_guard lock(mutex_);
  return doubt_until_ns_ != 0 && is_in_doubt_locked(base::monotonic_ns());
}

uint64_t RemoteServer::failures() const {
  const std::lock_guard lock(mutex_);
  return all_failures_;
}

bool RemoteServer::is_live() const {
  const std::lock_guard lock(mutex_);
  return failures_ < backoff_options_.failures_until_gone;
}

bool RemoteServer::is_dead() const {
  const std::lock_guard lock(mutex_);
  return is_dead_locked();
}

uint64_t RemoteServer::idle_losses() const {
  const std::lock_guard lock(mutex_);
  return idle_losses_;
}

uint32_t RemoteServer::hot_set_ms() const {
  const std::lock_guard lock(mutex_);
  constexpr uint32_t kMaxSeconds = 3'600;  // limit of the period, whatever the server sends
  return has_hello_ ? std::min(hello_.hot_set_seconds, kMaxSeconds) * 1000 : 0;
}

}  // namespace petps::client
