#include "server/push_writer.h"

#include <pthread.h>

namespace petps::server {

using base::Status;

PushWriter::PushWriter(const wire::Limits& limits, std::function<void(size_t, PushDone)> done)
    : limits_(limits), done_(std::move(done)) {}

PushWriter::~PushWriter() { finish(); }

void PushWriter::finish() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  ready_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void PushWriter::start() {
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "petps-push");
}

bool PushWriter::queue(PushJob& job) {
  {
    const std::lock_guard lock(mutex_);
    // An empty queue takes any frame: one may be as large as the bound.
    if (!jobs_.empty() &&
        (jobs_.size() >= kPushQueueJobs || bytes_ + job.frame.size() > kPushQueueBytes)) {
      return false;
    }
    bytes_ += job.frame.size();
    jobs_.push_back(std::move(job));
  }
  ready_.notify_one();
  return true;
}

size_t PushWriter::waiting() const {
  const std::lock_guard lock(mutex_);
  return jobs_.size();
}

void PushWriter::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    ready_.wait(lock, [this] { return ending_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    PushJob job = std::move(jobs_.front());
    jobs_.pop_front();
    bytes_ -= job.frame.size();
    lock.unlock();
    done_(job.worker, apply(job));
    lock.lock();
  }
}

PushDone PushWriter::apply(const PushJob& job) {
  PushDone done;
  done.connection = job.connection;
  done.request_id = job.request_id;
  done.start_ns = job.start_ns;
  wire::FrameHeader header;
  wire::PushRequest push;
  const std::span<const std::byte> frame(job.frame);
  done.status = wire::decode_request_header(frame, header);
  if (done.status.ok()) {
    done.status = wire::decode_push(header, frame.subspan(wire::kHeaderBytes), limits_, push);
  }
  if (!done.status.ok()) return done;
  done.rows = push.keys.size();
  table::Batch batch;
  batch.keys = push.keys;
  batch.rows = push.row_bytes == 0 ? nullptr : push.rows.data();
  batch.stamp = push.stamp;
  if (!push.deletions.empty()) {
    deleted_.resize(push.keys.size());
    for (size_t i = 0; i < deleted_.size(); ++i) {
      deleted_[i] = static_cast<uint8_t>((push.deletions[i / 64] >> (i % 64)) & 1);
    }
    batch.deleted = deleted_;
  }
  const base::Result<table::ApplyReport> report = job.table->apply(batch);
  done.status = report.status();
  if (report.ok()) {
    const table::ApplyReport& r = report.value();
    done.reply = {r.inserted, r.updated, r.deleted, r.absent, r.refused};
  }
  return done;
}

}  // namespace petps::server
