// Keeps a pool open while a call uses it, and raises an error after the pool is closed.
//
// ASSUMPTIONS: with() and close() are called with the GIL dropped (see bindings.h).
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "table/table.h"

namespace petps::bindings {

class Session {
 public:
  explicit Session(std::unique_ptr<table::Tables> tables);
  ~Session();  // does not close an open pool, which then recovers at its next open
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Call f(Tables&) while the pool cannot be closed. Raise kFailedPrecondition if it is closed.
  template <typename F>
  auto with(F&& f) {
    std::shared_lock lock(mutex_);
    check_open();
    return std::forward<F>(f)(*tables_);
  }

  // Wait for the calls in progress, then close. Raise kFailedPrecondition while a server or scan
  // holds the pool. A second call does nothing.
  void close();
  bool closed() const { return closing_.load(std::memory_order_acquire); }
  const std::string& path() const { return path_; }

  // An epoch reader for one call. A session has few, because calls are short. Pins must be
  // dropped before the lease.
  class Lease {
   public:
    explicit Lease(Session& session);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    // Return a pin, never an empty one. If the list is full, wait until other callers drop theirs.
    epoch::Pin pin();

   private:
    Session& session_;
    epoch::Reader* reader_;
  };

  // A guard that prevents closing the pool. `holder` names the user of the pool in errors, such as
  // "a running server".
  class Hold {
   public:
    Hold(std::shared_ptr<Session> session, std::string holder);
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
    table::Tables& tables() { return *session_->tables_; }  // valid while the Hold exists

   private:
    std::shared_ptr<Session> session_;
    std::string holder_;
  };

 private:
  void check_open() const;

  std::shared_mutex mutex_;  // shared: a call; exclusive: close
  std::atomic<bool> closing_{false};
  std::unique_ptr<table::Tables> tables_;
  std::string path_;
  std::mutex readers_mutex_;  // guards readers_ and holds_
  std::vector<epoch::Reader*> readers_;
  std::vector<std::string> holds_;
};

// Call f(Tables&) with the GIL dropped and the pool kept open.
template <typename F>
auto released(const std::shared_ptr<Session>& session, F&& f) {
  const Released released_gil;
  return session->with(std::forward<F>(f));
}

}  // namespace petps::bindings
