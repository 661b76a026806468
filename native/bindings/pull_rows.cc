#include "bindings/pull_rows.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/prefetch.h"

namespace petps::bindings {

namespace {

class Gather {
 public:
  Gather(const table::Table& table, const PullTarget& target)
      : dtype_(static_cast<codec::Dtype>(table.record().spec.dtype)),
        dim_(table.record().spec.dim),
        copies_(target.stored || dtype_ == codec::Dtype::kF32),
        out_bytes_(target.stored ? table.record().spec.row_bytes : dim_ * sizeof(float)),
        missing_(out_bytes_) {
    if (table.default_row() != nullptr) write(table.default_row(), missing_.data());
  }

  size_t out_bytes() const { return out_bytes_; }

  // Copy `row` (null: the default row) to `out`. Return whether `row` was found.
  bool copy(const std::byte* row, std::byte* out) const {
    if (row == nullptr) {
      std::memcpy(out, missing_.data(), out_bytes_);
      return false;
    }
    write(row, out);
    return true;
  }

 private:
  void write(const std::byte* row, std::byte* out) const {
    if (copies_) {
      std::memcpy(out, row, out_bytes_);
    } else {
      codec::decode(dtype_, row, 1, dim_, reinterpret_cast<float*>(out));
    }
  }

  codec::Dtype dtype_;
  uint32_t dim_;
  bool copies_;
  size_t out_bytes_;
  std::vector<std::byte> missing_;
};

}  // namespace

uint64_t pull_rows(Session& session, const table::Table& table, std::span<const uint64_t> keys,
                   const PullTarget& target) {
  Session::Lease lease(session);
  return pull_rows([&lease] { return lease.pin(); }, table, keys, target);
}

uint64_t pull_rows(const std::function<epoch::Pin()>& take_pin, const table::Table& table,
                   std::span<const uint64_t> keys, const PullTarget& target) {
  const Gather gather(table, target);
  std::array<const std::byte*, kPullBatch> rows;
  auto* out = static_cast<std::byte*>(target.out);
  const size_t row_bytes = table.record().spec.row_bytes;
  uint64_t found = 0;
  for (size_t from = 0; from < keys.size(); from += kPullBatch) {
    const size_t n = std::min(kPullBatch, keys.size() - from);
    const epoch::Pin pin = take_pin();
    uint8_t* mask = target.mask.empty() ? nullptr : target.mask.data() + from;
    std::byte* first = out + from * gather.out_bytes();
    const auto step = [&](size_t searched, size_t ready) {
      if (searched != table::kNoKey && rows[searched] != nullptr)
        base::prefetch(rows[searched], row_bytes);
      if (ready == table::kNoKey) return;
      const bool is_found = gather.copy(rows[ready], first + ready * gather.out_bytes());
      if (mask != nullptr) mask[ready] = is_found ? 1 : 0;
      if (is_found && !target.stamps.empty())
        target.stamps[from + ready] = table.stamp_of(rows[ready]);
      found += is_found ? 1 : 0;
    };
    table.lookup(keys.subspan(from, n), rows.data(), step);
    table.note_pulled(keys.subspan(from, n));
  }
  return found;
}

}  // namespace petps::bindings
