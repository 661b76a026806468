// Group commit: several batches applied as one.
#include <unordered_map>

#include "table/slice.h"

namespace petps::table {

using base::Code;
using base::Result;
using base::Status;

namespace {

// Counts what each batch would have done alone, from the outcome of each key's last entry in the
// group: it says whether the key existed before the group, or found no room.
class Replay {
 public:
  Replay(std::span<const uint64_t> keys, std::span<const Outcome> outcomes) {
    before_.reserve(keys.size());
    for (size_t i = keys.size(); i-- > 0;) before_.try_emplace(keys[i], Key{outcomes[i]});
  }

  ApplyReport count(const Batch& batch) {
    ApplyReport report;
    last_.clear();
    for (size_t i = 0; i < batch.keys.size(); ++i) last_[batch.keys[i]] = i;
    for (size_t i = 0; i < batch.keys.size(); ++i) {
      if (last_.at(batch.keys[i]) != i) {
        report.superseded += 1;
      } else {
        apply(before_.at(batch.keys[i]), !batch.deleted.empty() && batch.deleted[i] != 0, report);
      }
    }
    return report;
  }

 private:
  struct Key {
    explicit Key(Outcome outcome)
        : exists(outcome == Outcome::kUpdated || outcome == Outcome::kDeleted),
          refused(outcome == Outcome::kRefused) {}
    bool exists;
    bool refused;
  };

  static void apply(Key& key, bool deletes, ApplyReport& report) {
    if (deletes) {
      (key.exists ? report.deleted : report.absent) += 1;
      key.exists = false;
    } else if (key.refused) {
      report.refused += 1;
    } else {
      (key.exists ? report.updated : report.inserted) += 1;
      key.exists = true;
    }
  }

  std::unordered_map<uint64_t, Key> before_;
  std::unordered_map<uint64_t, size_t> last_;
};

}  // namespace

size_t Table::keys_together() const { return impl_->synced() ? kSliceKeysSynced : kSliceKeys; }

Status Table::apply_together(std::span<const Batch> batches, std::span<ApplyReport> reports) {
  if (batches.size() == 1) {
    const Result<ApplyReport> report = apply(batches[0]);
    if (report.ok()) reports[0] = report.value();
    return report.status();
  }
  PETPS_RETURN_IF_ERROR(impl_->check_writable());
  impl_->advance_push_stamp();
  const uint64_t row_bytes = record().spec.row_bytes;
  std::vector<uint64_t> keys;
  std::vector<const std::byte*> rows;
  std::vector<uint8_t> deleted;
  bool deletes = false;
  const bool is_given = impl_->push_stamp.load() != 0;  // by the table
  for (const Batch& batch : batches) {
    PETPS_RETURN_IF_ERROR(check_batch(batch));
    const bool is_same = is_given || batch.stamp == batches[0].stamp;
    if (!is_same || !batch.stamps.empty())
      return Status(Code::kInvalidArgument, "the batches of a group need one stamp");
    keys.insert(keys.end(), batch.keys.begin(), batch.keys.end());
    for (size_t i = 0; i < batch.keys.size(); ++i) {
      rows.push_back(batch.rows == nullptr ? nullptr : batch.rows + i * row_bytes);
      deleted.push_back(batch.deleted.empty() ? 0 : batch.deleted[i]);
      deletes = deletes || deleted.back() != 0;
    }
  }
  std::vector<Outcome> outcomes(keys.size());
  const Group group{rows, outcomes};
  Batch all;
  all.keys = keys;
  all.stamp = batches[0].stamp;
  if (deletes) all.deleted = deleted;
  std::unique_lock<std::mutex> turn;
  PETPS_RETURN_IF_ERROR(impl_->make_room(all, &turn));
  PETPS_RETURN_IF_ERROR(apply_batch(*impl_, all, &group).status());
  Replay replay(keys, outcomes);
  for (size_t i = 0; i < batches.size(); ++i) reports[i] = replay.count(batches[i]);
  return Status();
}

}  // namespace petps::table
