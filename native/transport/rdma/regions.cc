#include "transport/rdma/regions.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>

namespace petps::transport {

using base::Status;

namespace {

// The pause between two registrations, so that many rows outside cause one registration.
constexpr std::chrono::milliseconds kPause(20);

}  // namespace

Regions::Regions(Verbs& verbs, std::function<RowMemory()> memory)
    : verbs_(verbs), memory_(std::move(memory)) {}

Regions::~Regions() { end(); }

void Regions::end() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
  const size_t count = count_.exchange(0, std::memory_order_relaxed);
  for (size_t i = 0; i < count; ++i) regions_[i].registered.reset();
}

Status Regions::start() {
  if (!memory_) return {};
  PETPS_RETURN_IF_ERROR(register_growth());
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "petps-register");
  return {};
}

void Regions::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    changed_.wait(lock, [this] { return stopping_ || is_requested_; });
    if (stopping_) return;
    lock.unlock();
    // Rows that cannot be registered are copied, so a failure here never refuses a reply.
    [[maybe_unused]] const Status status = register_growth();
    is_requested_.store(false, std::memory_order_release);
    lock.lock();
    changed_.wait_for(lock, kPause, [this] { return stopping_; });
  }
}

Status Regions::register_growth() {
  const RowMemory memory = memory_();
  if (end_ == nullptr) end_ = memory.address;
  const std::byte* const until = memory.address + memory.bytes;
  const uint64_t limit = verbs_.device().region_bytes_max;
  while (end_ < until && count_.load(std::memory_order_relaxed) < kRegionsMax) {
    auto bytes = static_cast<size_t>(until - end_);
    if (limit != 0) bytes = static_cast<size_t>(std::min<uint64_t>(bytes, limit));
    auto region = verbs_.register_memory(end_, bytes, 0);
    if (!region.ok()) return region.status();
    const size_t count = count_.load(std::memory_order_relaxed);
    regions_[count] = {end_, end_ + bytes, region.value()->local_key, std::move(region.value())};
    count_.store(count + 1, std::memory_order_release);
    bytes_.store(bytes_.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
    end_ += bytes;
  }
  return {};
}

size_t Regions::find(const std::byte* address, uint32_t& key) const {
  const size_t count = count_.load(std::memory_order_acquire);
  const auto begin = regions_.begin();
  const auto after =
      std::upper_bound(begin, begin + static_cast<ptrdiff_t>(count), address,
                       [](const std::byte* at, const Region& r) { return at < r.begin; });
  if (after == begin) return 0;
  const Region& region = *(after - 1);
  if (address >= region.end) return 0;
  key = region.key;
  return static_cast<size_t>(region.end - address);
}

}  // namespace petps::transport
