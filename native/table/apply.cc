// apply: allocate, fill, persist, publish, retire.
#include <algorithm>
#include <bit>
#include <chrono>
#include <numeric>

#include "base/prefetch.h"
#include "table/slice.h"

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

static_assert(sizeof(SlotHeader) == 16);
constexpr SlotRef kToBeAllocated = 1;  // an upsert before its slot is known; never stored

constexpr size_t kSourceAhead = 6;  // rows of a divided batch to prefetch ahead

// One slice of a batch on its way through the five verbs. Most slices replace the rows of
// existing keys and take a short way. New keys and deletions take the long way, through Ops.
// Moves are held off throughout, so that every entry stays where the search saw it.
class Apply {
 public:
  Apply(Table::Impl& table, const Slice& slice, uint32_t stamp, Table::Impl::Scratch& scratch,
        Retiring& retiring)
      : table_(table),
        keys_(slice.keys),
        rows_(slice.rows),
        places_(slice.places),
        deleted_(slice.deleted),
        stamps_(slice.stamps),
        only_of_stamp_(slice.only_of_stamp),
        only_damaged_(slice.only_damaged),
        only_missing_(slice.only_missing),
        refused_(slice.refused),
        group_(slice.group),
        stamp_(stamp),
        flusher_(table.pool.medium()),
        scratch_(scratch),
        retiring_(retiring) {
    scratch_.entries.resize(keys_.size());
    scratch_.old.resize(keys_.size());
  }

  // Allocate. Fill, interleaved with the search. Persist and publish, the short or the long way.
  // Retire.
  Status run(ApplyReport* report) {
    const size_t upserts = count_upserts();
    // Fill rows while their keys are searched: one waits for memory, the other computes. A
    // superseded or refused key gives its slot back. If there are not enough slots for all keys,
    // refuse keys first and allocate afterwards.
    const bool has_slots = allocate(upserts).ok();
    std::shared_lock moves(table_.moves_gate);
    const size_t present = has_slots ? fill_in_step() : locate();
    const bool replaces_all =
        has_slots && upserts == keys_.size() && present == keys_.size() && !only_missing_;
    const Status status = replaces_all ? replace(report) : publish_ops(has_slots, report);
    moves.unlock();
    settle_reservations();
    if (status.ok()) retire();
    return status;
  }

 private:
  size_t count_upserts() const;
  Status allocate(size_t count);
  size_t locate();
  size_t fill_in_step();
  void fill_next(size_t i);
  size_t place_of(size_t i) const { return places_ == nullptr ? i : places_[i]; }
  uint32_t stamp_of(size_t i) const { return stamps_ == nullptr ? stamp_ : stamps_[place_of(i)]; }
  Status replace(ApplyReport* report);

  Status publish_ops(bool has_slots, ApplyReport* report);
  void make_ops(bool has_slots);
  bool meets_condition(size_t i) const;
  void drop(Op* op);
  void drop_superseded(ApplyReport* report);
  Status refuse(ApplyReport* report);
  base::Result<bool> has_room();
  void settle_reservations();
  Status allocate_and_fill();
  Status persist_and_publish();
  bool raise();
  void count(ApplyReport* report);

  void mark_replaced();
  Status finish_publish();
  void note_missing(const Op& op);
  void retire();
  void set_outcome(const Op& op, Outcome outcome);

  Table::Impl& table_;
  std::span<const uint64_t> keys_;
  const std::byte* rows_;
  const uint32_t* places_;
  const uint8_t* deleted_;
  const uint32_t* stamps_;
  bool only_of_stamp_;
  const DamagedRow* only_damaged_;
  bool only_missing_;
  std::vector<uint32_t>* refused_;
  const Group* group_;
  uint32_t stamp_;
  Flusher flusher_;
  Table::Impl::Scratch& scratch_;
  Retiring& retiring_;
  size_t next_ = 0;  // the slot in scratch_.taken to fill next
  std::vector<Op> ops_;
  std::vector<uint32_t> order_;  // of a group: the keys of ops_, if they are in another order
  std::vector<SlotRef> unused_;
  uint64_t reserved_ = 0;       // our part of table_.occupied, until settle_reservations()
  bool deletes_first_ = false;  // new keys take the room of deleted keys
};

size_t Apply::count_upserts() const {
  if (deleted_ == nullptr) return keys_.size();
  return static_cast<size_t>(std::count(deleted_, deleted_ + keys_.size(), uint8_t{0}));
}

Status Apply::allocate(size_t count) {
  scratch_.taken.resize(count);
  scratch_.headers.resize(count);
  if (count == 0) return Status();
  return table_.allocate(scratch_.taken, retiring_, scratch_.headers.data());
}

