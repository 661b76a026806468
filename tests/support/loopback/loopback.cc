#include "tests/support/loopback/loopback.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/clock.h"
#include "tests/support/loopback/endpoint.h"

namespace petps::transport {

using base::Code;
using base::Status;

// ---- The peer's side

bool LoopbackClient::send(std::span<const std::byte> bytes) {
  const std::lock_guard lock(transport_.mutex_);
  if (pipe_->server_ended || pipe_->client_ended) return false;
  pipe_->to_server.insert(pipe_->to_server.end(), bytes.begin(), bytes.end());
  transport_.changed_.notify_all();
  return true;
}

size_t LoopbackClient::receive(std::span<std::byte> out, int timeout_ms) {
  std::unique_lock lock(transport_.mutex_);
  transport_.changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                               [&] { return pipe_->unread() > 0 || pipe_->server_ended; });
  const size_t n = std::min(out.size(), pipe_->unread());
  if (n == 0) return 0;
  std::memcpy(out.data(), pipe_->to_client.data() + pipe_->to_client_at, n);
  pipe_->to_client_at += n;
  pipe_->taken_ns = base::monotonic_ns();
  if (pipe_->unread() == 0) {
    pipe_->to_client.clear();
    pipe_->to_client_at = 0;
  }
  transport_.changed_.notify_all();
  return n;
}

void LoopbackClient::end_sending() {
  const std::lock_guard lock(transport_.mutex_);
  pipe_->client_ended = true;
  transport_.changed_.notify_all();
}

void LoopbackClient::close() {
  const std::lock_guard lock(transport_.mutex_);
  pipe_->client_ended = pipe_->client_gone = true;
  transport_.changed_.notify_all();
}

// ---- The server's side

LoopbackTransport::LoopbackTransport(const LoopbackOptions& options) : options_(options) {
  for (size_t i = 0; i < options.endpoints; ++i)
    endpoints_.push_back(std::make_unique<LoopbackEndpoint>(*this));
}

LoopbackTransport::~LoopbackTransport() = default;

Endpoint& LoopbackTransport::endpoint(size_t worker) { return *endpoints_[worker]; }

Status LoopbackTransport::start() {
  const std::lock_guard lock(mutex_);
  accepting_ = true;
  return {};
}

void LoopbackTransport::stop_accepting() {
  const std::lock_guard lock(mutex_);
  accepting_ = false;
}

std::unique_ptr<LoopbackClient> LoopbackTransport::connect() {
  const std::lock_guard lock(mutex_);
  auto pipe = std::make_shared<Pipe>();
  pipe->taken_ns = base::monotonic_ns();
  const std::string address = "loopback:" + std::to_string(next_peer_++);
  size_t open = 0;
  size_t fewest = 0;
  for (size_t i = 0; i < endpoints_.size(); ++i) {
    open += endpoints_[i]->open_connections();
    if (endpoints_[i]->open_connections() < endpoints_[fewest]->open_connections()) fewest = i;
  }
  Status refusal;
  if (!accepting_) {
    refusal = Status(Code::kUnavailable, "the server is stopping");
  } else if (open >= options_.limits.connections) {
    refusal = too_many_connections(options_.limits);
  } else if (options_.admit) {
    refusal = options_.admit(Peer{address});
  }
  auto client = std::make_unique<LoopbackClient>(*this, pipe);
  if (!refusal.ok()) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    options_.rules.encode_error(refusal, pipe->to_client);
    pipe->server_ended = true;
    return client;
  }
  endpoints_[fewest]->adopt(pipe, address);
  changed_.notify_all();
  return client;
}

void LoopbackTransport::set_completions(Completions completions, uint64_t seed) {
  const std::lock_guard lock(mutex_);
  completions_ = completions;
  random_.seed(seed);
  changed_.notify_all();
}

size_t LoopbackTransport::held() const {
  const std::lock_guard lock(mutex_);
  size_t n = 0;
  for (const auto& endpoint : endpoints_) {
    n += static_cast<size_t>(std::count_if(endpoint->posted_.begin(), endpoint->posted_.end(),
                                           [](const auto& posted) { return !posted.complete; }));
  }
  return n;
}

bool LoopbackTransport::finish_list(Which which, bool is_lost) {
  const std::lock_guard lock(mutex_);
  LoopbackEndpoint* at = nullptr;
  LoopbackEndpoint::Posted* chosen = nullptr;
  for (const auto& endpoint : endpoints_) {
    for (auto& posted : endpoint->posted_) {
      if (posted.complete) continue;
      const bool better =
          chosen == nullptr || (which == Which::kOldest) == (posted.number < chosen->number);
      if (!better) continue;
      chosen = &posted;
      at = endpoint.get();
    }
  }
  if (chosen == nullptr) return false;
  if (is_lost) {
    if (auto* c = at->find(chosen->connection)) {
      at->close_connection(*c, Status(Code::kUnavailable, "the connection broke"), false, false);
    }
    chosen->list.clear();
  }
  at->complete(*chosen);
  at->deliver();
  changed_.notify_all();
  return true;
}

bool LoopbackTransport::complete_oldest() { return finish_list(Which::kOldest, false); }
bool LoopbackTransport::complete_newest() { return finish_list(Which::kNewest, false); }
bool LoopbackTransport::drop_newest() { return finish_list(Which::kNewest, true); }

void LoopbackTransport::complete_all() {
  while (complete_oldest()) {
  }
}

}  // namespace petps::transport
