// A running server as Python sees it.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings/session.h"
#include "server/server.h"

namespace petps::bindings {

// A server and the Hold that keeps its pool open. The server is destroyed first.
class ServerHandle {
 public:
  ServerHandle(const std::shared_ptr<Session>& session, const server::ServerOptions& options)
      : hold_(std::make_unique<Session::Hold>(session, "a running server")),
        server_(unwrap(server::Server::start(hold_->tables(), options))) {}

  // Call f(Server&) while the pool cannot be closed. Call it with the GIL dropped (see session.h).
  // Raise kFailedPrecondition after stop(), because the server must not use the pool then.
  template <typename F>
  auto with(F&& f) {
    const std::shared_lock lock(mutex_);
    if (hold_ == nullptr) {
      throw StatusError(base::Status(base::Code::kFailedPrecondition,
                                     "the server has been stopped: start another one"));
    }
    return std::forward<F>(f)(*server_);
  }
  // These remain valid after stop().
  uint16_t port() const { return server_->port(); }
  std::string address() const { return server_->address(); }
  server::Calls& calls() { return server_->calls(); }  // refuses calls after stop()
  uint64_t take_spans(size_t most, std::vector<server::Span>& out) {
    return server_->take_spans(most, out);
  }

  // Stop the server. Afterwards the pool may be closed, even if something was still in flight
  // after the drain time. Other calls continue during the drain. A second call does nothing.
  void stop(std::optional<uint64_t> drain_ms) {
    const std::lock_guard one(stop_mutex_);
    const base::Status status = drain_ms ? server_->stop(*drain_ms) : server_->stop();
    {
      const std::unique_lock lock(mutex_);
      hold_.reset();
    }
    check(status);
  }

 private:
  std::unique_ptr<Session::Hold> hold_;  // null after stop()
  std::unique_ptr<server::Server> server_;
  std::mutex stop_mutex_;    // one stop at a time; taken before mutex_
  std::shared_mutex mutex_;  // shared: a call; exclusive: the last step of stop()
};

}  // namespace petps::bindings