size_t Apply::locate() {
  return table_.index().locate(keys_, scratch_.entries.data(), scratch_.old.data());
}

void Apply::fill_next(size_t i) {
  const uint64_t row_bytes = table_.record.spec.row_bytes;
  const std::byte* row = nullptr;
  if (group_ != nullptr) {
    row = group_->rows[i];
  } else if (places_ != nullptr) {  // the next rows are not the next in memory
    row = rows_ + places_[i] * row_bytes;
    if (i + kSourceAhead < keys_.size())
      base::prefetch(rows_ + places_[i + kSourceAhead] * row_bytes, row_bytes);
  } else {
    row = rows_ + i * row_bytes;
  }
  const uint32_t crc = flusher_.copy_with_crc32c(table_.slots.row(scratch_.taken[next_]), row,
                                                 row_bytes, Site::kRow);
  // The slots may be scattered, so their headers are in separate lines that are not in the cache.
  const SlotHeader header = {keys_[i], stamp_of(i), crc};
  flusher_.copy_16(scratch_.headers[next_++], &header, Site::kRowHeader);
}

size_t Apply::fill_in_step() {
  const auto step = [](void* context, size_t i) {
    auto* apply = static_cast<Apply*>(context);
    if (apply->deleted_ == nullptr || apply->deleted_[i] == 0) apply->fill_next(i);
  };
  return table_.index().locate(keys_, scratch_.entries.data(), scratch_.old.data(), step, this);
}

// Every key exists: there is no counter to raise and no bucket to lock. A key that occurs twice
// is replaced twice, in order.
Status Apply::replace(ApplyReport* report) {
  PETPS_RETURN_IF_ERROR(flusher_.drain(Site::kFilled));  // rows and headers
  std::shared_lock gate(table_.walk_gate, std::defer_lock);
  if (table_.slots.needs_walk()) gate.lock();
  const size_t repeats = table_.index().replace(scratch_.entries, scratch_.taken.data(),
                                                scratch_.old.data(), flusher_);
  report->superseded += repeats;
  report->updated += keys_.size() - repeats;
  if (group_ != nullptr) std::ranges::fill(group_->outcomes, Outcome::kUpdated);
  if (gate.owns_lock()) mark_replaced();
  return finish_publish();
}

// ---- the long way ----

Status Apply::publish_ops(bool has_slots, ApplyReport* report) {
  make_ops(has_slots);
  drop_superseded(report);
  if (Status status = refuse(report); !status.ok()) {
    if (has_slots) table_.slots.release(scratch_.taken);
    return status;
  }
  if (!has_slots) PETPS_RETURN_IF_ERROR(allocate_and_fill());
  PETPS_RETURN_IF_ERROR(persist_and_publish());
  count(report);
  return Status();
}

void Apply::make_ops(bool has_slots) {
  ops_.resize(keys_.size());
  auto next = scratch_.taken.begin();
  for (size_t i = 0; i < ops_.size(); ++i) {
    ops_[i].key = keys_[i];
    const bool deletes = deleted_ != nullptr && deleted_[i] != 0;
    ops_[i].ref = deletes ? 0 : has_slots ? *next++ : kToBeAllocated;
  }
  table_.index().plan(ops_, scratch_.entries.data(), scratch_.old.data());
  if (!only_of_stamp_ && only_damaged_ == nullptr && !only_missing_) return;
  for (size_t i = 0; i < ops_.size(); ++i) {
    if (!meets_condition(i)) drop(&ops_[i]);
  }
}

// Return whether the batch's condition lets it change key i. The key's range is held, so its slot
// is not reused while it is read.
bool Apply::meets_condition(size_t i) const {
  const SlotRef old = scratch_.old[i];
  if (only_damaged_ != nullptr)
    return old != 0 && table_.examine(keys_[i], old) == only_damaged_[place_of(i)];
  if (only_missing_) return old == 0 && table_.is_missing(keys_[i]);
  return old == 0 || table_.slots.header(old)->stamp == stamp_of(i);
}

void Apply::set_outcome(const Op& op, Outcome outcome) {
  if (group_ == nullptr) return;
  const auto i = static_cast<size_t>(&op - ops_.data());
  group_->outcomes[order_.empty() ? i : order_[i]] = outcome;
}

// Make the op a no-op and free the slot that it took.
void Apply::drop(Op* op) {
  if (op->ref != 0 && op->ref != kToBeAllocated) unused_.push_back(op->ref);
  op->ref = 0;
  op->state = OpState::kSkipped;
}

