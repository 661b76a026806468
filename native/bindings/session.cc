#include "bindings/session.h"

#include <algorithm>
#include <thread>

namespace petps::bindings {

using base::Code;
using base::Status;

Session::Session(std::unique_ptr<table::Tables> tables)
    : tables_(std::move(tables)), path_(tables_->pool().medium().path()) {}

Session::~Session() = default;

void Session::check_open() const {
  if (!closed()) return;
  throw StatusError(Status(Code::kFailedPrecondition,
                           "pool " + path_ + " is closed; open it again with petps.open"));
}

void Session::close() {
  {
    std::lock_guard guard(readers_mutex_);
    if (!holds_.empty()) {
      throw StatusError(
          Status(Code::kFailedPrecondition, "pool " + path_ + " is in use by " + holds_.front() +
                                                "; stop that before closing the pool"));
    }
    if (closing_.exchange(true, std::memory_order_acq_rel)) return;
  }
  std::unique_lock lock(mutex_);
  for (epoch::Reader* reader : readers_) tables_->epochs().release(reader);
  readers_.clear();
  const Status status = tables_->close();
  tables_.reset();
  check(status);
}

Session::Lease::Lease(Session& session) : session_(session), reader_(nullptr) {
  {
    std::lock_guard guard(session_.readers_mutex_);
    if (!session_.readers_.empty()) {
      reader_ = session_.readers_.back();
      session_.readers_.pop_back();
      return;
    }
  }
  reader_ = session_.tables_->epochs().lease();
  if (reader_ == nullptr) {
    throw StatusError(Status(Code::kResourceExhausted,
                             "pool " + session_.path_ + ": " + std::to_string(epoch::kMaxReaders) +
                                 " calls already read it; use fewer threads"));
  }
}

Session::Lease::~Lease() {
  std::lock_guard guard(session_.readers_mutex_);
  session_.readers_.push_back(reader_);
}

epoch::Pin Session::Lease::pin() {
  epoch::Pin pin = reader_->pin();
  while (!pin) {
    std::this_thread::yield();
    pin = reader_->pin();
  }
  return pin;
}

Session::Hold::Hold(std::shared_ptr<Session> session, std::string holder)
    : session_(std::move(session)), holder_(std::move(holder)) {
  std::lock_guard guard(session_->readers_mutex_);
  session_->check_open();
  session_->holds_.push_back(holder_);
}

Session::Hold::~Hold() {
  std::lock_guard guard(session_->readers_mutex_);
  auto& holds = session_->holds_;
  holds.erase(std::find(holds.begin(), holds.end(), holder_));
}

}  // namespace petps::bindings
