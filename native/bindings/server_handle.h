// A running server as Python holds it.
#pragma once

#include <memory>

#include "bindings/session.h"
#include "server/server.h"

namespace petps::bindings {

// A server and what keeps its pool open. The server goes first.
class ServerHandle {
 public:
  ServerHandle(const std::shared_ptr<Session>& session, const server::ServerOptions& options)
      : hold_(std::make_unique<Session::Hold>(session, "a running server")),
        server_(unwrap(server::Server::start(hold_->tables(), options))) {}

  server::Server& server() { return *server_; }

  // The pool may be closed afterwards, also when something was still in flight after the drain
  // time.
  void stop() {
    const base::Status status = server_->stop();
    hold_.reset();
    check(status);
  }

 private:
  std::unique_ptr<Session::Hold> hold_;
  std::unique_ptr<server::Server> server_;
};

}  // namespace petps::bindings
