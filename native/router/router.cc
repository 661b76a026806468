#include "router/router.h"

#include <malloc.h>
#include <pthread.h>
#include <unistd.h>

#include "base/clock.h"
#include "router/requests.h"
#include "router/shared.h"
#include "server/json.h"
#include "transport/tcp/tcp.h"

namespace petps::router {

using base::Code;
using base::Status;

namespace {

// How often a caller's client reads the names of each server in the background.
constexpr uint32_t kNamesMs = 2'000;
// A connection to a server that no request has used for this time is closed.
constexpr uint32_t kConnectionIdleMs = 30'000;
// Connections of a caller to one server. Further requests of the caller wait for one.
constexpr uint32_t kConnections = 32;

// The threads of calls and logins wait for servers most of the time. In an arena of the allocator
// each, what requests have freed would stay with its thread, and no limit counts it.
void limit_arenas([[maybe_unused]] size_t workers) {
#ifdef __GLIBC__
  mallopt(M_ARENA_MAX, static_cast<int>(workers) + 1);
#endif
}

CallersOptions callers_options(const RouterOptions& options) {
  CallersOptions callers;
  callers.servers = options.servers;
  callers.callers = options.callers;
  callers.idle_ms = options.caller_idle_ms;
  callers.needs_token = options.needs_token;
  callers.client.name = "petps router";
  callers.client.deadline_ms = options.deadline_ms;
  callers.client.connections = kConnections;
  callers.client.hot_sample_every = 0;  // callers send their own hot keys
  callers.client.catalogue_ms = kNamesMs;
  callers.client.idle_ms = kConnectionIdleMs;
  callers.client.tls = options.server_tls;
  callers.client.zone = options.zone;
  return callers;
}

// Return how long a pull wants to wait for its version; 0 for other requests.
uint32_t wait_of(const Job& job) {
  wire::PullRequest pull;
  if (static_cast<wire::Opcode>(job.header.opcode) != wire::Opcode::kPull ||
      !wire::decode_pull(job.header, job.body(), {}, pull).ok())
    return 0;
  return pull.min_version == 0 ? 0 : pull.wait_ms;
}

Status check_limit(const char* name, uint64_t value, uint64_t most) {
  if (value >= 1 && value <= most) return {};
  return Status(Code::kInvalidArgument, std::string("router.") + name + " = " +
                                            std::to_string(value) + " is outside 1.." +
                                            std::to_string(most));
}

Status check_options(const RouterOptions& options) {
  PETPS_RETURN_IF_ERROR(check_limit("workers", options.workers, server::kMaxWorkers));
  PETPS_RETURN_IF_ERROR(check_limit("calls", options.calls, kMaxCalls));
  PETPS_RETURN_IF_ERROR(check_limit("callers", options.callers, kMaxCallers));
  return check_limit("deadline_ms", options.deadline_ms, UINT32_MAX);
}

}  // namespace

Shared::Shared(const RouterOptions& router_options)
    : options(router_options),
      memory(std::make_shared<transport::MemoryBudget>(
          options.memory_bytes == 0 ? transport::default_memory_bytes() : options.memory_bytes)),
      callers(callers_options(options)),
      calls("call", options.calls, [this](JobPointer job) { run(std::move(job)); }),
      logins("login", kLogins, [this](JobPointer job) { run(std::move(job)); }) {}

void Shared::run(JobPointer job) {
  answer(*this, *job);
  Worker& worker = *workers[job->worker];
  worker.finish(std::move(job));
}

RouterSnapshot Shared::snapshot() const {
  RouterSnapshot snapshot;
  for (const auto& worker : workers) {
    worker->stats().add_to(snapshot.stats);
    server::add_counters(worker->endpoint().counters(), snapshot.stats);
    snapshot.pulls_without_thread += worker->started_pulls();
  }
  server::add_transport(*transport, snapshot.stats);
  {
    const std::lock_guard lock(call_stats_mutex);
    call_stats.add_to(snapshot.stats);
  }
  snapshot.stats.refused_for_memory = memory->refused();
  snapshot.stats.memory_used_bytes = memory->used();
  snapshot.stats.memory_limit_bytes = memory->limit();
  snapshot.callers = static_cast<uint32_t>(callers.size());
  snapshot.calls_in_flight = calls.in_flight();
  snapshot.logins_in_flight = logins.in_flight();
  snapshot.logins_failed = callers.logins_failed();
  const client::PullCounts counts = callers.pull_counts();
  snapshot.hedges = counts.hedges;
  snapshot.hedges_won = counts.hedges_won;
  snapshot.servers = callers.server_counts();
  return snapshot;
}

std::string Shared::status_json() const {
  const RouterSnapshot now = snapshot();
  server::JsonWriter json;
  json.begin_object();
  json.member("kind", "router");
  json.member("software", options.software);
  json.member("pid", static_cast<int64_t>(getpid()));
  json.member("uptime_s", static_cast<double>(base::monotonic_ns() - started_ns) / 1e9);
  json.member("host", options.host);
  json.member("port", uint32_t{transport->port()});
  json.raw("unready", "null");  // servers have answered for the caller
  json.member("workers", options.workers);
  json.member("calls", options.calls);
  json.member("calls_in_flight", now.calls_in_flight);
  json.member("pulls_without_thread", now.pulls_without_thread);
  json.member("callers", now.callers);
  json.member("logins_in_flight", now.logins_in_flight);
  json.member("logins_failed", now.logins_failed);
  json.member("hedges", now.hedges);
  json.member("hedges_won", now.hedges_won);
  json.begin_array("servers");
  for (const client::ServerCounts& server : now.servers) {
    json.begin_object();
    json.member("address", server.server);
    json.member("is_live", server.is_live);
    json.end_object();
  }
  json.end_array();
  json.begin_object("stats");
  for (const server::StatField& field : server::kStatFields)
    json.member(field.name, now.stats.*field.value);
  json.end_object();
  json.begin_object("errors_by_code");
  for (size_t code = 1; code < now.stats.errors_by_code.size(); ++code) {
    json.member(base::code_name(static_cast<Code>(code)), now.stats.errors_by_code[code]);
  }
  json.end_object();
  json.end_object();
  return json.take();
}

base::Result<std::unique_ptr<Router>> Router::start(const RouterOptions& options) {
  PETPS_RETURN_IF_ERROR(check_options(options));
  limit_arenas(options.workers);
  auto impl = std::make_unique<Impl>(options);
  Shared& shared = impl->shared;
  transport::TcpOptions tcp;
  tcp.host = options.host;
  tcp.port = options.port;
  tcp.endpoints = options.workers;
  tcp.limits = options.transport;
  tcp.limits.connections = options.limits.connections;
  tcp.tls = options.tls;
  tcp.memory = shared.memory;
  tcp.rules = server::Server::frame_rules(options.limits);
  tcp.rules.first_bytes_max = wire::kFirstFrameBytes;  // the router knows nobody before
  auto transport = transport::make_tcp(tcp);
  if (!transport.ok()) return transport.status();
  shared.transport = std::move(transport).value();
  shared.started_ns = base::monotonic_ns();
  for (size_t i = 0; i < options.workers; ++i)
    shared.workers.push_back(std::make_unique<Worker>(shared, i, shared.transport->endpoint(i)));
  std::unique_ptr<Router> router(new Router(std::move(impl)));  // ~Router stops the threads
  PETPS_RETURN_IF_ERROR(shared.calls.start());
  PETPS_RETURN_IF_ERROR(shared.logins.start());
  for (const auto& worker : shared.workers) PETPS_RETURN_IF_ERROR(worker->open());
  for (const auto& worker : shared.workers) {
    shared.threads.emplace_back([&worker = *worker] { worker.run(); });
    pthread_setname_np(shared.threads.back().native_handle(), "petps-worker");
  }
  PETPS_RETURN_IF_ERROR(shared.transport->start());
  return router;
}

Router::Router(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Router::~Router() {
  // Connections that could not be drained are closed; a destructor cannot report that.
  [[maybe_unused]] const Status status = stop();
}

Status Router::stop() {
  if (impl_->stopped) return {};
  impl_->stopped = true;
  Shared& shared = impl_->shared;
  const uint64_t drain_ms = shared.options.drain_ms;
  shared.transport->stop_accepting();
  shared.drain_until_ns.store(base::monotonic_ns() + drain_ms * 1'000'000,
                              std::memory_order_release);
  shared.stopping.store(true, std::memory_order_release);
  for (const auto& worker : shared.workers) worker->endpoint().wake();
  for (std::thread& thread : shared.threads) thread.join();
  shared.calls.stop();
  shared.logins.stop();
  size_t undrained = 0;
  for (const auto& worker : shared.workers) {
    undrained += worker->drained() ? 0 : 1;
    worker->drop_replies();
  }
  shared.transport->end();
  shared.callers.close();
  if (undrained == 0) return {};
  return Status(Code::kDeadlineExceeded,
                std::to_string(undrained) + " workers still had requests in flight after " +
                    std::to_string(drain_ms) + " ms: their connections were closed");
}

Status Router::hold(size_t bytes) {
  transport::MemoryBudget& memory = *impl_->shared.memory;
  PETPS_RETURN_IF_ERROR(memory.admit(bytes));
  memory.change(0, bytes);
  return {};
}

void Router::release(size_t bytes) { impl_->shared.memory->change(bytes, 0); }

void Router::tend() { impl_->shared.callers.drop_idle(); }

uint16_t Router::port() const { return impl_->shared.transport->port(); }
RouterSnapshot Router::snapshot() const { return impl_->shared.snapshot(); }
std::string Router::status_json() const { return impl_->shared.status_json(); }

std::vector<uint64_t> Router::progress() const {
  std::vector<uint64_t> rounds;
  for (const auto& worker : impl_->shared.workers) rounds.push_back(worker->rounds());
  return rounds;
}

wire::Frame Router::call(const Seen& seen, const std::string& token, const std::string& host,
                         wire::Frame request) {
  Shared& shared = impl_->shared;
  wire::Frame reply;
  wire::FrameHeader header;
  Status refusal = wire::decode_request_header(request, header);
  const size_t bytes = request_bytes(header, request.size());
  if (refusal.ok()) refusal = shared.memory->admit(bytes);
  JobPointer job;
  if (refusal.ok()) {
    shared.memory->change(0, bytes);  // also while it waits for a place
    const uint64_t until_ns =
        base::monotonic_ns() + uint64_t{shared.options.deadline_ms} * 1'000'000;
    job = shared.calls.begin_until(owner_of(token.empty() ? host : token), until_ns);
    if (job == nullptr) {
      shared.memory->change(bytes, 0);
      refusal = Status(Code::kResourceExhausted,
                       "the router has no place for the request: all router.calls = " +
                           std::to_string(shared.options.calls) +
                           " are taken, or this caller has half of them");
    }
  }
  if (!refusal.ok()) {
    const std::lock_guard lock(shared.call_stats_mutex);
    shared.call_stats.errors[static_cast<size_t>(refusal.code())].add(1);
    wire::encode_error(header.opcode, header.request_id, refusal, reply);
    return reply;
  }
  job->header = header;
  job->frame = std::move(request);
  job->caller = seen.caller;
  job->has_left = seen.has_left;
  job->host = host;
  job->start_ns = base::monotonic_ns();
  job->is_only_login = job->is_held = false;
  job->is_left.store(false, std::memory_order_relaxed);
  job->wait_ms = 0;
  job->keys = job->rows = job->refused = 0;
  job->counted_bytes = bytes;
  const uint32_t wait_ms = wait_of(*job);
  if (wait_ms > 0 && shared.calls.begin_wait(*job)) job->wait_ms = wait_ms;
  answer(shared, *job);
  reply.resize(job->reply.bytes());
  job->reply.copy_to(reply.data());
  {
    const std::lock_guard lock(shared.call_stats_mutex);
    count(*job, shared.call_stats);
  }
  shared.memory->change(job->counted_bytes, 0);
  shared.calls.end(std::move(job));
  return reply;
}

base::Result<Router::Seen> Router::names(const std::string& token, const std::string& host) {
  Shared& shared = impl_->shared;
  auto caller = shared.callers.open(token, host, false);
  if (!caller.ok()) {
    const std::lock_guard lock(shared.call_stats_mutex);
    shared.call_stats.errors[static_cast<size_t>(caller.status().code())].add(1);
    return caller.status();
  }
  auto listing =
      caller.value()->names().recent(caller.value()->forwarder(), shared.options.deadline_ms);
  if (is_revoked(listing.status())) shared.callers.end(caller.value());
  if (!listing.ok()) return listing.status();
  Seen seen;
  seen.listing = std::move(listing).value();
  seen.caller = std::move(caller).value();
  return seen;
}

bool Router::knows(const std::string& token, const std::string& host) const {
  return impl_->shared.callers.look(token, host) == Callers::Place::kKnown;
}

Status Router::check_sight(const std::string& token, const std::string& host) {
  Shared& shared = impl_->shared;
  auto caller = shared.callers.open(token, host, false);
  if (!caller.ok()) return caller.status();
  const Status status = caller.value()->client().status(-1, shared.options.deadline_ms).status();
  if (is_revoked(status)) shared.callers.end(caller.value());
  return status;
}

}  // namespace petps::router
