// Verify: checks every invariant that the medium can show, table by table.
#include <algorithm>
#include <chrono>

#include "base/crc32c.h"
#include "table/impl.h"
#include "table/pinned.h"

namespace petps::table {

namespace {

using index::Bucket;
using index::Entry;
using pool::SlotRef;

constexpr uint64_t kBucketsInStep = 16;
constexpr uint64_t kCountersInStep = 1 << 16;

class Verifier {
 public:
  Verifier(const Table::Impl& table, VerifyReport* report)
      : table_(table), index_(table.index()), report_(report) {}

  // Return false if `goes_on` ended it.
  bool run(epoch::Reader& reader, const std::function<bool()>& goes_on) {
    const uint64_t ended = table_.ended.load();  // before `begun`, so a batch in between shows
    bool quiet = ended == table_.begun.load();
    passed_.assign(index_.bucket_count(), 0);
    if (table_.pool.read_only()) interrupted_ = index::interrupted_move(table_.pool).from;
    for (uint64_t number = 0; number < index_.bucket_count();) {
      if (goes_on && !goes_on()) return false;
      const epoch::Pin pin = reader.pin();
      const auto until = std::chrono::steady_clock::now() + kPinned;
      do {
        const uint64_t end = std::min(index_.bucket_count(), number + kBucketsInStep);
        for (; number < end; ++number) {
          table_.read_ahead(number);
          check_bucket(number);
        }
      } while (number < index_.bucket_count() && std::chrono::steady_clock::now() < until);
    }
    quiet = quiet && ended == table_.begun.load();
    for (uint64_t number = 0; quiet && number < index_.bucket_count(); ++number) {
      if (number % kCountersInStep == 0 && goes_on && !goes_on()) return false;
      check_counter(number);
    }
    report_->buckets += index_.bucket_count();
    const uint64_t used =
        rows_ + (table_.record.default_row != 0 ? 1 : 0) + table_.slots.free_count();
    if (quiet && table_.slots.total() > used)
      report_->unreachable_slots += table_.slots.total() - used;
    if (quiet && table_.walked() && table_.index().rows() != rows_) {
      report("counts " + std::to_string(table_.index().rows()) + " rows, its buckets hold " +
             std::to_string(rows_));
    }
    if (quiet && table_.walked() && table_.occupied.load() != rows_) {
      report("holds room for " + std::to_string(table_.occupied.load()) +
             " rows, its buckets hold " + std::to_string(rows_));
    }
    if (const SlotRef ref = table_.record.default_row; ref != 0)
      check_row(ref, nullptr, "the default row");
    report_->rows += rows_;
    return true;
  }

 private:
  void report(const std::string& text) {
    report_->problem_count += 1;
    if (report_->problems.size() < kMaxProblems) {
      report_->problems.push_back("table '" + table_.record.spec.name + "' " + text);
    }
  }

  void check_bucket(uint64_t number) {
    const Bucket& bucket = index_.bucket(number);
    for (uint32_t i = 0; i < index::kEntries; ++i) {
      const Entry& entry = bucket.entries[i];
      if (&entry == interrupted_) continue;  // opening the pool for writing removes it
      const SlotRef ref = index::load64(entry.ref);
      if (ref == 0) continue;
      const uint64_t key = index::load64(entry.key);
      if (index::load64(entry.ref) != ref) {  // being replaced right now: read it again
        --i;
        continue;
      }
      rows_ += 1;
      check_entry(number, i, key, ref);
    }
  }

  void check_entry(uint64_t number, uint32_t i, uint64_t key, SlotRef ref) {
    const Bucket& bucket = index_.bucket(number);
    const std::string name = "key " + std::to_string(key) + " in bucket " + std::to_string(number);
    const index::Path path = index_.path_of(key);
    const index::Place place = index_.find_one(key);
    const bool is_here = place.ref != 0 && place.bucket == number && place.entry == i;
    const bool has_changed =
        index::load64(bucket.entries[i].ref) == 0 || index::load64(bucket.entries[i].key) != key;
    if (has_changed) return;  // erased or moved during the check
    if (!is_here) {
      report(name + (place.ref == 0 ? " cannot be found by probing" : " is there twice"));
      return;
    }
    for (uint64_t distance = 0; distance < place.distance; ++distance) {
      uint32_t& passed = passed_[index_.bucket_at(path, distance)];
      passed += 1;
    }
    const uint64_t word = index::load64(bucket.word);
    const bool is_tagged = index::load8(bucket.tags[i]) == path.tag;
    if (index::load64(bucket.entries[i].key) != key) return;  // reused before the tag was read
    if (!is_tagged) {
      if (index_.trusted(word)) {
        report(name + " has a wrong tag in the current generation");
      } else {
        report_->stale_tags += 1;
      }
    }
    check_row(ref, &key, name);
  }

  void check_row(SlotRef ref, const uint64_t* key, const std::string& name) {
    if (!table_.slots.is_slot(ref)) {
      report(name + " points to " + std::to_string(ref) + ", which is no slot of the table");
      return;
    }
    if (!table_.slots.needs_walk() && table_.slots.is_free(ref)) {
      report(name + " points to a slot that is on the free list");
      return;
    }
    const pool::SlotHeader header = *table_.slots.header(ref);
    if (key != nullptr && header.key != *key) {
      report(name + " points to the row of key " + std::to_string(header.key));
    } else if (header.crc != base::crc32c(table_.slots.row(ref), table_.record.spec.row_bytes)) {
      report(name + " has a row whose checksum fails");
    }
  }

  void check_counter(uint64_t number) {
    const uint8_t counter = index::load8(index_.bucket(number).overflow);
    if (counter == index::kSaturated) return;
    if (counter < passed_[number]) {
      report("bucket " + std::to_string(number) + " counts " + std::to_string(counter) +
             " displaced entries, " + std::to_string(passed_[number]) + " passed it");
    } else if (counter > passed_[number]) {
      report_->high_counters += 1;
    }
  }

  const Table::Impl& table_;
  const index::Index& index_;
  VerifyReport* report_;
  std::vector<uint32_t> passed_;  // displaced entries that passed each bucket
  uint64_t rows_ = 0;
  const Entry* interrupted_ = nullptr;  // the old copy of an entry whose move was interrupted
};

}  // namespace

VerifyReport Tables::verify(const std::function<bool()>& goes_on) const {
  VerifyReport report;
  impl_->pool->verify_metadata(&report.problems);
  report.problem_count = report.problems.size();
  epoch::Reader* reader = impl_->epochs.lease();
  if (reader == nullptr) {
    report.problems.push_back("no reader place is free for verify; close some connections");
    report.problem_count += 1;
    report.complete = false;
    return report;
  }
  std::vector<uint32_t> ids;  // not the tables, or a dropped one would keep its space
  for (const TablePointer& table : tables()) ids.push_back(table->record().id);
  for (const uint32_t id : ids) {
    const TablePointer table = find(id);
    if (table == nullptr) continue;
    const Table::ScanGuard guard(*table);
    report.complete = Verifier(table->impl(), &report).run(*reader, goes_on);
    if (!report.complete) break;
  }
  impl_->epochs.release(reader);
  return report;
}

}  // namespace petps::table
