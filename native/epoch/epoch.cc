#include "epoch/epoch.h"

#include <algorithm>
#include <limits>
#include <mutex>

#include "base/clock.h"

namespace petps::epoch {
namespace {

// The first window is one cache line: most readers have one pin at a time, and a scan then reads
// one line of each list.
constexpr size_t kFirstWindow = 8;
// Interval between checks for dead readers of other processes: a check costs a system call for each
// record in use.
constexpr uint64_t kDeadCheckNs = 50'000'000;
// The epoch of a Pin after disable_pins_for_test(): live, but newer than every retired item.
constexpr uint64_t kUnprotected = std::numeric_limits<uint64_t>::max();

}  // namespace

Pin Reader::pin() {
  // Only this thread makes a place non-zero, so a free place stays free until claim() takes it.
  // `acquire` pairs with the release in Pin::drop: the reads that the dropping thread made under
  // its pin happened before this place is stored again, and so before a scan that sees the new
  // epoch instead of the 0.
  const size_t window = places_->window.load(std::memory_order_relaxed);
  for (size_t step = 0; step < window; ++step) {
    const size_t place = next_ + step < window ? next_ + step : next_ + step - window;
    if (places_->epochs[place].load(std::memory_order_acquire) == 0) return claim(place);
  }
  if (window == kPinsPerReader) return Pin();
  const size_t grown = window == 0 ? kFirstWindow : std::min(window * 2, kPinsPerReader);
  // relaxed: the fence in claim() makes the window visible to scans, together with the epoch.
  places_->window.store(grown, std::memory_order_relaxed);
  return claim(window);  // the first place that is new
}

Pin Reader::claim(size_t place) {
  const size_t next = place + 1;
  next_ = next < places_->window.load(std::memory_order_relaxed) ? next : 0;
  // acquire: pairs with the release step of retire(). If this load reads epoch p, every item
  // retired in an epoch before p was removed from the index before this pin's reads. The reads
  // cannot find such an item, so the pin need not protect it.
  uint64_t epoch = domain_->global_->load(std::memory_order_acquire);
  if (domain_->pins_disabled_.load(std::memory_order_relaxed)) [[unlikely]]
    epoch = kUnprotected;
  // release: passes on to the scan what the place's previous pin released to this thread (see
  // pin()).
  places_->epochs[place].store(epoch, std::memory_order_release);
  // Dekker's argument with the fence in oldest_locked(): both sides store, fence, load. One of the
  // two seq_cst fences comes first. If it is this one, the scan sees this epoch (and the window).
  // If it is the other one, this pin's index reads, which come after this fence, see every removal
  // made before the other fence, so they cannot find an item that the scan releases. An epoch that
  // was already old when it was stored only delays reclaiming.
  base::fence_seq_cst();
  return Pin(&places_->epochs[place]);
}

size_t Reader::live() const {
  const size_t window = places_->window.load(std::memory_order_relaxed);
  size_t count = 0;
  for (size_t place = 0; place < window; ++place) {
    if (places_->epochs[place].load(std::memory_order_acquire) != 0) ++count;
  }
  return count;
}

void Domain::share(std::unique_ptr<ReadersFile> file) {
  const std::lock_guard<base::Mutex> lock(mutex_);
  file_ = std::move(file);
  if (!file_->refused().empty()) return;
  global_ = &file_->global();
  if (file_->serves()) shared_at_ = global_->fetch_add(1, std::memory_order_acq_rel);
}

uint64_t Domain::oldest_outside() {
  const std::lock_guard<base::Mutex> lock(mutex_);
  if (file_ == nullptr) return std::numeric_limits<uint64_t>::max();
  file_->drop_dead();
  base::fence_seq_cst();  // as in oldest_locked
  return file_->oldest();
}

Domain::Domain() = default;
Domain::~Domain() = default;

Reader* Domain::lease() {
  const std::lock_guard<base::Mutex> lock(mutex_);
  for (const std::unique_ptr<Reader>& reader : readers_) {
    if (reader->leased_ || reader->live() != 0) continue;
    reader->leased_ = true;
    // No thread pins between release() and here, and no pin is live, so the list may start small
    // again. A scan of this process takes mutex_ too, so none runs now. The scan of a server in
    // another process may see either window: no epoch is live, and the fence of the next pin
    // publishes the new window.
    reader->next_ = 0;
    reader->places_->window.store(0, std::memory_order_relaxed);
    return reader.get();
  }
  if (readers_.size() == kMaxReaders) return nullptr;
  if (file_ != nullptr && !file_->serves()) {
    Places* outside = file_->claim();
    if (outside == nullptr) return nullptr;
    readers_.push_back(std::unique_ptr<Reader>(new Reader(*this, outside)));
  } else {
    readers_.push_back(std::unique_ptr<Reader>(new Reader(*this, std::make_unique<Places>())));
  }
  readers_.back()->leased_ = true;
  return readers_.back().get();
}

void Domain::release(Reader* reader) {
  if (reader == nullptr) return;
  const std::lock_guard<base::Mutex> lock(mutex_);
  reader->leased_ = false;
}

void Domain::retire(Reclaimer& owner, std::span<const uint64_t> items) {
  if (items.empty()) return;
  // Copy the items before taking the lock.
  Batch batch{0, &owner, std::vector<uint64_t>(items.begin(), items.end())};
  const std::lock_guard<base::Mutex> lock(mutex_);
  // The step is under the lock so that queue_ is ordered by epoch. release: a thread that reads the
  // new epoch, or a later one, sees the removals that this thread made (every step is a
  // read-modify-write, so it continues the release sequence).
  batch.epoch = global_->fetch_add(1, std::memory_order_acq_rel);
  queue_.push_back(std::move(batch));
}

size_t Domain::reclaim() {
  std::vector<Batch> ready;
  {
    const std::lock_guard<base::Mutex> lock(mutex_);
    if (queue_.empty()) return 0;
    // Every queued item was removed from the index before this thread took the lock, and so before
    // the scan's fence.
    const uint64_t oldest = oldest_locked();
    while (!queue_.empty() && queue_.front().epoch < oldest) {
      ready.push_back(std::move(queue_.front()));
      queue_.pop_front();
    }
    if (!queue_.empty() && file_ != nullptr && file_->serves()) {
      const uint64_t now = base::monotonic_ns();
      if (now >= dead_checked_ns_ + kDeadCheckNs) {
        dead_checked_ns_ = now;
        file_->drop_dead();  // for the next scan
      }
    }
  }
  size_t count = 0;
  for (const Batch& batch : ready) {
    batch.owner->reclaim(batch.items);
    count += batch.items.size();
  }
  return count;
}

uint64_t Domain::oldest_locked() const {
  base::fence_seq_cst();  // the other half of Dekker's argument: see Reader::claim()
  // No retire() can step the epoch during the scan: it takes mutex_.
  uint64_t oldest = global_->load(std::memory_order_relaxed) + 1;
  for (const std::unique_ptr<Reader>& reader : readers_) {
    const size_t window = reader->places_->window.load(std::memory_order_relaxed);
    for (size_t place = 0; place < window; ++place) {
      // acquire: pairs with Pin::drop, so that the last read of a row under the dropped pin comes
      // before the reuse of the row's slot.
      const uint64_t epoch = reader->places_->epochs[place].load(std::memory_order_acquire);
      if (epoch != 0) oldest = std::min(oldest, epoch);
    }
  }
  if (file_ != nullptr && file_->serves()) oldest = std::min(oldest, file_->oldest());
  return oldest;
}

uint64_t Domain::oldest() const {
  const std::lock_guard<base::Mutex> lock(mutex_);
  return oldest_locked();
}

uint64_t Domain::retired_items() const {
  const std::lock_guard<base::Mutex> lock(mutex_);
  uint64_t count = 0;
  for (const Batch& batch : queue_) count += batch.items.size();
  return count;
}

void Domain::disable_pins_for_test() { pins_disabled_.store(true, std::memory_order_relaxed); }

}  // namespace petps::epoch
