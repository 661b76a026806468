#include "server/server.h"

#include <pthread.h>

#include "base/clock.h"
#include "server/schedule.h"
#include "server/shared.h"
#include "transport/tcp/tcp.h"

namespace petps::server {

using base::Code;
using base::Status;

namespace {

Status check_limit(const char* name, uint32_t value, uint32_t most) {
  if (value >= 1 && value <= most) return {};
  return Status(Code::kInvalidArgument, std::string("limit ") + name + " = " +
                                            std::to_string(value) + " is outside 1.." +
                                            std::to_string(most));
}

// The smallest memory limit holds the requests and the replies of two calls: one that is served and
// one that arrives.
constexpr uint64_t kFramesInMemory = 4;

Status check_options(const ServerOptions& options) {
  PETPS_RETURN_IF_ERROR(check_limit("workers", options.workers, kMaxWorkers));
  if (options.call_workers > 0)
    PETPS_RETURN_IF_ERROR(check_limit("call_workers", options.call_workers, kMaxWorkers));
  PETPS_RETURN_IF_ERROR(check_real_time(options.real_time));
  if (options.busy_poll_us > 0) {
    PETPS_RETURN_IF_ERROR(
        check_limit("busy_poll_us", options.busy_poll_us, transport::kBusyPollMaxUs));
  }
  const wire::Limits& limits = options.limits;
  PETPS_RETURN_IF_ERROR(check_limit("body_bytes", limits.body_bytes, wire::kMaxBodyBytes));
  PETPS_RETURN_IF_ERROR(check_limit("keys_per_pull", limits.keys_per_pull, wire::kMaxKeysPerPull));
  PETPS_RETURN_IF_ERROR(
      check_limit("sections_per_pull", limits.sections_per_pull, wire::kMaxSectionsPerPull));
  PETPS_RETURN_IF_ERROR(check_limit("keys_per_push", limits.keys_per_push, wire::kMaxKeysPerPush));
  PETPS_RETURN_IF_ERROR(check_limit("hot_keys", limits.hot_keys, wire::kMaxHotKeys));
  PETPS_RETURN_IF_ERROR(check_limit("in_flight", limits.in_flight, wire::kMaxInFlight));
  PETPS_RETURN_IF_ERROR(check_limit("connections", limits.connections, wire::kMaxConnections));
  if (!(options.trace_sample >= 0 && options.trace_sample <= 1)) {
    return Status(Code::kInvalidArgument,
                  "trace_sample = " + std::to_string(options.trace_sample) + " is outside 0..1");
  }
  const uint64_t least = kFramesInMemory * (wire::kHeaderBytes + uint64_t{limits.body_bytes});
  if (options.memory_bytes != 0 && options.memory_bytes < least) {
    return Status(Code::kInvalidArgument,
                  "limit memory_bytes = " + std::to_string(options.memory_bytes) + " is below " +
                      std::to_string(least) + ", the size of " + std::to_string(kFramesInMemory) +
                      " frames of body_bytes: raise it or lower body_bytes");
  }
  return {};
}

// Return whether these are the first bytes of a TLS client: a handshake record of version 3.x.
bool is_tls(std::span<const std::byte> bytes) {
  return bytes[0] == std::byte{22} && bytes[1] == std::byte{3};
}

Status frame_length(std::span<const std::byte> bytes, size_t& length) {
  if (is_tls(bytes)) {
    return Status(Code::kInvalidArgument,
                  "the client speaks TLS, but this port does not: use petps://, or give the server "
                  "a certificate ([tls])");
  }
  wire::FrameHeader header;
  PETPS_RETURN_IF_ERROR(wire::decode_request_header(bytes, header));
  length = wire::kHeaderBytes + header.body_bytes;
  return {};
}

// An error that answers no request has id 0 and the opcode of hello, whose reply every client
// waits for first.
void encode_connection_error(const Status& reason, std::vector<std::byte>& frame) {
  wire::encode_error(static_cast<uint16_t>(wire::Opcode::kHello), 0, reason, frame);
}

// Lease one epoch list per worker and start the threads: first the transport's workers, then
// those of calls, then those of rdma.
Status start_workers(Shared& shared) {
  const size_t network = shared.options.workers;
  const size_t first_rdma = shared.first_rdma_worker();
  for (size_t i = 0; i < first_rdma + (shared.rdma == nullptr ? 0 : network); ++i) {
    epoch::Reader* reader = shared.tables.epochs().lease();
    if (reader == nullptr) {
      return Status(Code::kResourceExhausted,
                    "no epoch list is left for a worker: " + std::to_string(epoch::kMaxReaders) +
                        " readers of this pool are open; close some, or start fewer workers");
    }
    transport::Endpoint& endpoint = i < network      ? shared.transport->endpoint(i)
                                    : i < first_rdma ? shared.calls->endpoint(i - network)
                                                     : shared.rdma->endpoint(i - first_rdma);
    const Worker::Source source = i < network      ? Worker::Source::kTcp
                                  : i < first_rdma ? Worker::Source::kCalls
                                                   : Worker::Source::kRdma;
    shared.workers.push_back(std::make_unique<Worker>(shared, i, endpoint, *reader, source));
  }
  shared.writer = std::make_unique<PushWriter>(
      shared.tables, shared.options.limits, *shared.memory,
      [&shared](PushDone done) {
        shared.workers[done.origin.worker]->finish_push(std::move(done));
      },
      [&shared](uint64_t change_count, std::span<const uint64_t> keys) {
        return shared.check_again(change_count, keys);
      });
  shared.writer->start();
  for (const auto& worker : shared.workers) {
    shared.threads.emplace_back([&worker = *worker, real_time = shared.options.real_time] {
      schedule_worker(real_time);
      worker.run();
    });
    pthread_setname_np(shared.threads.back().native_handle(), "petps-worker");
  }
  return {};
}

void release_readers(Shared& shared) {
  for (const auto& worker : shared.workers) shared.tables.epochs().release(&worker->reader());
}

}  // namespace

transport::FrameRules Server::frame_rules(const wire::Limits& limits) {
  transport::FrameRules rules;
  rules.header_bytes = wire::kHeaderBytes;
  rules.frame_bytes_max = wire::kHeaderBytes + limits.body_bytes;
  rules.frame_length = frame_length;
  rules.encode_error = encode_connection_error;
  return rules;
}

base::Result<std::unique_ptr<Server>> Server::start(table::Tables& tables,
                                                    const ServerOptions& options) {
  PETPS_RETURN_IF_ERROR(check_options(options));
  transport::TcpOptions tcp;
  tcp.host = options.host;
  tcp.port = options.port;
  tcp.endpoints = options.workers;
  auto impl = std::make_unique<Impl>(tables, options);
  tcp.gather = impl->shared.gather;
  tcp.busy_poll_us = options.busy_poll_us;
  tcp.limits = options.transport;
  tcp.limits.connections = options.limits.connections;
  tcp.tls = options.tls;
  tcp.memory = impl->shared.memory;
  tcp.rules = frame_rules(options.limits);
  if (impl->shared.gate->mode() == access::Mode::kGrants)
    tcp.rules.first_bytes_max = wire::kFirstFrameBytes;
  base::Result<std::unique_ptr<transport::Transport>> transport = transport::make_tcp(tcp);
  if (!transport.ok()) return transport.status();
  auto server = start_over(std::move(impl), std::move(transport.value()));
  if (server.ok()) start_measuring(server.value()->impl_->shared);
  return server;
}

base::Result<std::unique_ptr<Server>> Server::start(
    table::Tables& tables, const ServerOptions& options,
    std::unique_ptr<transport::Transport> transport) {
  PETPS_RETURN_IF_ERROR(check_options(options));
  return start_over(std::make_unique<Impl>(tables, options), std::move(transport));
}

base::Result<std::unique_ptr<Server>> Server::start_over(
    std::unique_ptr<Impl> impl, std::unique_ptr<transport::Transport> transport) {
  Shared& shared = impl->shared;
  const ServerOptions& options = shared.options;
  if (transport->endpoints() < options.workers) {
    return Status(Code::kInvalidArgument,
                  std::to_string(options.workers) +
                      " workers need as many endpoints, but the transport has " +
                      std::to_string(transport->endpoints()));
  }
  shared.started_ns = base::monotonic_ns();
  shared.transport = std::move(transport);
  shared.calls = std::make_unique<Calls>(options.call_workers, shared.memory);
  shared.address = options.address;
  if (shared.address.empty()) {
    const bool is_ipv6 = options.host.find(':') != std::string::npos;
    shared.address = is_ipv6 ? "[" + options.host + "]" : options.host;
    shared.address += ":" + std::to_string(shared.transport->port());
  }
  if (options.shard_map.version != 0)
    PETPS_RETURN_IF_ERROR(shared.set_shard_map(options.shard_map));
  shared.set_pauses(options.pauses);
  PETPS_RETURN_IF_ERROR(shared.open_rdma());
  Status status = start_workers(shared);
  if (!status.ok()) {
    release_readers(shared);
    return status;
  }
  std::unique_ptr<Server> server(new Server(std::move(impl)));
  if (shared.rdma != nullptr) status = shared.rdma->start();
  if (status.ok()) status = shared.transport->start();
  if (!status.ok()) return status;  // ~Server stops the threads
  return server;
}

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Server::~Server() {
  // Connections that could not be drained are closed; a destructor cannot report that.
  [[maybe_unused]] const Status status = stop();
}

Status Server::stop() { return stop(impl_->shared.options.drain_ms); }

Status Server::stop(uint64_t drain_ms) {
  if (impl_->stopped) return {};
  impl_->stopped = true;
  Shared& shared = impl_->shared;
  shared.transport->stop_accepting();
  if (shared.rdma != nullptr) shared.rdma->stop_accepting();
  shared.drain_until_ns.store(base::monotonic_ns() + drain_ms * 1'000'000,
                              std::memory_order_release);
  shared.stopping.store(true, std::memory_order_release);
  for (const auto& worker : shared.workers) worker->endpoint().wake();
  for (std::thread& thread : shared.threads) thread.join();
  if (shared.measuring.joinable()) shared.measuring.join();
  size_t undrained = 0;
  for (const auto& worker : shared.workers) undrained += worker->drained() ? 0 : 1;
  const size_t pushes = shared.writer->waiting();
  shared.writer->finish();
  shared.calls->finish();
  // The pool and its epochs may be unmapped next, so nothing may read a row or hold a pin any more.
  shared.transport->end();
  if (shared.rdma != nullptr) shared.rdma->end();
  release_readers(shared);
  if (undrained == 0) return {};
  return Status(Code::kDeadlineExceeded,
                std::to_string(undrained) + " workers still had requests in flight after " +
                    std::to_string(drain_ms) + " ms (" + std::to_string(pushes) +
                    " pushes were waiting): their connections were closed");
}

uint16_t Server::port() const { return impl_->shared.transport->port(); }
transport::Transport& Server::transport() { return *impl_->shared.transport; }
Calls& Server::calls() { return *impl_->shared.calls; }
Status Server::set_shard_map(const wire::ShardMap& map) { return impl_->shared.set_shard_map(map); }
void Server::set_pauses(const Pauses& pauses) { impl_->shared.set_pauses(pauses); }
void Server::keep_pulls(uint64_t until_ns) {
  impl_->shared.pulls_until_ns.store(until_ns, std::memory_order_release);
}
void Server::track_pushes(uint32_t partition, bool is_tracked) {
  impl_->shared.writer->track(partition, impl_->shared.current_ownership()->shard.partitions,
                              is_tracked);
}
bool Server::take_pushed(uint32_t partition, std::vector<PushedKey>& out) {
  return impl_->shared.writer->take_tracked(partition, out);
}
wire::Shard Server::shard() const { return impl_->shared.current_ownership()->shard; }
std::string Server::address() const { return impl_->shared.address; }
StatsSnapshot Server::stats() const { return impl_->shared.stats(); }
std::vector<Incident> Server::incidents_after(uint64_t number) const {
  return impl_->shared.incidents_after(number);
}
std::vector<std::string> Server::refusals() const { return impl_->shared.transport->refusals(); }
Progress Server::progress() const {
  Progress progress{{}, impl_->shared.writer->rounds()};
  for (const auto& worker : impl_->shared.workers) progress.workers.push_back(worker->rounds());
  return progress;
}
uint64_t Server::take_spans(size_t most, std::vector<Span>& out) {
  const std::lock_guard lock(impl_->shared.spans_mutex);
  const size_t end = out.size() + most;
  uint64_t dropped = 0;
  const auto& workers = impl_->shared.workers;
  const size_t first = impl_->shared.first_span_worker++;  // so that none always comes last
  for (size_t i = 0; i < workers.size(); ++i) {
    SpanRing* const spans = workers[(first + i) % workers.size()]->spans();
    if (spans == nullptr) continue;
    spans->take(end - out.size(), out);
    dropped += spans->dropped();
  }
  return dropped;
}

std::string Server::status_json() const { return impl_->shared.status_json(); }

void Server::set_status_member(const std::string& name, std::string json) {
  const std::lock_guard lock(impl_->shared.mutex);
  impl_->shared.members[name] = std::move(json);
}

}  // namespace petps::server