// Of several entries with the same key the last one counts.
void Apply::drop_superseded(ApplyReport* report) {
  const size_t places = std::bit_ceil(ops_.size() * 2 + 1);
  std::vector<uint32_t> seen(places, 0);  // position + 1
  for (size_t i = 0; i < ops_.size(); ++i) {
    size_t at = (ops_[i].key * 0x9E3779B97F4A7C15) >> (64 - std::countr_zero(places));
    while (seen[at] != 0 && ops_[seen[at] - 1].key != ops_[i].key) at = (at + 1) & (places - 1);
    if (seen[at] != 0) {
      Op& earlier = ops_[seen[at] - 1];
      drop(&earlier);
      set_outcome(earlier, Outcome::kSuperseded);
      report->superseded += 1;
    }
    seen[at] = static_cast<uint32_t>(i + 1);
  }
}

// Refuse new keys beyond capacity. A key that this slice deletes makes room for a new key of it.
Status Apply::refuse(ApplyReport* report) {
  auto leaving = std::count_if(ops_.begin(), ops_.end(), [](const Op& op) {
    return op.state == OpState::kPresent && op.ref == 0;
  });
  for (Op& op : ops_) {
    if (op.state != OpState::kNew) continue;
    if (leaving > 0) {
      leaving -= 1;
      deletes_first_ = true;
      continue;
    }
    const auto room = has_room();
    if (!room.ok()) return room.status();
    if (room.value()) {
      reserved_ += 1;
    } else {
      if (refused_ != nullptr) refused_->push_back(places_[&op - ops_.data()]);
      drop(&op);
      set_outcome(op, Outcome::kRefused);
      report->refused += 1;
    }
  }
  return Status();
}

// Try to reserve room for a row. Refusing needs a complete walk: until then the rows of an
// unclean open count as more than they are.
Result<bool> Apply::has_room() {
  if (table_.reserve_row()) return true;
  if (table_.walked()) return false;
  table_.owner.walk();
  if (!table_.walked() && !table_.pool.medium().failed()) {
    return Status(Code::kUnavailable,
                  "a process that read the pool before this server opened it delays the search for "
                  "free slots, which new keys need: stop that process, or try again");
  }
  return table_.reserve_row();
}

// Give back the room that was only reserved, and count what was published; also after a failure.
void Apply::settle_reservations() {
  uint64_t change = 0 - reserved_;
  for (const Op& op : ops_) {
    if (op.state != OpState::kDone) continue;
    if (op.ref != 0 && op.old == 0) change += 1;
    if (op.ref == 0 && op.old != 0) change -= 1;
  }
  if (change != 0) table_.occupied.fetch_add(change);
}

Status Apply::allocate_and_fill() {
  PETPS_RETURN_IF_ERROR(allocate(static_cast<size_t>(std::count_if(
      ops_.begin(), ops_.end(), [](const Op& op) { return op.ref == kToBeAllocated; }))));
  for (size_t i = 0; i < ops_.size(); ++i) {
    if (ops_[i].ref != kToBeAllocated) continue;
    ops_[i].ref = scratch_.taken[next_];
    fill_next(i);
  }
  return Status();
}

// Raise the counters of the buckets that displaced entries will pass. Return true if an op has a
// new bucket to publish to.
bool Apply::raise() {
  bool any = false;
  for (Op& op : ops_) {
    if (op.state != OpState::kNew && op.state != OpState::kAgain) continue;
    table_.index().raise(op, flusher_);
    any = any || op.state == OpState::kNew;
  }
  return any;
}

Status Apply::persist_and_publish() {
  std::shared_lock gate(table_.walk_gate, std::defer_lock);
  for (const Op& op : ops_) {
    if (op.state == OpState::kNew || op.state == OpState::kDone)
      table_.index().flush_absence(op, flusher_);
  }
  std::span<Op> rest = ops_;
  if (deletes_first_) {  // the buckets of a full table have no entries for both
    const auto erases = [](const Op& op) { return op.state == OpState::kPresent && op.ref == 0; };
    if (group_ != nullptr) {
      order_.resize(ops_.size());
      std::iota(order_.begin(), order_.end(), 0);
      std::ranges::stable_partition(order_, [&](uint32_t i) { return erases(ops_[i]); });
    }
    const auto deleted = std::stable_partition(ops_.begin(), ops_.end(), erases);
    rest = {deleted, ops_.end()};
    if (table_.slots.needs_walk()) gate.lock();
    table_.index().publish({ops_.begin(), deleted}, flusher_);
  }
  raise();
  do {
    PETPS_RETURN_IF_ERROR(flusher_.drain(Site::kFilled));  // rows, headers, raised counters
    if (table_.slots.needs_walk() && !gate.owns_lock()) gate.lock();
    table_.index().publish(rest, flusher_);
    // If a bucket filled up before its key was published, the key moves to a later bucket, which
    // needs another drain.
  } while (std::any_of(ops_.begin(), ops_.end(),
                       [](const Op& op) { return op.state == OpState::kAgain; }) &&
           raise());
  if (gate.owns_lock()) {
    scratch_.old.clear();
    for (const Op& op : ops_) {
      if (op.state == OpState::kDone && op.old != 0) scratch_.old.push_back(op.old);
    }
    mark_replaced();
  }
  return finish_publish();
}

