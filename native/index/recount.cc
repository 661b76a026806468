// The recount: lowers overflow counters that are too high to the exact count. INDEX.md proves
// that no counter is ever too low.
#include <algorithm>
#include <new>

#include "index/index.h"

namespace petps::index {

// Record that an entry was added to or removed from bucket `in`, whose lock the caller holds.
// Do nothing if count_claims() has not visited the bucket yet: it counts the entry then.
void Index::change_claims(const Bucket& in, const Path& path, uint64_t distance, bool added) {
  if (distance == 0 || number_of(in) >= counted_until_.load(std::memory_order_relaxed)) return;
  for (uint64_t d = 0; d < distance; ++d) {
    base::Atomic<uint16_t>& count = claims_[bucket_at(path, d)];
    uint16_t seen = count.load(std::memory_order_relaxed);
    while (seen != kTooManyClaims &&
           !count.compare_exchange_weak(seen, static_cast<uint16_t>(added ? seen + 1 : seen - 1),
                                        std::memory_order_relaxed)) {
    }
  }
}

bool Index::begin_recount() {
  claims_.reset(new (std::nothrow) base::Atomic<uint16_t>[bucket_count_]());
  if (claims_ == nullptr) return false;  // the request stays
  // Lowerings that are missed from here on request the next recount.
  missed_lowerings_.store(0, std::memory_order_relaxed);
  return true;
}

bool Index::count_claims(uint64_t buckets) {
  const uint64_t from = counted_until_.load(std::memory_order_relaxed);
  const uint64_t to = std::min(bucket_count_, from + buckets);
  for (uint64_t number = from; number < to; ++number) {
    const Held held = lock(buckets_[number]);
    // A thread that takes this bucket's lock later sees this store: the lock orders it. So it
    // sees that its bucket is counted.
    counted_until_.store(number + 1, std::memory_order_relaxed);
    for (const Entry& entry : held.bucket->entries) {
      if (load64(entry.ref) == 0) continue;
      const Path path = path_of(load64(entry.key));
      uint64_t distance = 0;
      while (distance + 1 < bucket_count_ && bucket_at(path, distance) != number) ++distance;
      change_claims(*held.bucket, path, distance, /*added=*/true);
    }
    unlock(held);
  }
  return to == bucket_count_;
}

uint64_t Index::install_counters(uint64_t from, uint64_t to) {
  uint64_t lowered = 0;
  for (uint64_t number = from; number < std::min(to, bucket_count_); ++number) {
    Bucket& bucket = buckets_[number];
    const uint16_t claims = claims_[number].load(std::memory_order_relaxed);
    // A counter below its claims is a fault, which verify reports. Do not raise it here: that would
    // hide the fault, and bring back entries whose keys were deleted or inserted again meanwhile.
    if (claims >= load8(bucket.overflow)) continue;
    store8(bucket.overflow, static_cast<uint8_t>(claims));
    media_->report_store(&bucket.overflow, 1);
    lowered += 1;
  }
  return lowered;
}

void Index::end_recount() {
  counted_until_.store(0, std::memory_order_relaxed);
  claims_.reset();
}

}  // namespace petps::index
