#include "server/push_writer.h"

#include <pthread.h>

#include <chrono>
#include <iterator>
#include <utility>

namespace petps::server {

using base::Status;

PushWriter::PushWriter(table::Tables& tables, const wire::Limits& limits,
                       transport::MemoryBudget& memory, std::function<void(PushDone)> done,
                       CheckAgain check_again)
    : tables_(tables),
      limits_(limits),
      memory_(memory),
      done_(std::move(done)),
      check_again_(std::move(check_again)) {}

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
    const size_t bytes = job.frame.size();
    if (!has_room_locked(job.owner, bytes)) return false;
    bytes_ += bytes;
    ++jobs_;
    memory_.change(0, bytes);
    Waiting& own = waiting_[job.owner];
    own.bytes += bytes;
    own.jobs.push_back(std::move(job));
  }
  ready_.notify_one();
  return true;
}

bool PushWriter::has_room(uint64_t owner, size_t bytes) const {
  const std::lock_guard lock(mutex_);
  return has_room_locked(owner, bytes);
}

bool PushWriter::has_room_locked(uint64_t owner, size_t bytes) const {
  // An empty queue takes any frame, because one frame may be as large as the bound.
  if (jobs_ == 0) return true;
  const auto own = waiting_.find(owner);
  if (own != waiting_.end() && (own->second.jobs.size() >= kPushQueueJobs / 2 ||
                                own->second.bytes + bytes > kPushQueueBytes / 2))
    return false;
  return jobs_ < kPushQueueJobs && bytes_ + bytes <= kPushQueueBytes && memory_.has_room(bytes);
}

size_t PushWriter::waiting() const {
  const std::lock_guard lock(mutex_);
  return jobs_;
}

void PushWriter::wait_for_round() const {
  constexpr auto kPause = std::chrono::microseconds(50);
  const uint64_t round = rounds_.load(std::memory_order_acquire);
  if (round % 2 == 0) return;
  while (rounds_.load(std::memory_order_acquire) == round) std::this_thread::sleep_for(kPause);
}

void PushWriter::track(uint32_t partition, uint32_t partitions, bool is_tracked) {
  const std::lock_guard lock(tracked_mutex_);
  partitions_ = partitions;
  tracked_.erase(partition);
  if (is_tracked) tracked_[partition];
}

bool PushWriter::take_tracked(uint32_t partition, std::vector<PushedKey>& out) {
  out.clear();
  const std::lock_guard lock(tracked_mutex_);
  const auto tracked = tracked_.find(partition);
  if (tracked == tracked_.end()) return true;
  out.swap(tracked->second.keys);
  return !std::exchange(tracked->second.has_lost, false);
}

// Called after the rows are applied, and before the push is answered. A caller of track() that
// reads all rows afterwards misses none: either it reads the row, or the key is noted here.
void PushWriter::note_pushed(uint32_t table, std::span<const uint64_t> keys) {
  const std::lock_guard lock(tracked_mutex_);
  if (tracked_.empty()) return;
  for (const uint64_t key : keys) {
    const auto tracked = tracked_.find(wire::partition_of(key, partitions_));
    if (tracked == tracked_.end()) continue;
    if (tracked->second.keys.size() < kTrackedKeys) {
      tracked->second.keys.push_back({table, key});
    } else {
      tracked->second.has_lost = true;
    }
  }
}

void PushWriter::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    ready_.wait(lock, [this] { return finishing_ || jobs_ > 0; });
    if (jobs_ == 0) return;
    const std::vector<PushJob> group = take_group();
    lock.unlock();
    rounds_.fetch_add(1, std::memory_order_relaxed);
    apply(group);
    rounds_.fetch_add(1, std::memory_order_release);
    for (const PushJob& job : group) memory_.change(job.frame.size(), 0);
    lock.lock();
  }
}

// Take the first job of the next owner, and the pushes that share its drains: one of each owner, in
// turns, as long as the first job of somebody does. The caller holds mutex_.
std::vector<PushJob> PushWriter::take_group() {
  std::vector<PushJob> group;
  size_t keys = 0;
  size_t passed = 0;  // owners in a row whose first job does not join
  auto at = waiting_.upper_bound(turn_);
  while (passed < waiting_.size()) {
    if (at == waiting_.end()) at = waiting_.begin();
    Waiting& own = at->second;
    PushJob& job = own.jobs.front();
    const bool joins =
        group.empty() || (job.table == group[0].table && job.stamp == group[0].stamp &&
                          keys + job.keys <= group[0].table->keys_together());
    if (!joins) {
      ++passed;
      ++at;
      continue;
    }
    passed = 0;
    if (group.empty()) turn_ = at->first;
    keys += job.keys;
    --jobs_;
    bytes_ -= job.frame.size();
    own.bytes -= job.frame.size();
    group.push_back(std::move(job));
    own.jobs.pop_front();
    at = own.jobs.empty() ? waiting_.erase(at) : std::next(at);
  }
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
  if (check_again_ != nullptr) PETPS_RETURN_IF_ERROR(check_again_(job.map_change_count, push.keys));
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
    note_pushed(table.id(), batches_[i].keys);
    done_({jobs[i]->origin,
           status,
           {counts.inserted, counts.updated, counts.deleted, counts.absent, counts.refused}});
  }
}

}  // namespace petps::server
