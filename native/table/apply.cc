// apply: allocate, fill, persist, publish, retire.
#include <algorithm>
#include <array>
#include <bit>
#include <chrono>

#include "base/crc32c.h"
#include "base/prefetch.h"
#include "table/impl.h"

namespace petps::table {

using base::Code;
using base::Result;
using base::Status;
using index::Op;
using index::OpState;
using media::Flusher;
using media::Site;
using pool::SlotHeader;
using pool::SlotRef;

namespace {

constexpr size_t kHeadersAhead = 8;
constexpr SlotRef kToBeAllocated = 1;  // an upsert before its slot is known; never stored

// One chunk of a batch on its way through the five verbs.
class Apply {
 public:
  Apply(Table::Impl& table, std::span<const uint64_t> keys, const std::byte* rows,
        const uint8_t* deleted, uint32_t stamp)
      : table_(table),
        keys_(keys),
        rows_(rows),
        deleted_(deleted),
        stamp_(stamp),
        flusher_(table.pool.medium()) {}

  Status run(ApplyReport* report) {
    prepare(report);
    Status status = allocate();
    // Rows are filled in step with the search for their keys: one waits for memory, the other works. What turns out to be refused
    // gives its slot back. When there are not slots for all, refusals come first.
    const bool in_step = status.ok();
    if (in_step) {
      fill_in_step();
    } else {
      table_.index.plan(ops_);
    }
    refuse();
    if (!in_step) {
      drop_refused(report);
      status = allocate();
      if (status.ok()) fill();
    }
    if (status.ok()) status = persist_and_publish();
    if (status.ok()) retire(report);
    table_.pending_new.fetch_sub(reserved_);
    return status;
  }

 private:
  void prepare(ApplyReport* report);
  void drop_superseded(ApplyReport* report);
  Status allocate();
  void refuse();
  void drop_refused(ApplyReport* report);
  void fill_in_step();
  void fill();
  void fill_one(size_t i);
  void ask_header(size_t i);
  Status persist_and_publish();
  void retire(ApplyReport* report);
  bool raise();
  void mark_replaced();

