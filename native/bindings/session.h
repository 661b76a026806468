// Keeps an open pool open while a call uses it, and says so clearly once it is closed.
//
// Assumptions: with() is called with the GIL dropped (see bindings.h); close() too.
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
  ~Session();  // an open pool is dropped as by a crash: it recovers at its next open
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Calls f(Tables&) while the pool cannot be closed. kFailedPrecondition when it is closed.
  template <typename F>
  auto with(F&& f) {
    std::shared_lock lock(mutex_);
    check_open();
    return std::forward<F>(f)(*tables_);
  }

  // Waits for the calls in progress, then closes. kFailedPrecondition while a server or scan holds
  // it. Twice is once.
  void close();
  bool closed() const { return closing_.load(std::memory_order_acquire); }
  const std::string& path() const { return path_; }

  // An epoch reader for one call; readers are few because calls are short. Dropped pins must
  // precede the return.
  class Lease {
   public:
    explicit Lease(Session& session);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    // Never empty: waits (bounded by the other callers' work) when the list is full.
    epoch::Pin pin();

   private:
    Session& session_;
    epoch::Reader* reader_;
  };

  // What keeps the pool from being closed: "a running server". Released by its destructor.
  class Hold {
   public:
    Hold(std::shared_ptr<Session> session, std::string what);
    ~Hold();
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
    table::Tables& tables() { return *session_->tables_; }  // valid as long as the Hold

   private:
    std::shared_ptr<Session> session_;
    std::string what_;
  };

 private:
  void check_open() const;

  std::shared_mutex mutex_;  // shared: a call; exclusive: close
  std::atomic<bool> closing_{false};
  std::unique_ptr<table::Tables> tables_;
  std::string path_;
  std::mutex readers_mutex_;  // readers_, holds_
  std::vector<epoch::Reader*> readers_;
  std::vector<std::string> holds_;
};

// Drops the GIL, keeps the pool open, calls f(Tables&).
template <typename F>
auto released(const std::shared_ptr<Session>& session, F&& f) {
  const Released released_gil;
  return session->with(std::forward<F>(f));
}

}  // namespace petps::bindings
