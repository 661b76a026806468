#include "petps_client/endpoint.h"

#include <algorithm>
#include <chrono>

#include "base/clock.h"

namespace petps::client {

using base::Code;
using base::Result;
using base::Status;

namespace {

// The first rest is shorter than a server's restart, the longest one costs a recovered server little.
constexpr uint64_t kFirstRestNs = 5'000'000;
constexpr uint64_t kLongestRestNs = 500'000'000;

Status check_limits(const wire::Limits& limits, Connection& connection) {
  const bool usable = limits.body_bytes > 0 && limits.keys_per_pull > 0 &&
                      limits.sections_per_pull > 0 && limits.keys_per_push > 0 &&
                      limits.in_flight > 0;
  return usable ? Status() : connection.distrust("its hello announces a limit of 0");
}

// A server may announce more than this build was made for.
wire::Limits lower_of(wire::Limits limits) {
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
  if (connection_ != nullptr) endpoint_->take_back(std::move(connection_));
}

Result<std::unique_ptr<Connection>> Endpoint::open(const Deadline& deadline,
                                                   wire::HelloReply& hello) {
  auto opened = Connection::open(address_, deadline);
  if (!opened.ok()) return opened;
  Connection& connection = **opened;
  wire::HelloRequest request;
  request.client = options_.name;
  wire::encode_hello(connection.next_request_id(), request, connection.frame());
  wire::FrameHeader header;
  const auto body = connection.ask(connection.frame(), header, deadline);
  if (!body.ok()) return body.status();
  const Status decoded = wire::decode_hello_reply(header, body.value(), hello);
  if (!decoded.ok()) return connection.distrust(decoded.message());
  PETPS_RETURN_IF_ERROR(check_limits(hello.limits, connection));
  hello.limits = lower_of(hello.limits);
  if (options_.rdma != nullptr && (hello.features & wire::kFeatureRdma) != 0) {
    const Status moved = connection.move_to_rdma(*options_.rdma, deadline);
    if (connection.broken()) return moved;  // else it was refused, and TCP goes on
  }
  return opened;
}

Result<Lease> Endpoint::lease(const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  const std::chrono::nanoseconds left(deadline.left_ns());
  if (!returned_.wait_for(lock, left, [this] { return leased_ < options_.connections; })) {
    // Not the server's fault: it must not rest for it.
    return Status(Code::kResourceExhausted,
                  name_ + ": all " + std::to_string(options_.connections) +
                      " connections were in use for " + std::to_string(deadline.given_ms) +
                      " ms: raise Options.connections or the deadline");
  }
  ++leased_;
  while (!idle_.empty()) {
    std::unique_ptr<Connection> connection = std::move(idle_.back());
    idle_.pop_back();
    if (connection->is_reusable()) return Lease(this, std::move(connection), hello_);
  }
  lock.unlock();
  wire::HelloReply hello;
  auto opened = open(deadline, hello);
  lock.lock();
  if (!opened.ok()) {
    --leased_;
    returned_.notify_one();
    return opened.status();
  }
  // Another pool behind the same address: its tables have other ids.
  if (greeted_ && hello.pool_uuid != hello_.pool_uuid) catalogue_ = {nullptr, 0, ++clock_};
  hello_ = hello;
  greeted_ = true;
  return Lease(this, std::move(opened).value(), hello);
}

void Endpoint::take_back(std::unique_ptr<Connection> connection) {
  const std::lock_guard lock(mutex_);
  --leased_;
  if (!connection->broken()) idle_.push_back(std::move(connection));
  returned_.notify_one();
}

std::shared_ptr<const Catalogue> Endpoint::last_catalogue() const {
  const std::lock_guard lock(mutex_);
  return catalogue_.value;
}

Result<std::shared_ptr<const Catalogue>> Endpoint::catalogue(Connection& connection,
                                                             const Deadline& deadline) {
  auto last = last_catalogue();
  if (last != nullptr) return last;
  return read_catalogue(connection, deadline);
}

Result<std::shared_ptr<const Catalogue>> Endpoint::read_catalogue(Connection& connection,
                                                                  const Deadline& deadline) {
  uint64_t called_at = 0;
  for (;;) {
    uint64_t asked_at = 0;
    {
      const std::lock_guard lock(mutex_);
      asked_at = ++clock_;
    }
    if (called_at == 0) called_at = asked_at;
    auto built = ask_catalogue(connection, deadline);
    if (!built.ok()) return built;
    const std::lock_guard lock(mutex_);
    if (asked_at > catalogue_.read_at) {
      catalogue_ = {built.value(), asked_at, ++clock_};
      return built;
    }
    if (catalogue_.asked_at > called_at) return catalogue_.value;
  }
}

Result<std::shared_ptr<const Catalogue>> Endpoint::ask_catalogue(Connection& connection,
                                                                 const Deadline& deadline) const {
  wire::encode_tables(connection.next_request_id(), connection.frame());
  wire::FrameHeader header;
  const auto body = connection.ask(connection.frame(), header, deadline);
  if (!body.ok()) return body.status();
  wire::TablesReply reply;
  const Status decoded = wire::decode_tables_reply(header, body.value(), reply);
  if (!decoded.ok()) return connection.distrust(decoded.message());
  return Catalogue::build(reply, model_, name_);
}

Result<wire::ShardMap> Endpoint::read_shard_map(const Deadline& deadline) {
  auto leased = lease(deadline);
  if (!leased.ok()) return leased.status();
  wire::ShardMap map;
  if (!leased->has(wire::kFeatureShardMap)) return map;
  Connection& connection = **leased;
  wire::encode_shard_map(connection.next_request_id(), connection.frame());
  wire::FrameHeader header;
  const auto body = connection.ask(connection.frame(), header, deadline);
  if (!body.ok()) return body.status();
  const Status decoded = wire::decode_shard_map_reply(header, body.value(), map);
  if (!decoded.ok()) return connection.distrust(decoded.message());
  return map;
}

void Endpoint::failed() {
  const std::lock_guard lock(mutex_);
  rest_ns_ = std::clamp(rest_ns_ * 2, kFirstRestNs, kLongestRestNs);
  rests_until_ns_ = base::monotonic_ns() + rest_ns_;
}

void Endpoint::answered() {
  const std::lock_guard lock(mutex_);
  rest_ns_ = 0;
  rests_until_ns_ = 0;
}

uint64_t Endpoint::rests_until_ns() const {
  const std::lock_guard lock(mutex_);
  return rests_until_ns_;
}

uint32_t Endpoint::hot_set_ms() const {
  const std::lock_guard lock(mutex_);
  constexpr uint32_t kLongest = 3'600;  // a server that asks for more is not believed
  return greeted_ ? std::min(hello_.hot_set_seconds, kLongest) * 1000 : 0;
}

}  // namespace petps::client
