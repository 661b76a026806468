// The measurement of which way of sending rows is cheapest on this machine, from this pool's
// medium. It runs beside the first requests on a thread of its own, so that a reopened pool
// serves at once.
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#include "server/shared.h"
#include "transport/tcp/measure.h"

namespace petps::server {

namespace {

constexpr uint64_t kMeasureMs = 100;
// The rows come from this much of the medium: more than a second-level cache, but little enough
// to be read from a disk once.
constexpr size_t kSampleBytes = size_t{16} << 20;
constexpr int kNiceness = 10;  // like ingest: pulls have priority

// Memory of the pool's kind for the measurement to read: a second mapping of its file, or fresh
// anonymous memory.
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
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kNiceness);
  const Sample sample(shared.tables.pool().medium());
  if (sample.bytes().size() < transport::GatherCosts::kRowBytes.back()) return;
  auto costs = transport::measure_gather(sample.bytes(), kMeasureMs, shared.stopping);
  if (costs.ok()) {
    shared.gather->publish(costs.value());
  } else {
    shared.report_incident("gather: not measured, chosen by row bytes: " +
                           costs.status().to_string());
  }
}

}  // namespace

void start_measuring(Shared& shared) {
  if (shared.gather->wish() != transport::GatherMode::kAuto) return;
  shared.measuring = std::thread([&shared] { measure(shared); });
  pthread_setname_np(shared.measuring.native_handle(), "petps-measure");
}

}  // namespace petps::server
