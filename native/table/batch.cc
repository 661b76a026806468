// The division of a batch for the five verbs: none while its writer is the only one, by ranges of
// home buckets beside other writers or with several threads (range_locks.h).
#include <algorithm>
#include <array>
#include <system_error>
#include <thread>
#include <unordered_map>

#include "table/slice.h"

namespace petps::table {

using base::Code;
using base::Result;
using base::Status;

namespace {

// A thread costs about 50 us to start and join, a slice 30 us.
constexpr size_t kRowsOfAThread = 4096;
constexpr size_t kSlicesOfAThread = 16;  // before the threads join again

// The writer of one batch, slice by slice.
class Writer {
 public:
  Writer(Table::Impl& table, const Batch& batch, const Group* group)
      : table_(table),
        batch_(batch),
        group_(group),
        deletes_(std::any_of(batch.deleted.begin(), batch.deleted.end(),
                             [](uint8_t deleted) { return deleted != 0; })),
        number_(table.range_locks.enter()) {
    table_.begun.fetch_add(1);
  }
  ~Writer() {
    table_.range_locks.leave();
    table_.ended.fetch_add(1);
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  Result<ApplyReport> run() {
    Retiring retiring(table_);
    for (size_t at = 0; at < batch_.keys.size();) {
      const size_t left = batch_.keys.size() - at;
      // Where a drain flushes the disk, two writers would flush twice. If the table may be full,
      // deleted keys must make room for new keys of other ranges.
      const bool undivided = table_.synced() || group_ != nullptr || must_make_room();
      const size_t threads = std::min({size_t{batch_.threads}, kRanges, left / kRowsOfAThread});
      size_t n = left;
      if (group_ == nullptr) n = std::min(left, table_.synced() ? kSliceKeysSynced : kSliceKeys);
      if (!undivided && threads > 1) {
        n = std::min(left, kSliceKeys * kRanges * kSlicesOfAThread);
        retiring.flush();  // the threads may need these slots
        PETPS_RETURN_IF_ERROR(apply_by_range(at, n, threads));
      } else if (!undivided && !table_.range_locks.alone()) {
        n = std::min(left, kSliceKeys * kRanges);
        retiring.flush();
        PETPS_RETURN_IF_ERROR(apply_by_range(at, n, 1));
      } else {
        PETPS_RETURN_IF_ERROR(apply_whole(at, n, retiring));
      }
      at += n;
    }
    PETPS_RETURN_IF_ERROR(retry_refused(retiring));
    return report_;
  }

 private:
  bool must_make_room() const {
    return deletes_ && table_.occupied.load() + batch_.keys.size() > table_.capacity.load();
  }
  const DamagedRow* only_damaged(size_t at) const {
    return batch_.only_damaged.empty() ? nullptr : batch_.only_damaged.data() + at;
  }
  const uint32_t* stamps(size_t at) const {
    const bool are_given = table_.push_stamp.load() == 0 || batch_.only_of_stamp;
    return batch_.stamps.empty() || !are_given ? nullptr : batch_.stamps.data() + at;
  }
  // The caller holds the slice's ranges.
  Status apply(const Slice& slice, Table::Impl::Scratch& scratch, Retiring& retiring,
               ApplyReport* report) {
    if (table_.dropped) {
      return Status(Code::kNotFound, "table '" + table_.record.spec.name + "' has been dropped");
    }
    return apply_slice(table_, slice, table_.stamp_of(batch_), scratch, retiring, report);
  }

  Status apply_whole(size_t at, size_t n, Retiring& retiring) {
    const uint64_t row_bytes = table_.record.spec.row_bytes;
    table_.range_locks.take_all([&] { retiring.flush(); });
    const Status status =
        apply({batch_.keys.subspan(at, n),
               batch_.rows == nullptr ? nullptr : batch_.rows + at * row_bytes, nullptr,
               batch_.deleted.empty() ? nullptr : batch_.deleted.data() + at, stamps(at),
               batch_.only_of_stamp, only_damaged(at), batch_.only_missing, nullptr, group_},
              table_.scratch.front(), retiring, &report_);
    table_.range_locks.give(kAllRanges);
    return status;
  }

  // Each thread takes the ranges whose number modulo `threads` is the thread's number.
  Status apply_by_range(size_t at, size_t n, size_t threads) {
    divide(at, n);
    std::unique_lock turn(table_.turns, std::defer_lock);
    // Deletions wait for no slots, and make room for those who do.
    if (batch_.rows != nullptr) turn.lock();
    std::vector<ApplyReport> reports(threads);
    std::vector<Status> results(threads);
    std::vector<std::thread> others;
    const auto work = [&](size_t t) { results[t] = apply_ranges(t, threads, &reports[t]); };
    try {
      while (others.size() + 1 < threads) others.emplace_back(work, others.size() + 1);
    } catch (const std::system_error&) {  // no more threads available: fewer do all the work
    }
    work(0);
    for (size_t t = others.size() + 1; t < threads; ++t) work(t);
    for (std::thread& other : others) other.join();
    for (const ApplyReport& report : reports) report_ += report;
    for (const Share& share : shares_)
      refused_.insert(refused_.end(), share.refused.begin(), share.refused.end());
    for (const Status& status : results) PETPS_RETURN_IF_ERROR(status);
    return Status();
  }

  // Take a range, apply one slice, and give the range back, so that other writers run in between.
  Status apply_ranges(size_t first, size_t step, ApplyReport* report) {
    uint32_t left = 0;
    for (size_t range = first; range < kRanges; range += step)
      left |= shares_[range].keys.empty() ? 0 : 1u << range;
    Retiring retiring(table_);
    while (left != 0) {
      const size_t range = table_.range_locks.take_one(left, number_, [&] { retiring.flush(); });
      const Status status = apply_next(range, retiring, report);
      table_.range_locks.give(1u << range);
      PETPS_RETURN_IF_ERROR(status);
      if (shares_[range].applied == shares_[range].keys.size()) left &= ~(1u << range);
    }
    return Status();
  }

  Status apply_next(size_t range, Retiring& retiring, ApplyReport* report) {
    Share& share = shares_[range];
    const size_t at = share.applied;
    const size_t n = std::min(kSliceKeys, share.keys.size() - at);
    share.applied += n;
    return apply({std::span(share.keys).subspan(at, n), batch_.rows, share.places.data() + at,
                  share.deleted.empty() ? nullptr : share.deleted.data() + at, stamps(0),
                  batch_.only_of_stamp, only_damaged(0), batch_.only_missing, &share.refused},
                 table_.scratch[range], retiring, report);
  }

  // Divide keys [at, at + n) of the batch by range, keeping their order.
  void divide(size_t at, size_t n) {
    for (Share& share : shares_) share.clear();
    for (size_t i = at; i < at + n; ++i) {
      Share& share = shares_[index::Index::range_of(batch_.keys[i], kRanges)];
      share.keys.push_back(batch_.keys[i]);
      share.places.push_back(static_cast<uint32_t>(i));
      if (!batch_.deleted.empty()) share.deleted.push_back(batch_.deleted[i]);
    }
  }

  // Retry, undivided, the new keys that found no room because another range's deletions came
  // later. Skip a key that occurs again later in the batch.
  Status retry_refused(Retiring& retiring) {
    if (refused_.empty()) return Status();
    std::unordered_map<uint64_t, uint32_t> last;
    for (const uint32_t place : refused_) last[batch_.keys[place]] = 0;
    for (size_t i = 0; i < batch_.keys.size(); ++i) {
      const auto known = last.find(batch_.keys[i]);
      if (known != last.end()) known->second = static_cast<uint32_t>(i);
    }
    std::erase_if(refused_, [&](uint32_t place) { return last.at(batch_.keys[place]) != place; });
    std::vector<uint64_t> keys;
    for (const uint32_t place : refused_) keys.push_back(batch_.keys[place]);
    report_.refused -= keys.size();
    for (size_t at = 0; at < keys.size(); at += kSliceKeys) {
      const size_t n = std::min(kSliceKeys, keys.size() - at);
      table_.range_locks.take_all([&] { retiring.flush(); });
      const Status status = apply(
          {std::span(keys).subspan(at, n), batch_.rows, refused_.data() + at, nullptr, stamps(0),
           /*only_of_stamp=*/false, /*only_damaged=*/nullptr, batch_.only_missing},
          table_.scratch.front(), retiring, &report_);
      table_.range_locks.give(kAllRanges);
      PETPS_RETURN_IF_ERROR(status);
    }
    return Status();
  }

  struct Share {
    std::vector<uint64_t> keys;
    std::vector<uint32_t> places;
    std::vector<uint8_t> deleted;
    std::vector<uint32_t> refused;
    size_t applied = 0;  // number of keys applied
    void clear() {
      applied = 0;
      refused.clear();
      keys.clear();
      places.clear();
      deleted.clear();
    }
  };
  Table::Impl& table_;
  const Batch& batch_;
  const Group* group_;
  bool deletes_;
  uint32_t number_;
  ApplyReport report_;
  std::array<Share, kRanges> shares_;
  std::vector<uint32_t> refused_;  // rows of the batch whose keys found no room
};

}  // namespace

ApplyReport& ApplyReport::operator+=(const ApplyReport& other) {
  inserted += other.inserted;
  updated += other.updated;
  deleted += other.deleted;
  absent += other.absent;
  refused += other.refused;
  superseded += other.superseded;
  return *this;
}

Result<ApplyReport> apply_batch(Table::Impl& table, const Batch& batch, const Group* group) {
  return Writer(table, batch, group).run();
}

Status check_batch(const Batch& batch) {
  const bool all_deleted = batch.rows == nullptr;
  if (!batch.deleted.empty() && batch.deleted.size() != batch.keys.size()) {
    return Status(Code::kInvalidArgument, "a batch needs one deletion mark per key, or none");
  }
  if (all_deleted &&
      std::any_of(batch.deleted.begin(), batch.deleted.end(), [](uint8_t d) { return d == 0; })) {
    return Status(Code::kInvalidArgument, "a batch without rows may hold deletions only");
  }
  if (!batch.stamps.empty() && batch.stamps.size() != batch.keys.size()) {
    return Status(Code::kInvalidArgument, "a batch needs one stamp per key, or one for all");
  }
  if (all_deleted && batch.deleted.empty() && !batch.keys.empty()) {
    return Status(Code::kInvalidArgument, "a batch needs rows or deletion marks");
  }
  return Status();
}

Result<ApplyReport> Table::apply(const Batch& batch) {
  PETPS_RETURN_IF_ERROR(check_batch(batch));
  PETPS_RETURN_IF_ERROR(impl_->check_writable());
  std::unique_lock<std::mutex> turn;
  PETPS_RETURN_IF_ERROR(impl_->make_room(batch, &turn));
  return apply_batch(*impl_, batch, nullptr);
}

}  // namespace petps::table