  Table::Impl& table_;
  std::span<const uint64_t> keys_;
  const std::byte* rows_;
  const uint8_t* deleted_;
  uint32_t stamp_;
  Flusher flusher_;
  std::vector<Op> ops_;
  std::array<SlotHeader*, kHeadersAhead> headers_;  // of the next rows
  uint32_t extent_ = 0;                             // of the last header
  uint64_t reserved_ = 0;
};

// Of several entries with one key the last one counts.
void Apply::drop_superseded(ApplyReport* report) {
  const size_t places = std::bit_ceil(ops_.size() * 2 + 1);
  std::vector<uint32_t> seen(places, 0);  // position + 1
  for (size_t i = 0; i < ops_.size(); ++i) {
    size_t at = (ops_[i].key * 0x9E3779B97F4A7C15) >> (64 - std::countr_zero(places));
    while (seen[at] != 0 && ops_[seen[at] - 1].key != ops_[i].key) at = (at + 1) & (places - 1);
    if (seen[at] != 0) {
      ops_[seen[at] - 1].state = OpState::kSkipped;
      ops_[seen[at] - 1].ref = 0;
      report->superseded += 1;
    }
    seen[at] = static_cast<uint32_t>(i + 1);
  }
}

void Apply::prepare(ApplyReport* report) {
  ops_.resize(keys_.size());
  for (size_t i = 0; i < ops_.size(); ++i) {
    ops_[i].key = keys_[i];
    ops_[i].ref = deleted_ != nullptr && deleted_[i] != 0 ? 0 : kToBeAllocated;
  }
  drop_superseded(report);
}

// After the search: new keys beyond capacity are refused. Keys that this chunk deletes make room for keys that it brings.
void Apply::refuse() {
  const auto leaving = std::count_if(ops_.begin(), ops_.end(), [](const Op& op) {
    return op.state == OpState::kPresent && op.ref == 0;
  });
  for (Op& op : ops_) {
    if (op.state != OpState::kNew) continue;
    if (table_.reserve_new(static_cast<uint64_t>(leaving))) {
      reserved_ += 1;
    } else {
      op.state = OpState::kSkipped;
    }
  }
}

void Apply::drop_refused(ApplyReport* report) {
  for (Op& op : ops_) {
    if (op.state != OpState::kSkipped || op.ref == 0) continue;
    op.ref = 0;
    report->refused += 1;
  }
}

Status Apply::allocate() {
  std::vector<SlotRef> refs(static_cast<size_t>(std::count_if(
      ops_.begin(), ops_.end(), [](const Op& op) { return op.ref == kToBeAllocated; })));
  if (refs.empty()) return Status();
  PETPS_RETURN_IF_ERROR(table_.allocate(refs));
  auto next = refs.begin();
  for (Op& op : ops_) {
    if (op.ref == kToBeAllocated) op.ref = *next++;
  }
  return Status();
}

// Slots that were free here and there have headers in lines of their own: each is asked for some rows before it is written.
void Apply::ask_header(size_t i) {
  if (i >= ops_.size() || ops_[i].ref == 0) return;
  headers_[i % kHeadersAhead] = table_.slots.header(ops_[i].ref, &extent_);
  base::prefetch_for_write(headers_[i % kHeadersAhead]);
}

void Apply::fill_one(size_t i) {
  const Op& op = ops_[i];
  if (op.ref != 0) {
    const uint32_t row_bytes = table_.record.spec.row_bytes;
    const std::byte* row = rows_ + i * row_bytes;
    flusher_.copy(table_.slots.row(op.ref), row, row_bytes, Site::kRow);
    SlotHeader* header = headers_[i % kHeadersAhead];
    *header = {op.key, stamp_, base::crc32c(row, row_bytes)};
    table_.pool.medium().stored(header, sizeof *header);
    flusher_.flush(header, sizeof *header, Site::kRowHeader);
  }
  ask_header(i + kHeadersAhead);
}

void Apply::fill_in_step() {
  for (size_t i = 0; i < kHeadersAhead; ++i) ask_header(i);
  table_.index.plan(
      ops_, [](void* apply, size_t i) { static_cast<Apply*>(apply)->fill_one(i); }, this);
}

void Apply::fill() {
  for (size_t i = 0; i < kHeadersAhead; ++i) ask_header(i);
  for (size_t i = 0; i < ops_.size(); ++i) fill_one(i);
}

// Counters of the buckets that displaced entries will pass. False when no op is waiting for a place.
bool Apply::raise() {
  bool any = false;
  for (Op& op : ops_) {
    if (op.state != OpState::kNew && op.state != OpState::kAgain) continue;
    table_.index.raise(op, flusher_);
    any = any || op.state == OpState::kNew;
  }
  return any;
}

Status Apply::persist_and_publish() {
  std::shared_lock gate(table_.walk_gate, std::defer_lock);
  for (const Op& op : ops_) {
    if (op.state == OpState::kNew || op.state == OpState::kDone)
      table_.index.adopt_absence(op, flusher_);
  }
  raise();
  do {
    PETPS_RETURN_IF_ERROR(flusher_.drain(Site::kFilled));  // rows, headers, raised counters
    if (table_.slots.needs_walk() && !gate.owns_lock()) gate.lock();
    table_.index.publish(ops_, flusher_);
    // A bucket that was to take a key filled up meanwhile: that key goes further, which takes another drain.
  } while (std::any_of(ops_.begin(), ops_.end(),
                       [](const Op& op) { return op.state == OpState::kAgain; }) &&
           raise());
  if (gate.owns_lock()) mark_replaced();
  return flusher_.drain(Site::kPublished);  // entries and deletions
}

// While the walk runs, a replaced slot of an old extent is not the walk's to free: a reader may still be in it.
void Apply::mark_replaced() {
  if (!table_.slots.needs_walk()) return;
  for (const Op& op : ops_) {
    if (op.state == OpState::kDone && op.old != 0) table_.slots.mark(op.old);
  }
}

void Apply::retire(ApplyReport* report) {
  std::vector<SlotRef> replaced;
  std::vector<SlotRef> unused;
  replaced.reserve(ops_.size());
  uint64_t erased = 0;
  for (const Op& op : ops_) {
    table_.index.settle(op);
    if (op.old == 0 && op.ref == 0 && op.state == OpState::kDone) report->absent += 1;
    if (op.state == OpState::kSkipped) {
      if (op.ref != 0) {  // beyond capacity, or every bucket is full
        unused.push_back(op.ref);
        report->refused += 1;
      }
      continue;
    }
    if (op.old != 0) replaced.push_back(op.old);
    if (op.ref != 0) {
      (op.old != 0 ? report->updated : report->inserted) += 1;
    } else if (op.old != 0) {
      erased += 1;
    }
  }
  report->deleted += erased;
  table_.erased.fetch_add(erased, std::memory_order_relaxed);
  if (!table_.walked()) table_.new_unwalked.fetch_add(reserved_, std::memory_order_relaxed);
  if (!unused.empty()) table_.slots.release(unused);
  if (!replaced.empty()) {
    table_.retired.fetch_add(replaced.size(), std::memory_order_relaxed);
    table_.epochs.retire(table_, replaced);
  }
  table_.epochs.reclaim();
}

}  // namespace

Status Table::Impl::writable() const {
  if (!pool.read_only() && !pool.medium().failed()) return Status();
  return Status(
      Code::kFailedPrecondition,
      "table '" + record.spec.name + "' cannot be written: its pool is " +
          (pool.read_only() ? "open read-only"
                            : "read-only since a write-back failed; check the disk, then restart"));
}

bool Table::Impl::reserve_new(uint64_t leaving) {
  const uint64_t pending = pending_new.fetch_add(1) + 1;
  if (index.rows() + pending <= record.spec.capacity + leaving) return true;
  pending_new.fetch_sub(1);
  return false;
}

Status Table::Impl::allocate(std::span<SlotRef> refs) {
  const auto give_up =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(kReclaimPatienceMs);
  for (;;) {
    bool walk_helps = false;
    const Status status = slots.allocate(refs, &walk_helps);
    if (status.code() != Code::kResourceExhausted) return status;
    if (walk_helps && !pool.medium().failed()) {
      owner.wait_for_walk();
    } else if (epochs.reclaim() == 0) {
      if (epochs.retired_items() == 0 || std::chrono::steady_clock::now() > give_up) return status;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

Result<ApplyReport> Table::apply(const Batch& batch) {
  Impl& table = *impl_;
  const bool all_deleted = batch.rows == nullptr;
  if (!batch.deleted.empty() && batch.deleted.size() != batch.keys.size()) {
    return Status(Code::kInvalidArgument, "a batch needs one deletion mark per key, or none");
  }
  if (all_deleted &&
      std::any_of(batch.deleted.begin(), batch.deleted.end(), [](uint8_t d) { return d == 0; })) {
    return Status(Code::kInvalidArgument, "a batch without rows may hold deletions only");
  }
  if (all_deleted && batch.deleted.empty() && !batch.keys.empty()) {
    return Status(Code::kInvalidArgument, "a batch needs rows or deletion marks");
  }
  PETPS_RETURN_IF_ERROR(table.writable());
  const size_t chunk = table.synced() ? kApplyChunkSynced : kApplyChunk;
  ApplyReport report;
  for (size_t begin = 0; begin < batch.keys.size(); begin += chunk) {
    const size_t n = std::min(chunk, batch.keys.size() - begin);
    if (!table.walked() &&
        table.new_unwalked.load() + n > table.record.spec.capacity / kUnwalkedShare) {
      table.owner.wait_for_walk();
    }
    const std::byte* rows =
        all_deleted ? nullptr : batch.rows + begin * table.record.spec.row_bytes;
    const uint8_t* deleted = batch.deleted.empty() ? nullptr : batch.deleted.data() + begin;
    // One writer at a time, from plan to the second drain: a key that another batch erased but not yet drained could otherwise come
    // back beside its new entry after a power cut.
    std::lock_guard writer(table.writer);
    if (table.dropped) {
      return Status(Code::kNotFound, "table '" + table.record.spec.name + "' has been dropped");
    }
    Apply apply(table, batch.keys.subspan(begin, n), rows, deleted, batch.stamp);
    PETPS_RETURN_IF_ERROR(apply.run(&report));
  }
  table.batches.fetch_add(1);
  return report;
}

}  // namespace petps::table
