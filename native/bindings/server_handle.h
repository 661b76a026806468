// A running server as Python holds it.
#pragma once

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

#include "bindings/session.h"
#include "server/server.h"

namespace petps::bindings {

// A server and what keeps its pool open. The server goes first.
class ServerHandle {
 public:
  ServerHandle(const std::shared_ptr<Session>& session, const server::ServerOptions& options)
      : hold_(std::make_unique<Session::Hold>(session, "a running server")),
        server_(unwrap(server::Server::start(hold_->tables(), options))) {}

  // Calls f(Server&) while the pool cannot be closed. kFailedPrecondition after stop(): nothing of
  // the server may look at the pool then. The GIL is dropped (see session.h).
  template <typename F>
  auto with(F&& f) {
    const std::shared_lock lock(mutex_);
    if (hold_ == nullptr) {
      throw StatusError(base::Status(base::Code::kFailedPrecondition,
                                     "the server has been stopped: start another one"));
    }
    return std::forward<F>(f)(*server_);
  }
  // What the server is, also after stop().
  uint16_t port() const { return server_->port(); }
  std::string address() const { return server_->address(); }
  server::Calls& calls() { return server_->calls(); }  // refuses by itself

  // The pool may be closed afterwards, also when something was still in flight after the drain
  // time. Other calls go on while it drains. Calling it again does nothing.
  void stop() {
    const std::lock_guard one(stop_mutex_);
    const base::Status status = server_->stop();
    {
      const std::unique_lock lock(mutex_);
      hold_.reset();
    }
    check(status);
  }

 private:
  std::unique_ptr<Session::Hold> hold_;  // null: stopped
  std::unique_ptr<server::Server> server_;
  std::mutex stop_mutex_;    // one stop at a time; taken before mutex_
  std::shared_mutex mutex_;  // shared: a call; exclusive: the end of stop
};

}  // namespace petps::bindings
