// Who the callers of a worker's connections are, and what they may do (petps/server/DOORS.md).
#include "access/access.h"

#include "base/clock.h"
#include "server/shared.h"
#include "server/worker.h"

namespace petps::server {

using access::CallerPointer;
using base::Code;
using base::Status;
using transport::ConnectionId;

namespace {

// A grant can expire, so callers are renewed this often even if the grants are the same.
constexpr uint64_t kRenewNs = 500'000'000;

// The caller of requests from this process: its doors have checked theirs.
const CallerPointer& this_process() {
  static const CallerPointer caller = [] {
    access::Grant grant;
    grant.name = "this process";
    grant.roles = access::kAllRoles;
    return std::make_shared<access::Caller>(std::move(grant), true);
  }();
  return caller;
}

}  // namespace

base::Result<CallerPointer> Worker::authenticate(const Request& request) {
  if (source_ == Source::kCalls) return this_process();
  if (source_ == Source::kRdma) {
    if (CallerPointer caller = shared_.caller_of(state_of(request.connection).pairing))
      return caller;
    return Status(Code::kUnauthenticated, "the connection that opened this queue pair is gone");
  }
  access::Credentials credentials;
  if (static_cast<wire::Opcode>(request.header.opcode) == wire::Opcode::kHello) {
    wire::HelloRequest hello;
    PETPS_RETURN_IF_ERROR(wire::decode_hello(request.header, request.body(), hello));
    credentials.token = hello.token;
  }
  const transport::PeerIdentity identity = endpoint_.identity(request.connection);
  const std::string peer = endpoint_.peer(request.connection);
  credentials.certificate_names = identity.certificate_names;
  credentials.peer = peer;
  return shared_.gate->authenticate(credentials);
}

Status Worker::admit(const Request& request, bool& is_refused) {
  ConnectionState& state = state_of(request.connection);
  const bool is_hello = static_cast<wire::Opcode>(request.header.opcode) == wire::Opcode::kHello;
  if (state.caller == nullptr || is_hello) {
    auto caller = authenticate(request);
    if (!caller.ok()) {
      is_refused = true;
      // One line for each failure, until a peer has had too many.
      if (caller.status().code() == Code::kUnauthenticated) {
        shared_.report_incident("peer " + state.peer + ": " + caller.status().to_string(),
                                state.peer);
      }
      return caller.status();
    }
    state.caller = std::move(caller.value());
    state.push_owner = 0;
  }
  caller_ = state.caller.get();
  if (state.admitted) return {};
  state.admitted = true;
  Status limited = caller_->charge(request.frame.size());
  if (!limited.ok()) shared_.gate->count_limited();
  return limited;
}

const std::string* Worker::model_of(const table::Table& table) {
  const uint32_t instance = table.record().spec.instance;
  const auto known = models_.find(instance);
  if (known != models_.end()) return &known->second;
  for (const pool::InstanceRecord& record : shared_.tables.pool().instances()) {
    if (record.id == instance) return &(models_[instance] = record.model);
  }
  return nullptr;
}

Status Worker::check_right(access::Role role, uint32_t id, const table::Table* table) {
  if (caller_->may_everywhere(role)) return {};
  const std::string* model = table == nullptr ? nullptr : model_of(*table);
  if (model != nullptr && caller_->may(role, *model)) return {};
  shared_.gate->count_denied();
  return caller_->refuse(role, "table " + std::to_string(id));
}

void Worker::renew_callers() {
  if (source_ == Source::kCalls || shared_.gate->mode() != access::Mode::kGrants) return;
  const uint64_t generation = shared_.gate->generation();
  const uint64_t now = base::monotonic_ns();
  if (generation == grants_generation_ && now - renewed_ns_ < kRenewNs) return;
  bool is_done = true;
  for (const ConnectionId connection : endpoint_.connections()) {
    ConnectionState& state = state_of(connection);
    if (state.caller == nullptr) continue;
    CallerPointer caller = shared_.gate->renew(state.caller);
    if (caller != nullptr) {
      state.caller = std::move(caller);
    } else if (state.pushes_in_flight > 0) {  // answer them first
      endpoint_.pause(connection);
      is_done = false;
    } else {
      endpoint_.close(connection, Status(Code::kUnauthenticated,
                                         "the grant of '" + state.caller->name() +
                                             "' was revoked or has expired: connect again with "
                                             "another token"));
    }
  }
  if (!is_done) return;
  grants_generation_ = generation;
  renewed_ns_ = now;
}

}  // namespace petps::server
