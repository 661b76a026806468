// Measures which gather mode is cheapest for rows of this pool on this machine. The measurement has
// a thread of its own, so that a reopened pool serves at once.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "base/time_slice.h"
#include "server/shared.h"
#include "transport/tcp/measure.h"

namespace petps::server {

namespace {

constexpr uint64_t kMeasureMs = 100;
// Bytes of the medium that the measurement reads: more than a second-level cache, and few enough
// to read from a disk once.
constexpr size_t kSampleBytes = size_t{16} << 20;

// Memory like the pool's: a second mapping of its file, or new anonymous memory.
class Sample {
 public:
  explicit Sample(const media::Media& medium) : of_file_(medium, kSampleBytes) {
    if (!of_file_.bytes().empty()) return;
    at_ = ::mmap(nullptr, kSampleBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at_ == MAP_FAILED) return;
    ::madvise(at_, kSampleBytes, MADV_HUGEPAGE);  // as media does
    std::memset(at_, 1, kSampleBytes);            // untouched pages would all be the same zero page
  }
  ~Sample() {
    if (at_ != MAP_FAILED) ::munmap(at_, kSampleBytes);
  }
  Sample(const Sample&) = delete;
  Sample& operator=(const Sample&) = delete;
  std::span<const std::byte> bytes() const {
    if (at_ == MAP_FAILED) return of_file_.bytes();
    return {static_cast<const std::byte*>(at_), kSampleBytes};
  }

 private:
  media::SecondMapping of_file_;
  void* at_ = MAP_FAILED;
};

void measure(Shared& shared) {
  base::lower_priority();
  const Sample sample(shared.tables.pool().medium());
  if (sample.bytes().size() < transport::GatherCosts::kRowBytes.back()) return;
  auto costs = transport::measure_gather(sample.bytes(), kMeasureMs, shared.stopping);
  if (costs.ok()) {
    shared.gather->publish(costs.value());
  } else {
    shared.report_incident(
        "gather: the costs could not be measured, so the mode is chosen by row bytes: " +
        costs.status().to_string());
  }
}

}  // namespace

void start_measuring(Shared& shared) {
  if (shared.gather->configured() != transport::GatherMode::kAuto) return;
  shared.measuring = std::thread([&shared] { measure(shared); });
  pthread_setname_np(shared.measuring.native_handle(), "petps-measure");
}

}  // namespace petps::server
