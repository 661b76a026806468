#include "server/push_writer.h"

#include <pthread.h>

#include <utility>

namespace petps::server {

using base::Status;

PushWriter::PushWriter(table::Tables& tables, const wire::Limits& limits,
                       transport::MemoryBudget& memory, std::function<void(PushDone)> done)
    : tables_(tables), limits_(limits), memory_(memory), done_(std::move(done)) {}

PushWriter::~PushWriter() { finish(); }

void PushWriter::finish() {
  {
    const std::lock_guard lock(mutex_);
    finishing_ = true;
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
    // An empty queue takes any frame, because one frame may be as large as the bound.
    if (!jobs_.empty() &&
        (jobs_.size() >= kPushQueueJobs || bytes_ + job.frame.size() > kPushQueueBytes ||
         !memory_.has_room(job.frame.size()))) {
      return false;
    }
    bytes_ += job.frame.size();
    memory_.change(0, job.frame.size());
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
    ready_.wait(lock, [this] { return finishing_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const std::vector<PushJob> group = take_group();
    lock.unlock();
    rounds_.fetch_add(1, std::memory_order_relaxed);
    apply(group);
    rounds_.fetch_add(1, std::memory_order_relaxed);
    for (const PushJob& job : group) memory_.change(job.frame.size(), 0);
    lock.lock();
  }
}

// Take the first job, and the pushes behind it that share its drains. The caller holds mutex_.
std::vector<PushJob> PushWriter::take_group() {
  std::vector<PushJob> group;
  size_t keys = 0;
  do {
    PushJob& job = jobs_.front();
    keys += job.keys;
    bytes_ -= job.frame.size();
    group.push_back(std::move(job));
    jobs_.pop_front();
  } while (!jobs_.empty() && jobs_.front().table == group[0].table &&
           jobs_.front().stamp == group[0].stamp &&
           keys + jobs_.front().keys <= group[0].table->keys_together());
  return group;
}

void GivenUpPushes::combine(Calls& known, Calls other) {
  if (known.oldest < other.oldest) std::swap(known, other);
  const uint64_t behind = known.oldest - other.oldest;
  if (behind < wire::kPushOrderCalls) known.finished |= other.finished >> behind;
}

bool GivenUpPushes::has(const wire::PushOrder& order) {
  if (order.client == 0) return false;
  if (calls_.size() >= kPushClients && !calls_.contains(order.client)) {
    calls_before_ = std::move(calls_);
    calls_.clear();
  }
  Calls& known = calls_[order.client];
  const auto before = calls_before_.find(order.client);
  if (before != calls_before_.end()) combine(known, before->second);
  combine(known, {order.oldest, order.finished});
  if (order.number < known.oldest) return true;
  const uint64_t place = order.number - known.oldest;
  return place < wire::kPushOrderCalls && ((known.finished >> place) & 1) != 0;
}

// Add the push to batches_, or say why it cannot be applied.
Status PushWriter::add_batch(const PushJob& job) {
  wire::PushRequest push;
  PETPS_RETURN_IF_ERROR(wire::decode_push(job.origin.header, job.body(), limits_, push));
  if (given_up_.has(push.order)) {
    return Status(base::Code::kDeadlineExceeded,
                  "push of " + std::to_string(push.keys.size()) +
                      " rows was not applied: its client gave it up and sent a newer push before "
                      "it arrived");
  }
  table::Batch& batch = batches_.emplace_back();
  batch.keys = push.keys;
  batch.rows = push.row_bytes == 0 ? nullptr : push.rows.data();
  batch.stamp = push.stamp;
  if (!push.deletions.empty()) {
    std::vector<uint8_t>& deleted = deleted_.emplace_back(push.keys.size());
    for (size_t i = 0; i < deleted.size(); ++i)
      deleted[i] = static_cast<uint8_t>((push.deletions[i / 64] >> (i % 64)) & 1);
    batch.deleted = deleted;
  }
  return Status();
}

void PushWriter::apply(const std::vector<PushJob>& group) {
  batches_.clear();
  deleted_.clear();
  std::vector<const PushJob*> jobs;
  for (const PushJob& job : group) {
    if (Status refusal = add_batch(job); refusal.ok()) {
      jobs.push_back(&job);
    } else {
      done_({job.origin, std::move(refusal), {}});
    }
  }
  if (jobs.empty()) return;
  groups_.fetch_add(1, std::memory_order_relaxed);
  table::Table& table = *group[0].table;
  reports_.assign(jobs.size(), {});
  Status status = table.apply_together(batches_, reports_);
  const bool one_by_one = !status.ok() && jobs.size() > 1;  // some may fit where all do not
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (one_by_one) status = table.apply_together({&batches_[i], 1}, {&reports_[i], 1});
    const table::ApplyReport& counts = reports_[i];
    done_({jobs[i]->origin,
           status,
           {counts.inserted, counts.updated, counts.deleted, counts.absent, counts.refused}});
  }
}

}  // namespace petps::server