// Count what the ops did; leave in `old` the refs that they replaced or erased.
void Apply::count(ApplyReport* report) {
  scratch_.old.clear();
  uint64_t erased = 0;
  for (const Op& op : ops_) {
    table_.index().settle(op);
    if (op.state == OpState::kSkipped) {
      if (op.ref != 0) {  // every bucket is full
        unused_.push_back(op.ref);
        set_outcome(op, Outcome::kRefused);
        report->refused += 1;
      }
      continue;
    }
    note_missing(op);
    if (op.old != 0) scratch_.old.push_back(op.old);
    if (op.ref != 0) {
      (op.old != 0 ? report->updated : report->inserted) += 1;
      set_outcome(op, op.old != 0 ? Outcome::kUpdated : Outcome::kInserted);
    } else {
      (op.old != 0 ? erased : report->absent) += 1;
      set_outcome(op, op.old != 0 ? Outcome::kDeleted : Outcome::kAbsent);
    }
  }
  report->deleted += erased;
  table_.erased.fetch_add(erased, std::memory_order_relaxed);
  if (!unused_.empty()) table_.slots.release(unused_);
}

// A write or a deletion of a missing key ends that it is missing. The short way needs no such call:
// it replaces rows of keys that exist, and no such key is missing.
void Apply::note_missing(const Op& op) {
  if (only_damaged_ != nullptr) {
    table_.add_missing(op.key);
  } else if (op.old == 0) {
    table_.forget_missing(op.key);
  }
}

// ---- both ways ----

// The slot of a damaged row is never used again, because the disk or the memory there is bad. It
// may not even be the key's own: see SCRUB.md.
void Apply::retire() {
  if (only_damaged_ != nullptr) {
    table_.slots.keep_unused(scratch_.old.size());
  } else {
    retiring_.add(scratch_.old);
  }
}

// Mark replaced slots of old extents while the walk runs, so that the walk does not free them: a
// reader may still read them.
void Apply::mark_replaced() {
  if (!table_.slots.needs_walk()) return;
  for (const SlotRef ref : scratch_.old) table_.slots.mark(ref);
}

// The last part of publish: in the second index of a table that grows too, then on the medium.
Status Apply::finish_publish() {
  table_.mirror(keys_, flusher_);
  return flusher_.drain(Site::kPublished);  // entries and deletions
}

}  // namespace

void Retiring::add(std::span<const SlotRef> refs) {
  table_.retired.fetch_add(refs.size(), std::memory_order_relaxed);
  refs_.insert(refs_.end(), refs.begin(), refs.end());
  if (refs_.size() >= kRetiredTogether) flush();
}

size_t Retiring::flush() {
  table_.epochs.retire(table_, refs_);
  refs_.clear();
  return table_.epochs.reclaim();
}

Status Table::Impl::check_writable() const {
  if (!pool.read_only() && !pool.medium().failed()) return Status();
  return Status(Code::kFailedPrecondition,
                "table '" + record.spec.name + "' cannot be written: its pool is " +
                    (pool.read_only()
                         ? "open read-only"
                         : "read-only because a write-back failed; check the disk, then restart"));
}

bool Table::Impl::reserve_row() {
  uint64_t now = occupied.load();
  while (now < capacity.load(std::memory_order_relaxed)) {
    if (occupied.compare_exchange_weak(now, now + 1)) return true;
  }
  return false;
}

Status Table::Impl::allocate(std::span<SlotRef> refs, Retiring& retiring, SlotHeader** headers) {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(kReclaimPatienceMs);
  for (;;) {
    bool walk_helps = false;
    const Status status = slots.allocate(refs, &walk_helps, headers);
    if (status.code() != Code::kResourceExhausted) return status;
    const size_t released = retiring.flush();
    if (walk_helps && !pool.medium().failed()) {
      owner.walk();
      if (!owner.walked.load() && std::chrono::steady_clock::now() > deadline) return status;
    } else if (released == 0) {
      const bool none_comes = epochs.retired_items() == 0 && retired.load() == 0;
      if (none_comes || std::chrono::steady_clock::now() > deadline) return status;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

Status apply_slice(Table::Impl& table, const Slice& slice, uint32_t stamp,
                   Table::Impl::Scratch& scratch, Retiring& retiring, ApplyReport* report) {
  return Apply(table, slice, stamp, scratch, retiring).run(report);
}

}  // namespace petps::table
